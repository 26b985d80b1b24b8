"""The table of a region's records: one writing of one entry each, where it lies and in what state it is.

A record is filled first and becomes one by its state, last; it ends by its state, first. So whoever looks at it, at any
time and without a lock, sees an entry or none. A generation names one writing for ever: a serial number that only
grows, and the number of the record in its lowest bits, so that a place is found without a search and a place given away
is known for one.

It knows no pins, no time but when a record was last used, and not why a record ends (`chiasm.cache.ledger`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from chiasm.cache.columns import Array, Carver, aligned

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2

_BITS: Final = 16
"""Of a generation that number the record."""

MOST: Final = 1 << _BITS
"""Records of a table."""

_SERIAL, _USED, _REPLACEMENTS = 0, 1, 2  # counters: the last serial; records ever used; entries ever replaced
OTHERS: Final = 3
"""The first of the counters of which nothing is known here."""

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
        return record_of(self.generation)

    @property
    def size(self) -> int:
        """Bytes charged for it."""
        return aligned(self.payload + self.header + self.tag)


class Records:
    """A table of `count` records, at most `MOST`.

    Attributes:
        state, writer, generation, start, payload, header, tag, size, owner, used: columns. `used` is when a record was
            last asked for.
        key: (4, count) uint64.
    """

    def __init__(self, carve: Carver, count: int, step: Step) -> None:
        self._counters = carve(np.uint64, 8).data  # as all of `data`: single numbers come out of it soonest
        self.state = carve(np.uint8, count)
        self.writer = carve(np.uint32, count)
        self.generation = carve(np.uint64, count)
        self.key = carve(np.uint64, 4, count)
        self.start = carve(np.uint64, count)
        self.payload = carve(np.uint64, count)
        self.header = carve(np.uint64, count)
        self.tag = carve(np.uint64, count)
        self.size = carve(np.uint64, count)
        self.owner = carve(np.uint64, count)
        self.used = carve(np.int64, count)
        self._extent = [column.data for column in (self.generation, self.start, self.payload, self.header, self.tag)]
        self._state, self._generation = self.state.data, self.generation.data
        self._step = step

    @property
    def count(self) -> int:
        """Records that were ever used; those behind are free."""
        return min(self.counted(_USED), self.state.size)

    @property
    def serial(self) -> int:
        """Of the last generation."""
        return self.counted(_SERIAL) % (1 << 64 - _BITS)

    def counted(self, counter: int) -> int:
        return self._counters[counter]

    def add(self, counter: int, count: int = 1) -> None:
        self._counters[counter] = (self.counted(counter) + count) % (1 << 64)

    def find(self, key: bytes) -> Extent | None:
        """The entry under a key. If a writer died while it replaced one there may be two; the newer one counts."""
        while True:
            replacements = self.counted(_REPLACEMENTS)
            found = max(self.entries(key), default=None)
            # One that is replaced just now may be missed in both its places: seen too late in the old, too early in
            # the new.
            if found is not None or replacements == self.counted(_REPLACEMENTS):
                return found

    def replaces(self, count: int) -> None:
        """Says that so many entries are about to go for another of their key: see `find`."""
        self.add(_REPLACEMENTS, count)

    def at(self, generation: int, key: bytes) -> Extent | None:
        """The entry of that generation, if it is there and under that key."""
        record = record_of(generation)
        extent = self._look(record, key) if record < self.state.size else None
        return extent if extent is not None and extent.generation == generation else None

    def entries(self, key: bytes) -> list[Extent]:
        """All entries under a key."""
        alike = (self.key[0, : self.count] == _words(key)[0]).nonzero()[0].tolist()
        return [extent for record in alike if (extent := self._look(record, key)) is not None]

    def free(self) -> int | None:
        """The number of a record that is free."""
        used = self.count
        first = int((self.state[:used] == FREE).argmax()) if used else 0
        if used and self.state[first] == FREE:
            return first
        return used if used < self.state.size else None

    def fill(
        self, record: int, start: int, sizes: tuple[int, int, int], key: bytes, *, writer: int, owner: int, now: int
    ) -> Extent:
        """Fills a free record for a writing to come, under a new generation, and leaves it free.

        Args:
            sizes: bytes of payload, header and tag.
        """
        self.add(_SERIAL)
        extent = Extent(self.serial << _BITS | record, start, *sizes)
        self.generation[record] = extent.generation
        self.key[:, record] = _words(key)
        self.start[record] = start
        self.payload[record], self.header[record], self.tag[record] = sizes
        self.size[record] = extent.size
        self.writer[record] = writer
        self.owner[record] = owner
        self.used[record] = now
        self._counters[_USED] = max(self.counted(_USED), record + 1)
        return extent

    def extent(self, record: int) -> Extent:
        """A record as it stands, whatever it is."""
        return Extent(*[column[record] for column in self._extent])

    def is_in(self, extent: Extent, state: int) -> bool:
        """Whether an extent still is where it was, and in that state."""
        return self.has(extent.generation) and self._state[extent.record] == state

    def has(self, generation: int) -> bool:
        """Whether the record of a generation is of that one."""
        record = record_of(generation)
        return record < self.state.size and self._generation[record] == generation

    def those(self, generations: Array) -> Array:
        """(records,) bool, which are of one of these generations."""
        records = (generations % np.uint64(MOST)).astype(np.int64)
        generations, records = generations[records < self.state.size], records[records < self.state.size]
        found = np.zeros(self.state.size, bool)
        found[records[self.generation[records] == generations]] = True
        return found

    def next_generations(self) -> int:
        """No generation is as large yet."""
        return self.serial + 1 << _BITS

    def _look(self, record: int, key: bytes) -> Extent | None:
        """A record as it is, if it is an entry of that key. Asked before and after, so that nothing is half of one
        entry and half of the next."""
        self._step("looking")
        generation = self._generation[record]
        if record_of(generation) != record or self._state[record] != READY:
            return None
        extent = self.extent(record)
        same = self.key[:, record].tobytes() == key
        return extent if same and extent.generation == generation and self.is_in(extent, READY) else None


def record_of(generation: int) -> int:
    """The number of the record of a generation."""
    return generation % MOST


def _words(key: bytes) -> Array:
    assert len(key) == 32, len(key)
    return np.frombuffer(key, np.uint64)
