"""The units of one `Encode` call on their way through the engine: a few at a time, told in order, unpinned if nobody
is left to attach them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple

from chiasm.cache import wire
from chiasm.cache.form import Form
from chiasm.cache.store import Lease
from chiasm.media.types import Rgb
from chiasm.models.family import MediumPlan
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service.engine import Announced, EncoderEngine

AHEAD = 8
"""Units of one call that are in the engine at a time."""


class _Flying(NamedTuple):
    number: int
    lease: Lease
    task: asyncio.Task[Announced]


class Announcing:
    """Announces the units of one medium.

    Args:
        seconds: how long an entry stays pinned if nobody attaches it.
        form: of the entries; by default the engine's.
        afresh: encodes whatever the store holds.

    Attributes:
        cached: units told so far that were in the store already.
    """

    def __init__(
        self,
        engine: EncoderEngine,
        plan: MediumPlan,
        *,
        root: bytes,
        seconds: float,
        form: Form | None = None,
        afresh: bool = False,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._root = root
        self._seconds = seconds
        self._form = form
        self._afresh = afresh
        self._flying: deque[_Flying] = deque()
        self._told: list[tuple[bytes, bytes]] = []  # key and lease of each entry told
        self.cached = 0

    def start(self, number: int, frame: Rgb) -> None:
        """Sends a decoded frame, unit `number` of its medium, on its way."""
        lease = Lease.of(self._seconds)
        announcing = self._engine.announce(
            frame, self._plan, root=self._root, lease=lease, form=self._form, afresh=self._afresh
        )
        self._flying.append(_Flying(number, lease, asyncio.create_task(announcing)))

    async def ready(self, *, every: bool) -> AsyncGenerator[epb.EncodeReady, None]:
        """Tells the units that are done, in order, and waits for one if too many are under way; or for every unit."""
        while self._flying and (every or self._flying[0].task.done() or len(self._flying) >= AHEAD):
            number, lease, task = self._flying[0]
            announced = await task
            self._flying.popleft()
            self.cached += announced.cached
            self._told.append((announced.contract.key, lease.id))
            entry = wire.announce(announced.contract, announced.place)
            entry.lease.lease_id = lease.id
            entry.lease.expire_time.FromNanoseconds(int((time.time() + lease.seconds) * 1e9))
            yield epb.EncodeReady(unit=number, entry=entry, cached=announced.cached)

    async def abandon(self) -> None:
        """The caller has left before the end: nothing more is encoded for it, and no pin of it is kept."""
        for flying in self._flying:
            flying.task.cancel()
        results = await asyncio.gather(*(flying.task for flying in self._flying), return_exceptions=True)
        for flying, result in zip(self._flying, results, strict=True):
            if isinstance(result, Announced):
                self._told.append((result.contract.key, flying.lease.id))
        for key, lease_id in self._told:
            await self._engine.store.release(key, lease_id)
