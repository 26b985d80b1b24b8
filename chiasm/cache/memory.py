"""An entry store in the memory of one process, for the system that runs in one process."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from chiasm.cache.place import InMemory, Place
from chiasm.cache.sealed import EntryKey, Sealable, Sealed
from chiasm.cache.store import NOBODY, Lease, Pinned, StoreStats, full


@dataclass(slots=True)
class _Kept:
    sealed: Sealed
    owner: bytes
    used: float  # by the store's clock
    leases: dict[bytes, float] = field(default_factory=dict)  # when each pin ends, by the store's clock

    def pinned(self, now: float) -> bool:
        self.leases = {name: end for name, end in self.leases.items() if end > now}
        return bool(self.leases)


class MemoryStore:
    """`EntryStore` with a byte budget and least-recently-used eviction; pinned entries stay.

    Args:
        budget: bytes of entries at most, pinned ones included.
        owner_budget: bytes of these that one owner may hold; None for all.
        ttl: seconds after which an entry that nobody has used or pinned since is a miss; None for never.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        budget: int,
        *,
        owner_budget: int | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget = budget
        self._owner_budget = budget if owner_budget is None else min(owner_budget, budget)
        self._ttl = math.inf if ttl is None else ttl
        self._clock = clock
        self._kept: OrderedDict[EntryKey, _Kept] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._counts = dict.fromkeys(("puts", "hits", "misses", "evictions", "refusals"), 0)

    async def put(
        self,
        entry: Sealable,
        key: EntryKey,
        *,
        lease: Lease | None = None,
        owner: bytes = NOBODY,
        shared: bool = False,
    ) -> Place:
        sealed = await entry.sealed()
        before = self._kept.get(key)
        leases = {} if before is None else before.leases
        self._make_room(sealed.size, owner, replacing=key)
        self._remove(key)
        self._kept[key] = kept = _Kept(sealed, owner, self._clock(), leases)
        if lease is not None:
            self._pin(kept, lease)
        self._bytes += sealed.size
        self._counts["puts"] += 1
        return InMemory()

    async def pin(self, key: EntryKey, lease: Lease, *, owner: bytes = NOBODY, shared: bool = False) -> Pinned | None:
        kept = self._find(key)
        if kept is None:
            return None
        self._pin(kept, lease)
        return Pinned(kept.sealed.header, InMemory())

    async def claim(self, key: EntryKey, seconds: float) -> bool:
        """Always: nobody else makes entries here."""
        return True

    async def unclaim(self, key: EntryKey) -> None:
        """Nothing was taken."""

    async def get(self, key: EntryKey, place: Place | None = None, *, owner: bytes = NOBODY) -> Sealed | None:
        kept = self._find(key, here=place is None or isinstance(place, InMemory))
        return None if kept is None else kept.sealed

    async def release(self, key: EntryKey, lease_id: bytes) -> None:
        kept = self._kept.get(key)
        if kept is not None:
            kept.leases.pop(lease_id, None)

    async def discard(self, key: EntryKey) -> None:
        self._remove(key)

    async def flush(self) -> None:
        now = self._clock()
        for key in [key for key, kept in self._kept.items() if not kept.pinned(now)]:
            self._remove(key)

    def held(self) -> list[EntryKey]:
        """Every key, least recently used first."""
        return list(self._kept)

    def stats(self) -> StoreStats:
        now = self._clock()
        pinned = sum(kept.sealed.size for kept in self._kept.values() if kept.pinned(now))
        return StoreStats(
            entries=len(self._kept), bytes=self._bytes, pinned_bytes=pinned, budget=self._budget, **self._counts
        )

    def _find(self, key: EntryKey, *, here: bool = True) -> _Kept | None:
        kept = self._kept.get(key) if here else None
        now = self._clock()
        if kept is None or (now - kept.used > self._ttl and not kept.pinned(now)):
            self._counts["misses"] += 1
            return None
        self._counts["hits"] += 1
        kept.used = now
        self._kept.move_to_end(key)
        return kept

    def _pin(self, kept: _Kept, lease: Lease) -> None:
        kept.leases[lease.id] = self._clock() + lease.seconds

    def _make_room(self, size: int, owner: bytes, *, replacing: EntryKey) -> None:
        """Evicts the least recently used entries that nobody has pinned, all or none, or refuses. An owner who would
        hold more than its budget gives up its own before anybody else's."""
        now = self._clock()
        budget = self._budget if owner == NOBODY else self._owner_budget
        needed = self._bytes + size - self._budget
        over = -1 if budget == self._budget else self._of(owner) + size - budget
        mine_first = over > 0
        victims = []
        if needed > 0 or mine_first:
            going = [(key, kept) for key, kept in self._kept.items() if not kept.pinned(now)]
            # What is replaced goes before all others.
            going.sort(key=lambda item: (item[0] != replacing, mine_first and item[1].owner != owner))
            for key, kept in going:
                if needed <= 0 and over <= 0:
                    break
                victims.append(key)
                needed -= kept.sealed.size
                over -= kept.sealed.size if kept.owner == owner else 0
        if needed > 0 or over > 0:
            self._counts["refusals"] += 1
            raise full(size, budget)
        for key in victims:
            self._remove(key)
            self._counts["evictions"] += key != replacing

    def _of(self, owner: bytes) -> int:
        """Bytes that an owner holds."""
        return sum(kept.sealed.size for kept in self._kept.values() if kept.owner == owner)

    def _remove(self, key: EntryKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= kept.sealed.size
