"""An entry store in the memory that all workers of a node share, so that it outlives every one of them.

What is whose is written in the region itself (`chiasm.cache.ledger`), under one lock that is held for moments: never
while an entry is copied. Reading takes no lock at all. An entry is looked at before and after it is copied out, and
one that was given away in between is a miss; whether the bytes are right is for the reader to say (`open_entry`).

A writer that dies leaves its half-written entry, which goes as soon as anybody needs room; one that died or stopped
with the lock hangs nobody: whoever waits too long for it is refused, or misses.

Pins end by the clock of the boot, which is one for all processes, so those of the dead end too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from chiasm.cache.columns import Array
from chiasm.cache.hands import by_hand
from chiasm.cache.ledger import Ledger, Totals
from chiasm.cache.pins import Pin
from chiasm.cache.place import InArena, Place
from chiasm.cache.records import Extent, Step
from chiasm.cache.region import HEADER_BYTES, Region
from chiasm.cache.sealed import SMALL, EntryKey, Sealable, Sealed
from chiasm.cache.store import NOBODY, Lease, Pinned, StoreStats
from chiasm.errors import Overloaded

_KEY_BYTES, _LEASE_BYTES = 32, 16

_POLL = 0.0005
"""Seconds between two tries to take the lock."""

_TRIES = 3
"""How often an entry is looked for that is put again each time while it is copied out."""


class ArenaStore:
    """`EntryStore` over a region. Its counts are those of this process, what is held is the whole node's.

    Args:
        region: opened by this process for this store alone, and closed by whoever opened it after the last call here
            has returned.
        owner_budget: bytes that one owner may hold; None for all.
        ttl: seconds after which an entry that nobody has used or pinned since is a miss; None for never.
        clock: seconds, monotonic, the same for all processes.
        patience: seconds to wait for a lock that another process holds.
        step: see `chiasm.cache.records.Step`.
    """

    def __init__(
        self,
        region: Region,
        *,
        owner_budget: int | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        patience: float = 1.0,
        step: Step = lambda name: None,
    ) -> None:
        self._region = region
        self._ledger = Ledger(
            region.body,
            owner_budget=owner_budget,
            ttl=None if ttl is None else int(ttl * 1e9),
            step=step,
        )
        self._clock = clock
        self._patience = patience
        self._step = step
        self._held = _Held(region)
        self._entered = False
        self._counts = dict.fromkeys(("puts", "hits", "misses", "refusals"), 0)

    async def put(
        self,
        entry: Sealable,
        key: EntryKey,
        *,
        lease: Lease | None = None,
        owner: bytes = NOBODY,
        shared: bool = False,
    ) -> Place:
        """As `EntryStore.put`. Raises Overloaded CACHE_BUSY too, retryable, if another process keeps the lock."""
        sizes = (entry.payload.nbytes, len(entry.header), entry.tag_bytes)
        try:
            with await self._locked():
                now = self._now()
                self._ledger.reclaim(self._region.alive)
                pin = None if lease is None else self._pin(lease, now)
                extent = self._ledger.reserve(key, *sizes, writer=self._region.slot, now=now, pin=pin, owner=owner)
        except Overloaded:
            self._counts["refusals"] += 1
            raise
        try:
            await self._write(entry, extent)
            with await self._locked():
                self._ledger.publish(extent, now=self._now())
        except BaseException:
            self._ledger.abandon(extent)
            raise
        self._counts["puts"] += 1
        return self._place(extent)

    async def pin(self, key: EntryKey, lease: Lease, *, owner: bytes = NOBODY, shared: bool = False) -> Pinned | None:
        """As `EntryStore.pin`. A miss as well if another process keeps the lock."""
        try:
            with await self._locked():
                now = self._now()
                extent = self._ledger.pin(key, self._pin(lease, now), now=now)
                header = b"" if extent is None else self._parts(extent)[1].tobytes()
        except _Busy:
            extent = None
        self._count(extent is not None)
        return None if extent is None else Pinned(header, self._place(extent))

    async def claim(self, key: EntryKey, seconds: float) -> bool:
        """Always: equal media of one node go to one encoder."""
        return True

    async def unclaim(self, key: EntryKey) -> None:
        """Nothing was taken."""

    async def get(self, key: EntryKey, place: Place | None = None, *, owner: bytes = NOBODY) -> Sealed | None:
        """As `EntryStore.get`. Where a place was given away since, the entry is looked for under its key: it may only
        have been put again."""
        for extent in self._seek(key, place):
            sealed = await self._read(extent)
            if sealed is not None:
                self._count(True)
                return sealed
        self._count(False)
        return None

    async def release(self, key: EntryKey, lease_id: bytes) -> None:
        if (len(key), len(lease_id)) != (_KEY_BYTES, _LEASE_BYTES):
            return  # a broken announcement, which pinned nothing
        with suppress(_Busy), await self._locked():  # then it ends by itself
            self._ledger.unpin(key, lease_id)

    async def discard(self, key: EntryKey) -> None:
        with suppress(_Busy), await self._locked():  # then the next reader finds it wrong too
            self._ledger.discard(key)

    async def flush(self) -> None:
        """As `EntryStore.flush`. Raises Overloaded CACHE_BUSY if another process keeps the lock."""
        with await self._locked():
            self._ledger.reclaim(self._region.alive)
            self._ledger.flush(now=self._now())

    def stats(self) -> StoreStats:
        usage = self._ledger.usage(now=self._now())
        return StoreStats(
            **usage._asdict(), budget=self._ledger.capacity, evictions=self._ledger.evictions, **self._counts
        )

    def totals(self) -> Totals:
        """What all processes of the node did since the region was made."""
        return self._ledger.totals()

    async def _locked(self) -> _Held:
        """Takes the region's lock, `with await`, for a few lines that await nothing. Raises _Busy."""
        end = time.monotonic() + self._patience
        while not self._region.try_lock():
            if time.monotonic() >= end:
                raise _Busy("CACHE_BUSY", "another process keeps the arena's lock", retry_after=0.1)
            await asyncio.sleep(_POLL)
        try:
            self._step("locked")
            if not self._entered:  # whatever is written in the name of this slot is of the dead who had it before
                self._ledger.reclaim(lambda slot: slot != self._region.slot)
                self._entered = True
        except BaseException:
            self._region.unlock()
            raise
        return self._held

    async def _write(self, entry: Sealable, extent: Extent) -> None:
        if extent.size <= SMALL:
            self._fill(entry, extent)
            return
        await by_hand(lambda: self._fill(entry, extent))  # it cannot be stopped, and the extent is its own until then

    def _fill(self, entry: Sealable, extent: Extent) -> None:
        payload, header, tag = self._parts(extent)
        made = entry.copy_into(payload)
        self._step("copying")
        header[:] = np.frombuffer(entry.header, np.uint8)
        tag[:] = np.frombuffer(made, np.uint8)

    async def _read(self, extent: Extent) -> Sealed | None:
        if extent.size <= SMALL:
            return self._copy(extent)
        return await by_hand(lambda: self._copy(extent))

    def _copy(self, extent: Extent) -> Sealed | None:
        payload, header, tag = (part.copy() for part in self._parts(extent))
        self._step("reading")
        if not self._ledger.holds(extent):
            return None
        self._ledger.touch(extent, now=self._now())
        return Sealed(header.tobytes(), payload.data, tag.tobytes())

    def _parts(self, extent: Extent) -> list[Array]:
        """Payload, header and tag where they lie."""
        start = extent.start
        parts = []
        for nbytes in (extent.payload, extent.header, extent.tag):
            parts.append(self._ledger.data[start : start + nbytes])
            start += nbytes
        return parts

    def _seek(self, key: EntryKey, place: Place | None) -> Iterator[Extent]:
        """Where the entry may be, each found when the one before it had gone."""
        if place is not None:
            if not isinstance(place, InArena) or place.arena_id != self._region.arena_id:
                return
            extent = self._ledger.at(place.generation, key, now=self._now())
            if extent is not None and self._place(extent) == place:
                yield extent
        for _ in range(_TRIES):
            extent = self._ledger.find(key, now=self._now())
            if extent is None:
                return
            yield extent

    def _place(self, extent: Extent) -> InArena:
        offset = HEADER_BYTES + self._ledger.offset + extent.start
        return InArena(self._region.arena_id, offset, extent.generation)

    def _pin(self, lease: Lease, now: int) -> Pin:
        return Pin(lease.id, now + int(lease.seconds * 1e9))

    def _now(self) -> int:
        return int(self._clock() * 1e9)

    def _count(self, found: bool) -> None:
        self._counts["hits" if found else "misses"] += 1


class _Held:
    """The region's lock, until a block ends."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        self._region.unlock()


class _Busy(Overloaded):
    """CACHE_BUSY: another process keeps the lock."""
