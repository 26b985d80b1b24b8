"""Media that ended the processes which opened them are not opened again for a while, for the tenant they came from.

It knows digests and clocks, no media.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import blake3

from chiasm.errors import InvalidRequest

POISON = "POISON_INPUT"


class Quarantine:
    """Remembers poison per tenant.

    Args:
        seconds: how long.
        most: digests remembered; the oldest is forgotten first.
        clock: seconds, monotonic.
    """

    def __init__(
        self, *, seconds: float = 600.0, most: int = 4096, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def check(self, tenant: bytes, medium: bytes) -> None:
        """Raises InvalidRequest POISON_INPUT for a medium of that tenant that is remembered.

        Args:
            medium: its digest (`chiasm.rpc.medium`), so that it is refused without its bytes too.
        """
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if self._until and _name(tenant, medium) in self._until:
            raise InvalidRequest(
                POISON,
                f"this medium ended the processes that opened it; it is not opened for {self._seconds:g} s",
                facts={"seconds": self._seconds},
            )

    def remember(self, tenant: bytes, medium: bytes) -> None:
        """Keeps a medium of a tenant from being opened again."""
        name = _name(tenant, medium)
        self._until.pop(name, None)
        self._until[name] = self._clock() + self._seconds
        if len(self._until) > self._most:
            self._until.popitem(last=False)


def _name(tenant: bytes, medium: bytes) -> bytes:
    """Of one tenant's medium. The tenant's root is a secret and kept nowhere."""
    return blake3.blake3(medium, key=tenant).digest()
