"""Where workers may be found, as a protocol: addresses that come and go. Who answers there is for the fleet to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from router.member import addresses

Role: TypeAlias = Literal["encoder", "decoder"]


class Membership(Protocol):
    """The addresses of workers, as somebody else knows them."""

    async def targets(self, role: Role) -> list[str]:
        """What a channel takes, for each worker there may be now."""
        ...

    async def changed(self) -> None:
        """Returns when `targets` may answer otherwise than before."""
        ...

    def asleep(self, model: str) -> bool:
        """Whether a model's encoders rest, and are woken by whoever waits for one."""
        ...


class Named:
    """Fixed addresses and DNS names, looked up again at every beat.

    Args:
        beat: seconds.
    """

    def __init__(self, encoders: Sequence[str], decoders: Sequence[str], *, beat: float) -> None:
        self._names: dict[Role, tuple[str, ...]] = {"encoder": tuple(encoders), "decoder": tuple(decoders)}
        self._beat = beat

    async def targets(self, role: Role) -> list[str]:
        return [address for name in self._names[role] for address in await addresses(name)]

    async def changed(self) -> None:
        await asyncio.sleep(self._beat)

    def asleep(self, model: str) -> bool:
        return False
