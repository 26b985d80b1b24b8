"""Which bytes of a region are whose: records of entries, pins, and the room that is left between them.

Everything is in the region, as arrays over it, and zero bytes are an empty ledger. There is no list of free room: it is
what no record covers. A record is filled first and becomes one by its state, last; it ends by its state, first. So a
process that is killed between any two instructions leaves a ledger that is right, and at worst a record that is being
written by nobody, which the next who needs room takes back.

A generation names one writing of one entry for ever: a serial number that only grows, and the number of the record in
its lowest bits, so that a place is found without a search and a place given away is known for one.

Methods marked *locked* are called by who holds the region's lock. The others may be called at any time: what they read
may be gone when they return, and `holds` says so.

Least recently used goes first, and only what is in the way: as many of the oldest unpinned entries are thought away as
make one gap that is wide enough, and of those only the ones in that gap are evicted. Nothing is ever moved.

This module knows no file, no lock and no bytes of an entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from chiasm.cache.store import full
from chiasm.errors import Overloaded

ALIGNMENT = 64

_FREE, _WRITING, _READY = 0, 1, 2
_BITS = 16  # of a generation that number the record
_SERIAL, _RECORDS, _PINS = 0, 1, 2  # counters: the last serial; records and pins that were ever used

Array = npt.NDArray[Any]
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
        return _charged(self.payload + self.header + self.tag)


class Pin(NamedTuple):
    """A lease as the ledger keeps it: 16 bytes, and when it ends, in nanoseconds."""

    id: bytes
    end: int


class Usage(NamedTuple):
    """What is there. Bytes include what is being written."""

    entries: int
    bytes: int
    pinned_bytes: int


class Ledger:
    """The ledger of a region.

    Args:
        body: of the region (`Region.body`).

    Attributes:
        data: the bytes that entries lie in, as uint8.
        offset: of `data` in `body`.
        capacity: bytes of `data`.
        evictions: by this process.
    """

    def __init__(self, body: memoryview, *, step: Step = lambda name: None) -> None:
        count = min(max(body.nbytes // (16 << 10), 1 << 10), 1 << _BITS)
        carve = _Carver(body)
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
        self._used = carve(np.int64, count)  # when it was last asked for
        self._pin_id = carve(np.uint64, 2, count)
        self._pin_generation = carve(np.uint64, count)
        self._pin_end = carve(np.int64, count)
        self.offset = carve.offset
        self.capacity = (body.nbytes - carve.offset) // ALIGNMENT * ALIGNMENT
        self.data = carve(np.uint8, self.capacity)
        self.evictions = 0
        self._step = step

    def find(self, key: bytes) -> Extent | None:
        """The entry under a key. If a writer died while it replaced one there may be two; the newer one counts."""
        return max(self._entries(key), default=None)

    def at(self, generation: int, key: bytes) -> Extent | None:
        """The entry of that generation, if it is still there and under that key."""
        record = _record(generation)
        extent = self._look(record, _words(key)) if record < self._state.size else None
        return extent if extent is not None and extent.generation == generation else None

    def holds(self, extent: Extent) -> bool:
        """Whether an entry still is where it was."""
        return self._ready(extent.record, extent.generation)

    def touch(self, extent: Extent) -> None:
        """Makes it the most recently used one."""
        self._used[extent.record] = time.monotonic_ns()

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
    ) -> Extent:
        """*Locked.* Room for one entry, in the name of one writer, pinned already. Evicts what is in the way.

        A pinned entry of the same key stays until its successor is there, so there has to be room for both.

        Raises Overloaded CACHE_FULL, and has evicted nothing.
        """
        needed = _charged(payload + header + tag)
        room = self._room(needed, key, now) if needed <= self.capacity else None
        if room is None:
            raise full(needed, self.capacity)
        row = None if pin is None else self._free_pin(now)
        for victim in room.victims:
            self._step("evicting")
            self._state[victim] = _FREE
        self.evictions += room.evictions

        record = self._free_record()
        assert record is not None, "a victim leaves one"
        self._step("reserving")
        self._counters[_SERIAL] += np.uint64(1)
        generation = int(self._counters[_SERIAL]) << _BITS | record
        extent = Extent(generation, room.start, payload, header, tag)
        self._generation[record] = generation
        self._key[:, record] = _words(key)
        self._start[record] = extent.start
        self._payload[record], self._header[record], self._tag[record] = payload, header, tag
        self._size[record] = needed
        self._writer[record] = writer
        self._used[record] = time.monotonic_ns()
        self._counters[_RECORDS] = max(int(self._counters[_RECORDS]), record + 1)
        self._step("reserved")
        self._state[record] = _WRITING
        if pin is not None and row is not None:
            self._set_pin(row, pin, generation)
        return extent

    def publish(self, extent: Extent) -> None:
        """*Locked.* Makes a written entry readable, in place of those of the same key, whose pins it takes on."""
        record = extent.record
        assert self._generation[record] == extent.generation and self._state[record] == _WRITING, "not the writer's"
        predecessors = self._entries(self._key[:, record].tobytes())
        self._step("publishing")
        self._used[record] = time.monotonic_ns()
        self._state[record] = _READY
        for old in predecessors:
            self._step("replacing")
            self._pin_generation[self._pins_of(old)] = extent.generation
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
        extent = self.find(key)
        if extent is not None:
            mine = self._pins_named(pin.id)
            mine = mine[self._pin_generation[mine] == extent.generation]
            self._set_pin(int(mine[0]) if mine.size else self._free_pin(now), pin, extent.generation)
            self.touch(extent)
        return extent

    def unpin(self, key: bytes, pin_id: bytes) -> None:
        """*Locked.* Ends a pin of one entry, if there is one."""
        for row in self._pins_named(pin_id):
            generation = int(self._pin_generation[row])
            record = _record(generation)
            gone = self._state[record] == _FREE or self._generation[record] != generation
            if gone or np.array_equal(self._key[:, record], _words(key)):
                self._pin_end[row] = 0

    def discard(self, key: bytes) -> None:
        """*Locked.* Forgets an entry, pinned or not."""
        for extent in self._entries(key):
            self._state[extent.record] = _FREE
            self._pin_end[self._pins_of(extent)] = 0

    def flush(self, *, now: int) -> None:
        """*Locked.* Forgets every entry that is not pinned."""
        used = self._records_used
        self._state[:used][(self._state[:used] == _READY) & ~self._pinned(now)] = _FREE

    def usage(self, *, now: int) -> Usage:
        used = self._records_used
        there = self._state[:used] != _FREE
        sizes = self._size[:used]
        return Usage(
            entries=int(np.count_nonzero(self._state[:used] == _READY)),
            bytes=int(sizes[there].sum()),
            pinned_bytes=int(sizes[there & self._pinned(now)].sum()),
        )

    def extents(self) -> list[Extent]:
        """Everything there is, what is being written too. For tests and for people."""
        return [self._extent(int(record)) for record in np.flatnonzero(self._state[: self._records_used] != _FREE)]

    @property
    def _records_used(self) -> int:
        return int(self._counters[_RECORDS])

    def _entries(self, key: bytes) -> list[Extent]:
        words = _words(key)
        alike = np.flatnonzero(self._key[0, : self._records_used] == words[0])
        return [extent for record in alike if (extent := self._look(int(record), words)) is not None]

    def _look(self, record: int, words: Array) -> Extent | None:
        """A record as it is, if it is an entry of that key. Asked before and after, so that nothing is half of one
        entry and half of the next."""
        generation = int(self._generation[record])
        if not self._ready(record, generation):
            return None
        extent = self._extent(record)
        same = np.array_equal(self._key[:, record], words)
        return extent if same and self._ready(record, generation) else None

    def _ready(self, record: int, generation: int) -> bool:
        return bool(self._state[record] == _READY and self._generation[record] == generation)

    def _extent(self, record: int) -> Extent:
        fields = (self._generation, self._start, self._payload, self._header, self._tag)
        return Extent(*(int(field[record]) for field in fields))

    def _free_record(self) -> int | None:
        used = self._records_used
        free = np.flatnonzero(self._state[:used] == _FREE)
        if free.size:
            return int(free[0])
        return used if used < self._state.size else None

    def _free_pin(self, now: int) -> int:
        used = int(self._counters[_PINS])
        free = np.flatnonzero(self._pin_end[:used] <= now)
        row = int(free[0]) if free.size else used
        if row == self._pin_end.size:
            raise Overloaded(
                "CACHE_FULL",
                f"{row} pins are kept already, there is no room for another",
                retry_after=0.1,
                facts={"pins": row},
            )
        self._counters[_PINS] = max(used, row + 1)
        return row

    def _set_pin(self, row: int, pin: Pin, generation: int) -> None:
        self._step("pinning")
        self._pin_end[row] = 0
        self._pin_id[:, row] = np.frombuffer(pin.id, np.uint64)
        self._pin_generation[row] = generation
        self._pin_end[row] = pin.end

    def _pins_named(self, pin_id: bytes) -> Array:
        used = int(self._counters[_PINS])
        a, b = np.frombuffer(pin_id, np.uint64)
        return np.flatnonzero((self._pin_id[0, :used] == a) & (self._pin_id[1, :used] == b))

    def _pins_of(self, extent: Extent) -> Array:
        return np.flatnonzero(self._pin_generation[: int(self._counters[_PINS])] == extent.generation)

    def _pinned(self, now: int) -> Array:
        """(records ever used,) bool."""
        generations = self._pin_generation[np.flatnonzero(self._pin_end[: int(self._counters[_PINS])] > now)]
        records = (generations % np.uint64(1 << _BITS)).astype(np.int64)
        pinned = np.zeros(self._state.size, bool)
        pinned[records[self._generation[records] == generations]] = True
        return pinned[: self._records_used]

    def _room(self, needed: int, key: bytes, now: int) -> _Room | None:
        """A place for `needed` bytes and the records that are in the way there, or None."""
        used = self._records_used
        there = np.flatnonzero(self._state[:used] != _FREE)
        there = there[np.argsort(self._start[there], kind="stable")]
        starts = self._start[there].astype(np.int64)
        ends = starts + self._size[there].astype(np.int64)

        unpinned = (self._state[:used] == _READY) & ~self._pinned(now)
        predecessors = np.zeros(used, bool)
        predecessors[[extent.record for extent in self._entries(key)]] = True
        going = np.flatnonzero(unpinned)
        going = going[np.lexsort((self._used[going], ~predecessors[going]))]  # what is replaced goes before the oldest
        turn = np.full(used, going.size, np.int64)  # when each would go; what stays has no turn
        turn[going] = np.arange(going.size)
        turn = turn[there]

        def gaps(gone: int) -> tuple[Array, Array]:
            """Starts and widths of the room between records, were the first `gone` not there."""
            stay = turn >= gone
            left = np.concatenate([[0], ends[stay]])
            right = np.concatenate([starts[stay], [self.capacity]])
            return left, right - left

        gone = _least(lambda count: bool((gaps(count)[1] >= needed).any()), going.size)
        if gone is None:
            return None
        left, width = gaps(gone)
        start = int(left[np.argmax(width >= needed)])
        in_the_way = (turn < gone) & (starts < start + needed) & (ends > start)
        victims = [int(record) for record in there[in_the_way]]
        if not victims and self._free_record() is None:  # room, but no record to say so
            if not going.size:
                return None
            victims = [int(going[0])]
        return _Room(start, victims, evictions=int(np.count_nonzero(~predecessors[victims])))


class _Room(NamedTuple):
    start: int
    victims: list[int]
    evictions: int
    """Of the victims, those that are not replaced."""


class _Carver:
    """Lays arrays one behind the other over bytes."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self.offset = 0

    def __call__(self, dtype: npt.DTypeLike, *shape: int) -> Array:
        made = np.ndarray(shape, dtype, self._body, self.offset)
        self.offset += _charged(made.nbytes)
        return made


def _least(holds: Callable[[int], bool], most: int) -> int | None:
    """The least count of 0 to `most` for which something holds that goes on to hold for all larger ones."""
    low, high = 0, 0
    while not holds(high):
        if high == most:
            return None
        low, high = high + 1, min(2 * high + 1, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def _words(key: bytes) -> Array:
    assert len(key) == 32, len(key)
    return np.frombuffer(key, np.uint64)


def _record(generation: int) -> int:
    return generation % (1 << _BITS)


def _charged(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
