"""The units of one `Encode` call on their way through the engine: a few at a time, told in order, unpinned if nobody
is left to attach them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import NamedTuple

from chiasm.cache import wire
from chiasm.cache.form import Form
from chiasm.cache.sealed import EntryKey
from chiasm.cache.store import Lease
from chiasm.media.types import Rgb
from chiasm.models.family import MediumPlan
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service.batcher import Share
from encoder_service.engine import Announced, EncoderEngine

AHEAD = 8
"""Units of one call that are in the engine, or done and not told yet, at a time."""

UNRESIZED = 2
"""Of those, units whose frames are still as large as they were decoded while another is asked for."""


class _Flying(NamedTuple):
    number: int
    lease: Lease
    task: asyncio.Task[Announced]


class Announcing:
    """Announces the units of one medium, as a block: one that fails gives up what is on its way, and every pin. One
    side starts units and ends, another tells them.

    Args:
        seconds: how long an entry stays pinned if nobody attaches it.
        form: of the entries; by default the engine's.
        afresh: encodes whatever the store holds.
        share: of the call; by default one of its own.
        shared: the reader is on another node.

    Attributes:
        cached: units told so far that were in the store already.
        keys: of the entries of the units told or named so far.
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
        share: Share | None = None,
        shared: bool = False,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._root = root
        self._seconds = seconds
        self._form = engine.forms[0] if form is None else form
        self._afresh = afresh
        self._share = share or engine.share(root)
        self._shared = shared
        self._raw = 0
        self._resized = asyncio.Event()
        self._flying: deque[_Flying] = deque()
        self._changed = asyncio.Condition()
        self._ended = False
        self._error: Exception | None = None
        self._told: list[tuple[EntryKey, bytes]] = []  # key and lease of each entry told
        self.cached = 0
        self.keys: dict[int, EntryKey] = {}

    async def __aenter__(self) -> Announcing:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            await self._abandon()

    async def start(self, number: int, frames: Sequence[Rgb]) -> None:
        """Sends decoded frames, unit `number` of their medium, on their way. Waits while too many are under way."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._flying) < AHEAD)
            lease = Lease.of(self._seconds)
            self._raw += 1
            self._flying.append(_Flying(number, lease, asyncio.create_task(self._announce(frames, lease))))
            self._changed.notify_all()

    async def resized(self) -> None:
        """Waits until another frame may be asked for: few units that were started are as large as they came."""
        while self._raw >= UNRESIZED:
            self._resized.clear()
            await self._resized.wait()

    async def _announce(self, frames: Sequence[Rgb], lease: Lease) -> Announced:
        try:
            unit = await self._engine.prepare(frames, self._plan, root=self._root, form=self._form)
        finally:
            del frames
            self._raw -= 1
            self._resized.set()
        return await self._engine.announce_unit(
            unit, lease=lease, afresh=self._afresh, share=self._share, shared=self._shared
        )

    async def end(self, error: Exception | None = None) -> None:
        """Nothing more is started, because all was or because of an error, which `ready` then raises."""
        async with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    async def ready(self) -> AsyncGenerator[epb.EncodeReady, None]:
        """Tells each unit when it is done, in the order in which they were started, until all are told that ever will
        be."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._flying or self._ended)
            if self._error is not None:
                raise self._error
            if not self._flying:
                return
            number, lease, task = self._flying[0]
            announced = await task
            async with self._changed:
                self._flying.popleft()
                self._changed.notify_all()
            yield self._tell(number, announced, lease)

    async def name(self, number: int, frames: Sequence[Rgb]) -> None:
        """Finds out which entry unit `number` would have, and makes none."""
        self.keys[number] = (await self._engine.prepare(frames, self._plan, root=self._root, form=self._form)).key

    async def find(self, number: int, key: EntryKey) -> epb.EncodeReady | None:
        """Tells unit `number`, whose entry has that key, if it is in the store."""
        lease = Lease.of(self._seconds)
        contract = self._engine.contract(key, self._plan.grid, self._form)
        announced = await self._engine.known(contract, lease, root=self._root, shared=self._shared)
        return None if announced is None else self._tell(number, announced, lease)

    def _tell(self, number: int, announced: Announced, lease: Lease) -> epb.EncodeReady:
        self.cached += announced.cached
        self.keys[number] = announced.contract.key
        self._told.append((announced.contract.key, lease.id))
        entry = wire.announce(announced.contract, announced.place)
        entry.lease.lease_id = lease.id
        entry.lease.expire_time.FromNanoseconds(int((time.time() + lease.seconds) * 1e9))
        return epb.EncodeReady(unit=number, entry=entry, cached=announced.cached)

    async def _abandon(self) -> None:
        """The caller has left before the end: nothing more is encoded for it, and no pin of it is kept."""
        for flying in self._flying:
            flying.task.cancel()
        results = await asyncio.gather(*(flying.task for flying in self._flying), return_exceptions=True)
        for flying, result in zip(self._flying, results, strict=True):
            if isinstance(result, Announced):
                self._told.append((result.contract.key, flying.lease.id))
        for key, lease_id in self._told:
            await self._engine.store.release(key, lease_id)
