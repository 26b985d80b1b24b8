"""Which bytes of a region are whose: records of entries, pins, and the room that is left between them.

Everything is in the region, as arrays over it, and zero bytes are an empty ledger. There is no list of free room: it is
what no record covers (`chiasm.cache.records`). A process that is killed between any two instructions leaves a ledger
that is right, and at worst a record that is being written by nobody, which the next who needs room takes back. What is
written over it by others may lose entries; it leads nobody out of the region.

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
from chiasm.cache.records import FREE, MOST, OTHERS, READY, WRITING, Extent, Records, Step, record_of
from chiasm.cache.room import make_room
from chiasm.cache.store import NOBODY, full

_PUTS, _EVICTIONS, _ASKED, _FOUND = range(OTHERS, OTHERS + 4)  # of all processes since the region was made

_FIRST: Final = -(1 << 62)
"""When it was used, for one that goes before all others."""


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
        count = min(max(body.nbytes // (16 << 10), 1 << 10), MOST)
        carve = Carver(body)
        self._records = records = Records(carve, count, step)
        self._pins = Pins(carve, count)
        self.offset = carve.offset
        self.capacity = (body.nbytes - carve.offset) // ALIGNMENT * ALIGNMENT
        self.data = carve(np.uint8, self.capacity)
        self.owner_budget = self.capacity if owner_budget is None else min(owner_budget, self.capacity)
        self.evictions = 0
        self._ttl = ttl
        self._by_start = ByStart(records.generation, records.start, records.size, self.capacity)
        self._step = step

    def find(self, key: bytes, *, now: int) -> Extent | None:
        """The entry under a key, the newest."""
        return self._fresh(self._records.find(key), now)

    def at(self, generation: int, key: bytes, *, now: int) -> Extent | None:
        """The entry of that generation, if it is still there and under that key."""
        return self._fresh(self._records.at(generation, key), now)

    def holds(self, extent: Extent) -> bool:
        """Whether an entry still is where it was."""
        return self._records.is_in(extent, READY)

    def touch(self, extent: Extent, *, now: int) -> None:
        """Makes it the most recently used one."""
        self._records.used[extent.record] = now

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
            self._records.state[victim] = FREE
        self.evictions += room.evictions
        self._records.add(_EVICTIONS, room.evictions)

        record = self._records.free()
        assert record is not None, "a victim leaves one"
        self._step("reserving")
        sizes = (payload, header, tag)
        extent = self._records.fill(record, room.start, sizes, key, writer=writer, owner=_owner(owner), now=now)
        self._step("reserved")
        self._records.state[record] = WRITING
        if pin is not None and row is not None:
            self._step("pinning")
            self._pins.set(row, pin, extent.generation)
        return extent

    def publish(self, extent: Extent, *, now: int) -> None:
        """*Locked.* Makes a written entry readable, in place of those of the same key, whose pins it takes on."""
        records, record = self._records, extent.record
        assert records.is_in(extent, WRITING), "not the writer's"
        predecessors = records.entries(records.key[:, record].tobytes())
        self._step("publishing")
        records.used[record] = now
        records.state[record] = READY
        records.add(_PUTS)
        records.replaces(len(predecessors))  # before the first goes
        for old in predecessors:
            self._step("replacing")
            self._pins.hand_on(old.generation, extent.generation)
            records.state[old.record] = FREE

    def abandon(self, extent: Extent) -> None:
        """Gives back what its writer will not publish. Nobody else touches what is being written."""
        if self._records.is_in(extent, WRITING):
            self._records.state[extent.record] = FREE

    def reclaim(self, alive: Callable[[int], bool]) -> None:
        """*Locked.* Frees what dead writers have left half-written."""
        for record in (self._state == WRITING).nonzero()[0].tolist():
            if not alive(int(self._records.writer[record])):
                self._step("reclaiming")
                self._state[record] = FREE

    def pin(self, key: bytes, pin: Pin, *, now: int) -> Extent | None:
        """*Locked.* Pins the entry under a key. One that already has a pin of that name keeps it for longer.

        Raises Overloaded CACHE_FULL if there is no room for another pin.
        """
        extent = self.find(key, now=now)
        self._records.add(_ASKED)
        if extent is not None:
            self._records.add(_FOUND)
            mine = [row for row, generation in self._pins.named(pin.id) if generation == extent.generation]
            self._pins.set(mine[0] if mine else self._pins.free_row(now), pin, extent.generation)
            self.touch(extent, now=now)
        return extent

    def unpin(self, key: bytes, pin_id: bytes) -> None:
        """*Locked.* Ends a pin of one entry, if there is one."""
        for row, generation in self._pins.named(pin_id):
            record = record_of(generation)
            gone = not self._records.has(generation) or self._records.state[record] == FREE
            if gone or self._records.key[:, record].tobytes() == key:
                self._pins.end(row)

    def discard(self, key: bytes) -> None:
        """*Locked.* Forgets an entry, pinned or not."""
        for extent in self._records.entries(key):
            self._state[extent.record] = FREE
            self._pins.end_all(extent.generation)

    def flush(self, *, now: int) -> None:
        """*Locked.* Forgets every entry that is not pinned."""
        state = self._state
        state[(state == READY) & ~self._pinned(now)[: state.size]] = FREE

    def usage(self, *, now: int) -> Usage:
        """What is there, to the byte while nobody else is at it."""
        state = self._state.copy()
        sizes, pinned = self._records.size[: state.size], self._pinned(now)[: state.size]
        return Usage(
            entries=int(np.count_nonzero(state == READY)),
            bytes=int(sizes[state != FREE].sum()),
            pinned_bytes=int(sizes[(state != FREE) & pinned].sum()),
        )

    def totals(self) -> Totals:
        """To the one while nobody is killed just then."""
        return Totals(*map(self._records.counted, (_PUTS, _EVICTIONS, _ASKED, _FOUND)))

    def extents(self) -> list[Extent]:
        """Everything there is, what is being written too. For tests and for people."""
        return [self._records.extent(int(record)) for record in np.flatnonzero(self._state != FREE)]

    @property
    def _state(self) -> Array:
        """Of the records that were ever used."""
        return self._records.state[: self._records.count]

    def _fresh(self, extent: Extent | None, now: int) -> Extent | None:
        """An entry that was used, or is pinned, within the time after which it is not found any more."""
        if extent is None or self._ttl is None or now - int(self._records.used[extent.record]) <= self._ttl:
            return extent
        return extent if extent.generation in self._pins.held(now) else None

    def _pinned(self, now: int) -> Array:
        """(records,) bool."""
        return self._records.those(self._pins.held(now))

    def _room(self, needed: int, key: bytes, owner: int, budget: int, now: int) -> _Room | None:
        """A place for `needed` bytes and the records that are in the way there, or None."""
        state = self._state
        order = self._by_start
        order.bring_up(state != FREE, self._records.next_generations())
        there = order.records

        def replaced() -> list[int]:
            return [extent.record for extent in self._records.entries(key)]

        def candidates() -> tuple[Array, Array]:
            going = (state == READY) & ~self._pinned(now)[: state.size]
            age = self._records.used[there]
            for record in replaced():
                age[there == record] = _FIRST  # what is replaced goes before the oldest
            return going[there], age

        room = make_room(
            order.starts,
            order.ends,
            candidates,
            needed=needed,
            capacity=self.capacity,
            own=self._records.owner[there] == np.uint64(owner) if budget < self.capacity else None,
            share=budget,
        )
        if room is None:
            return None
        gone = there[room.gone].tolist()
        if not gone and self._records.free() is None:  # room, but no record to say so
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


def _owner(owner: bytes) -> int:
    return int.from_bytes(owner, "little")
