"""Two stores as one: a near one, which one node has to itself, in front of a far one, which nodes share.

The near one decides. An entry is put there, and written to the far one as well, at once or a little later; what is read
from the far one is put into the near one on its way. The far one may fail in every way that it knows: then an entry is
where it would be without it. Only what is to be shared has to be far, and is refused while it cannot. Neither is
believed: whoever reads verifies, and what it discards is forgotten by both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Final

from chiasm.cache.behind import Behind
from chiasm.cache.place import Elsewhere, InRedis, Place
from chiasm.cache.redis import RedisStore
from chiasm.cache.sealed import EntryKey, Sealable, Sealed
from chiasm.cache.store import NOBODY, EntryStore, Lease, Pinned, StoreStats
from chiasm.errors import Overloaded

BEHIND_BYTES: Final = 256 << 20

RETRY: Final = 0.25
"""Seconds after which a far store that took nothing may be tried again."""

PATIENCE: Final = 15.0
"""Seconds of an outage of the far store that a reader waits for, who has no other."""


class WritePolicy(StrEnum):
    """When an entry is written to the far store: before its put returns, or a little later.

    One that is put to be shared is always written before.
    """

    THROUGH = "through"
    BEHIND = "behind"


class TieredStore:
    """`EntryStore` over two others. What it counts and holds is told of both together by `stats`: asked of it, and held
    by the near one. `tiers` tells of each.

    Args:
        far: puts of which raise nothing (`RedisStore.put`).
        behind_bytes: that may wait to be written behind; further entries are near alone.
    """

    def __init__(
        self,
        near: EntryStore,
        far: RedisStore,
        *,
        policy: WritePolicy = WritePolicy.BEHIND,
        behind_bytes: int = BEHIND_BYTES,
        near_name: str = "arena",
    ) -> None:
        self.near = near
        self.far = far
        self.behind = Behind(behind_bytes)
        self._policy = policy
        self._near_name = near_name
        self._fetching: dict[EntryKey, asyncio.Task[Sealed | None]] = {}
        self._overtaken: set[EntryKey] = set()  # of those, the ones that were put, or forgotten, since they began
        self._arriving: set[EntryKey] = set()  # and the ones that are being put near
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
        """As `EntryStore.put`. An entry that is to be shared is put far, and near as well if there is room. It is not
        pinned near: who would give that pin back has another store.

        Raises Overloaded as the near store does; SHARED_STORE, retryable, for one that is to be shared while the far
        store does not take it: its reader has no other way to it.
        """
        far = partial(self.far.put, entry, key, lease=lease, owner=owner, shared=shared)
        self.behind.forget(key)
        await self._overtake(key)
        if shared:
            await self.behind.written(key)  # an older one, which would be there in the end
            place = await far()
            if isinstance(place, Elsewhere):
                self._counts["refusals"] += 1
                raise _refused(entry.size, ever=self.far.takes(entry.size))
            with suppress(Overloaded):
                await self.near.put(entry, key, owner=owner)
        else:
            try:
                place = await self.near.put(entry, key, lease=lease, owner=owner)
            except Overloaded:
                self._counts["refusals"] += 1
                raise
            if self._policy is WritePolicy.THROUGH:
                await self.behind.written(key)
                await far()
            else:
                self.behind.add(key, entry.size, far)
        self._counts["puts"] += 1
        return place

    async def pin(self, key: EntryKey, lease: Lease, *, owner: bytes = NOBODY, shared: bool = False) -> Pinned | None:
        """As `EntryStore.pin`. What is far only is brought near for it; where there is no room, it is kept far. What is
        to be shared stays far, and is written there if it was only near; where that cannot be done it is a miss."""
        if shared:
            pinned = await self._share(key, lease, owner)
            self._count(pinned is not None)
            return pinned
        pinned = await self.near.pin(key, lease)
        if pinned is None and await self._fetch(key, owner) is not None:
            pinned = await self.near.pin(key, lease) or await self.far.pin(key, lease)
        self._count(pinned is not None)
        return pinned

    async def claim(self, key: EntryKey, seconds: float) -> bool:
        return await self.near.claim(key, seconds) and await self.far.claim(key, seconds)

    async def unclaim(self, key: EntryKey) -> None:
        """As `EntryStore.unclaim`, when what is to be written behind is written: others look for it there."""
        await self.near.unclaim(key)
        await self.behind.arrived(key)
        await self.far.unclaim(key)

    async def get(self, key: EntryKey, place: Place | None = None, *, owner: bytes = NOBODY) -> Sealed | None:
        """The entry where it was announced, else wherever it lies, here or far: a place in another node's store says
        that it may be far. One that was announced far is waited for while the far store is left alone, `PATIENCE`
        seconds from when it began to be."""
        sealed = None
        if not isinstance(place, Elsewhere):
            sealed = await self.near.get(key, None if isinstance(place, InRedis) else place)
            if sealed is None and place is not None and not isinstance(place, InRedis):
                sealed = await self.near.get(key)
            if sealed is None:
                sealed = await self._fetch(key, owner, place if isinstance(place, InRedis) else None)
            if sealed is None and isinstance(place, InRedis) and await self.far.link.breaker.mended(PATIENCE):
                sealed = await self._fetch(key, owner, place)  # it was made elsewhere, and comes no other way
        self._count(sealed is not None)
        return sealed

    async def release(self, key: EntryKey, lease_id: bytes) -> None:
        await self.near.release(key, lease_id)

    async def discard(self, key: EntryKey) -> None:
        """Whatever is on its way to either store is there before it is forgotten, or does not arrive."""
        self.behind.forget(key)
        await self._overtake(key)
        await self.near.discard(key)
        await self.behind.written(key)
        await self.far.discard(key)

    async def flush(self) -> None:
        """Forgets what is not pinned near, everything far, and what is on its way to either. Raises what either raises;
        the other is flushed all the same."""
        self.behind.clear()
        for key in list(self._fetching):
            await self._overtake(key)
        try:
            await self.near.flush()
        finally:
            await self.behind.paused()
            await self.far.flush()

    def stats(self) -> StoreStats:
        near = self.near.stats()
        return StoreStats(
            entries=near.entries,
            bytes=near.bytes,
            pinned_bytes=near.pinned_bytes,
            budget=near.budget,
            evictions=near.evictions,
            **self._counts,
        )

    def tiers(self) -> Mapping[str, StoreStats]:
        """Of each store, by its name."""
        return {self._near_name: self.near.stats(), "redis": self.far.stats()}

    async def aclose(self) -> None:
        """Drops what was to be written behind, and closes the far store."""
        for task in self._fetching.values():
            task.cancel()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)
        await self.behind.close()
        await self.far.close()

    async def _share(self, key: EntryKey, lease: Lease, owner: bytes) -> Pinned | None:
        """An entry pinned far. None where it is nowhere, or the far store cannot be written."""
        there = await self.far.pin(key, lease)
        if there is None and (sealed := await self.near.get(key)) is not None:
            place = await self.far.put(sealed, key, lease=lease, owner=owner, shared=True)
            return None if isinstance(place, Elsewhere) else Pinned(sealed.header, place)
        return there

    async def _fetch(self, key: EntryKey, owner: bytes, place: InRedis | None = None) -> Sealed | None:
        """An entry that is far, brought near if there is room. Those who ask at a time share one reading, and who
        leaves takes it from nobody."""
        task = self._fetching.get(key)
        if task is None:
            self._fetching[key] = task = asyncio.create_task(self._promote(key, owner, place))
            task.add_done_callback(lambda _: self._fetched(key))
        return await asyncio.shield(task)

    def _fetched(self, key: EntryKey) -> None:
        self._fetching.pop(key, None)
        self._overtaken.discard(key)

    async def _overtake(self, key: EntryKey) -> None:
        """What is being read from far is near when this returns, or is not put there any more."""
        if key in self._arriving:
            await asyncio.wait([self._fetching[key]])
        elif key in self._fetching:
            self._overtaken.add(key)

    async def _promote(self, key: EntryKey, owner: bytes, place: InRedis | None) -> Sealed | None:
        sealed = await self.far.get(key, place)
        if sealed is not None and key not in self._overtaken:
            self._arriving.add(key)
            try:
                with suppress(Overloaded):
                    await self.near.put(sealed, key, owner=owner)
            finally:
                self._arriving.discard(key)
        return sealed

    def _count(self, found: bool) -> None:
        self._counts["hits" if found else "misses"] += 1


def _refused(size: int, *, ever: bool) -> Overloaded:
    if not ever:
        return Overloaded(
            "SHARED_STORE",
            f"an entry of {size} bytes is more than is sent to the store that nodes share",
            facts={"needed": size},
        )
    return Overloaded("SHARED_STORE", "the store that nodes share takes no entries for now", retry_after=RETRY)
