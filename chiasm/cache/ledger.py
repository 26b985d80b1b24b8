"""Which bytes of a region are whose: records of entries, pins, and the room that is left between them.

Everything is in the region, as arrays over it, and zero bytes are an empty ledger. There is no list of free room: it is
what no record covers. A record is filled first and becomes one by its state, last; it ends by its state, first. So a
process that is killed between any two instructions leaves a ledger that is right, and at worst a record that is being
written by nobody, which the next who needs room takes back. What is written over it by others may lose entries; it
leads nobody out of the region.

A generation names one writing of one entry for ever: a serial number that only grows, and the number of the record in
its lowest bits, so that a place is found without a search and a place given away is known for one.

Methods marked *locked* are called by who holds the region's lock. The others may be called at any time: what they read
may be gone when they return, and `holds` says so.

This module knows no file, no lock and no bytes of an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from chiasm.cache.columns import ALIGNMENT, Array, Carver, aligned
from chiasm.cache.order import ByStart
from chiasm.cache.pins import Pin, Pins
from chiasm.cache.room import make_room
from chiasm.cache.store import NOBODY, full

_FREE, _WRITING, _READY = 0, 1, 2
_BITS = 16  # of a generation that number the record
_SERIAL, _RECORDS, _REPLACEMENTS = 0, 1, 2  # counters: the last serial; records ever used; entries ever replaced
_PUTS, _EVICTIONS, _ASKED, _FOUND = 3, 4, 5, 6  # and of all processes since the region was made: see `Totals`
_FIRST: Final = -(1 << 62)
"""When it was used, for one that goes before all others."""

Step = Callable[[str], None]
"""Is told what is done next. For tests that stop or kill a process there."""


class Extent(NamedTuple):
    """One writing of one entry, and the bytes that are its own: `[start, start + size)` of the data, payload first."""

    generation: int
    start: int
    payload: int
    header: int
    tag: int

    @property
    def record(self) -> int:
        """The number of its record."""
        return _record(self.generation)

    @property
    def size(self) -> int:
        """Bytes charged for it."""
        return aligned(self.payload + self.header + self.tag)


class Usage(NamedTuple):
    """What is there. Bytes include what is being written."""

    entries: int
    bytes: int
    pinned_bytes: int


class Totals(NamedTuple):
    """What all processes did since the region was made.

    Attributes:
        asked, found: entries that were to be pinned, and those of them that were there.
    """

    puts: int
    evictions: int
    asked: int
    found: int


class Ledger:
    """The ledger of a region. All times are nanoseconds of one clock that every process has.

    Args:
        body: of the region (`Region.body`).
        owner_budget: bytes that one owner may hold; None for all. `NOBODY` may hold all in any case.
        ttl: time after which an entry that nobody has used or pinned since is not found any more; None for never.

    Attributes:
        data: the bytes that entries lie in, as uint8.
        offset: of `data` in `body`.
        capacity: bytes of `data`.
        evictions: by this process.
    """

    def __init__(
        self,
        body: memoryview,
        *,
        owner_budget: int | None = None,
        ttl: int | None = None,
        step: Step = lambda name: None,
    ) -> None:
        count = min(max(body.nbytes // (16 << 10), 1 << 10), 1 << _BITS)
        carve = Carver(body)
        self._counters = carve(np.uint64, 8)
        self._state = carve(np.uint8, count)
        self._writer = carve(np.uint32, count)
        self._generation = carve(np.uint64, count)
        self._key = carve(np.uint64, 4, count)
        self._start = carve(np.uint64, count)
        self._payload = carve(np.uint64, count)
        self._header = carve(np.uint64, count)
        self._tag = carve(np.uint64, count)
        self._size = carve(np.uint64, count)
        self._owner = carve(np.uint64, count)
        self._used = carve(np.int64, count)  # when it was last asked for
        self._pins = Pins(carve, count)
        self.offset = carve.offset
        self.capacity = (body.nbytes - carve.offset) // ALIGNMENT * ALIGNMENT
        self.data = carve(np.uint8, self.capacity)
        self.owner_budget = self.capacity if owner_budget is None else min(owner_budget, self.capacity)
        self.evictions = 0
        self._ttl = ttl
        self._by_start = ByStart(self._generation, self._start, self._size, self.capacity)
        self._step = step

    def find(self, key: bytes, *, now: int) -> Extent | None:
        """The entry under a key. If a writer died while it replaced one there may be two; the newer one counts."""
        while True:
            replacements = int(self._counters[_REPLACEMENTS])
            found = max(self._entries(key), default=None)
            # One that is replaced just now may be missed in both its places: seen too late in the old, too early in
            # the new.
            if found is not None or replacements == self._counters[_REPLACEMENTS]:
                return self._fresh(found, now)

    def at(self, generation: int, key: bytes, *, now: int) -> Extent | None:
        """The entry of that generation, if it is still there and under that key."""
        record = _record(generation)
        extent = self._look(record, key) if record < self._state.size else None
        return self._fresh(extent, now) if extent is not None and extent.generation == generation else None

    def holds(self, extent: Extent) -> bool:
        """Whether an entry still is where it was."""
        return self._ready(extent.record, extent.generation)

    def touch(self, extent: Extent, *, now: int) -> None:
        """Makes it the most recently used one."""
        self._used[extent.record] = now

    def reserve(
        self,
        key: bytes,
        payload: int,
        header: int,
        tag: int,
        *,
        writer: int,
        now: int,
        pin: Pin | None = None,
        owner: bytes = NOBODY,
    ) -> Extent:
        """*Locked.* Room for one entry, in the name of one writer, pinned already. Evicts what is in the way, and of
        an owner who would hold more than the budget of owners what it has used least recently.

        A pinned entry of the same key stays until its successor is there, so there has to be room for both.

        Raises Overloaded CACHE_FULL, and has evicted nothing.
        """
        needed = aligned(payload + header + tag)
        budget = self.capacity if owner == NOBODY else self.owner_budget
        room = self._room(needed, key, _owner(owner), budget, now) if needed <= budget else None
        if room is None:
            raise full(needed, budget)
        row = None if pin is None else self._pins.free_row(now)
        for victim in room.victims:
            self._step("evicting")
            self._state[victim] = _FREE
        self.evictions += room.evictions
        self._count(_EVICTIONS, room.evictions)

        record = self._free_record()
        assert record is not None, "a victim leaves one"
        self._step("reserving")
        self._count(_SERIAL)
        generation = self._serial << _BITS | record
        extent = Extent(generation, room.start, payload, header, tag)
        self._generation[record] = generation
        self._key[:, record] = _words(key)
        self._start[record] = extent.start
        self._payload[record], self._header[record], self._tag[record] = payload, header, tag
        self._size[record] = needed
        self._writer[record] = writer
        self._owner[record] = _owner(owner)
        self._used[record] = now
        self._counters[_RECORDS] = max(int(self._counters[_RECORDS]), record + 1)
        self._step("reserved")
        self._state[record] = _WRITING
        if pin is not None and row is not None:
            self._step("pinning")
            self._pins.set(row, pin, generation)
        return extent

    def publish(self, extent: Extent, *, now: int) -> None:
        """*Locked.* Makes a written entry readable, in place of those of the same key, whose pins it takes on."""
        record = extent.record
        assert self._generation[record] == extent.generation and self._state[record] == _WRITING, "not the writer's"
        predecessors = self._entries(self._key[:, record].tobytes())
        self._step("publishing")
        self._used[record] = now
        self._state[record] = _READY
        self._count(_PUTS)
        self._count(_REPLACEMENTS, len(predecessors))  # before the first goes: see `find`
        for old in predecessors:
            self._step("replacing")
            self._pins.hand_on(old.generation, extent.generation)
            self._state[old.record] = _FREE

    def abandon(self, extent: Extent) -> None:
        """Gives back what its writer will not publish. Nobody else touches what is being written."""
        record = extent.record
        if self._generation[record] == extent.generation and self._state[record] == _WRITING:
            self._state[record] = _FREE

    def reclaim(self, alive: Callable[[int], bool]) -> None:
        """*Locked.* Frees what dead writers have left half-written."""
        for record in np.flatnonzero(self._state[: self._records_used] == _WRITING):
            if not alive(int(self._writer[record])):
                self._step("reclaiming")
                self._state[record] = _FREE

    def pin(self, key: bytes, pin: Pin, *, now: int) -> Extent | None:
        """*Locked.* Pins the entry under a key. One that already has a pin of that name keeps it for longer.

        Raises Overloaded CACHE_FULL if there is no room for another pin.
        """
        extent = self.find(key, now=now)
        self._count(_ASKED)
        if extent is not None:
            self._count(_FOUND)
            mine = [row for row, generation in self._pins.named(pin.id) if generation == extent.generation]
            self._pins.set(mine[0] if mine else self._pins.free_row(now), pin, extent.generation)
            self.touch(extent, now=now)
        return extent

    def unpin(self, key: bytes, pin_id: bytes) -> None:
        """*Locked.* Ends a pin of one entry, if there is one."""
        for row, generation in self._pins.named(pin_id):
            record = _record(generation)
            gone = not self._is(record, generation) or self._state[record] == _FREE
            if gone or self._key[:, record].tobytes() == key:
                self._pins.end(row)

    def discard(self, key: bytes) -> None:
        """*Locked.* Forgets an entry, pinned or not."""
        for extent in self._entries(key):
            self._state[extent.record] = _FREE
            self._pins.end_all(extent.generation)

    def flush(self, *, now: int) -> None:
        """*Locked.* Forgets every entry that is not pinned."""
        state = self._state[: self._records_used]
        state[(state == _READY) & ~self._pinned(now)[: state.size]] = _FREE

    def usage(self, *, now: int) -> Usage:
        """What is there, to the byte while nobody else is at it."""
        used = self._records_used
        state = self._state[:used].copy()
        sizes = self._size[:used]
        return Usage(
            entries=int(np.count_nonzero(state == _READY)),
            bytes=int(sizes[state != _FREE].sum()),
            pinned_bytes=int(sizes[(state != _FREE) & self._pinned(now)[:used]].sum()),
        )

    def totals(self) -> Totals:
        """To the one while nobody is killed just then."""
        return Totals(*(int(self._counters[number]) for number in (_PUTS, _EVICTIONS, _ASKED, _FOUND)))

    def extents(self) -> list[Extent]:
        """Everything there is, what is being written too. For tests and for people."""
        return [self._extent(int(record)) for record in np.flatnonzero(self._state[: self._records_used] != _FREE)]

    @property
    def _records_used(self) -> int:
        return min(int(self._counters[_RECORDS]), self._state.size)

    @property
    def _serial(self) -> int:
        return int(self._counters[_SERIAL]) % (1 << 64 - _BITS)

    def _count(self, counter: int, count: int = 1) -> None:
        self._counters[counter] = (int(self._counters[counter]) + count) % (1 << 64)

    def _is(self, record: int, generation: int) -> bool:
        in_table = record == _record(generation) and record < self._state.size
        return in_table and bool(self._generation[record] == generation)

    def _entries(self, key: bytes) -> list[Extent]:
        alike = np.flatnonzero(self._key[0, : self._records_used] == _words(key)[0])
        return [extent for record in alike if (extent := self._look(int(record), key)) is not None]

    def _look(self, record: int, key: bytes) -> Extent | None:
        """A record as it is, if it is an entry of that key. Asked before and after, so that nothing is half of one
        entry and half of the next."""
        self._step("looking")
        generation = int(self._generation[record])
        if not self._ready(record, generation):
            return None
        extent = self._extent(record)
        same = self._key[:, record].tobytes() == key
        return extent if same and self._ready(record, generation) else None

    def _ready(self, record: int, generation: int) -> bool:
        return self._is(record, generation) and bool(self._state[record] == _READY)

    def _extent(self, record: int) -> Extent:
        fields = (self._generation, self._start, self._payload, self._header, self._tag)
        return Extent(*(int(field[record]) for field in fields))

    def _fresh(self, extent: Extent | None, now: int) -> Extent | None:
        """An entry that was used, or is pinned, within the time after which it is not found any more."""
        if extent is None or self._ttl is None or now - int(self._used[extent.record]) <= self._ttl:
            return extent
        return extent if extent.generation in self._pins.held(now) else None

    def _free_record(self) -> int | None:
        used = self._records_used
        free = np.flatnonzero(self._state[:used] == _FREE)
        if free.size:
            return int(free[0])
        return used if used < self._state.size else None

    def _pinned(self, now: int) -> Array:
        """(records,) bool."""
        generations = self._pins.held(now)
        records = (generations % np.uint64(1 << _BITS)).astype(np.int64)
        generations, records = generations[records < self._state.size], records[records < self._state.size]
        pinned = np.zeros(self._state.size, bool)
        pinned[records[self._generation[records] == generations]] = True
        return pinned

    def _room(self, needed: int, key: bytes, owner: np.uint64, budget: int, now: int) -> _Room | None:
        """A place for `needed` bytes and the records that are in the way there, or None."""
        state = self._state[: self._records_used]
        order = self._by_start
        order.bring_up(state != _FREE, self._serial + 1 << _BITS)
        there = order.records

        def replaced() -> list[int]:
            return [extent.record for extent in self._entries(key)]

        def candidates() -> tuple[Array, Array]:
            going = (state == _READY) & ~self._pinned(now)[: state.size]
            age = self._used[there]
            for record in replaced():
                age[there == record] = _FIRST  # what is replaced goes before the oldest
            return going[there], age

        room = make_room(
            order.starts,
            order.ends,
            candidates,
            needed=needed,
            capacity=self.capacity,
            own=self._owner[there] == owner if budget < self.capacity else None,
            share=budget,
        )
        if room is None:
            return None
        gone = there[room.gone].tolist()
        if not gone and self._free_record() is None:  # room, but no record to say so
            going, age = candidates()
            if not going.any():
                return None
            gone = [int(there[np.argmin(np.where(going, age, -_FIRST))])]
        return _Room(room.start, gone, len(set(gone).difference(replaced())) if gone else 0)


class _Room(NamedTuple):
    start: int
    victims: list[int]
    evictions: int
    """Of the victims, those that are not replaced."""


def _words(key: bytes) -> Array:
    assert len(key) == 32, len(key)
    return np.frombuffer(key, np.uint64)


def _owner(owner: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(owner, "little"))


def _record(generation: int) -> int:
    return generation % (1 << _BITS)
