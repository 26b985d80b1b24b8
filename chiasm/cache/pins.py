"""Pins of a region: which generations are kept until when, and under which names.

A row is free when its end is past, so those of killed processes free themselves. All methods but `held` are called by
who holds the region's lock. This module knows generations and no records.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chiasm.cache.columns import Array, Carver
from chiasm.errors import Overloaded


class Pin(NamedTuple):
    """A lease as it is kept: 16 bytes, and when it ends, in nanoseconds."""

    id: bytes
    end: int


class Pins:
    """A table of `count` pins."""

    def __init__(self, carve: Carver, count: int) -> None:
        self._ever = carve(np.uint64, 1)  # rows that were ever used
        self._id = carve(np.uint64, 2, count)
        self._generation = carve(np.uint64, count)
        self._end = carve(np.int64, count)

    def free_row(self, now: int) -> int:
        """Raises Overloaded CACHE_FULL if all pins are in use."""
        used = self._used
        free = (self._end[:used] <= now).nonzero()[0]
        row = int(free[0]) if free.size else used
        if row == self._end.size:
            raise Overloaded(
                "CACHE_FULL",
                f"{row} pins are kept already, there is no room for another",
                retry_after=0.1,
                facts={"pins": row},
            )
        self._ever[0] = max(used, row + 1)
        return row

    def set(self, row: int, pin: Pin, generation: int) -> None:
        self._end[row] = 0  # nobody's until all of it is written
        self._id[:, row] = np.frombuffer(pin.id, np.uint64)
        self._generation[row] = generation
        self._end[row] = pin.end

    def named(self, pin_id: bytes) -> list[tuple[int, int]]:
        """Row and generation of each pin of that name."""
        first, second = np.frombuffer(pin_id, np.uint64)
        rows = (self._id[0, : self._used] == first).nonzero()[0].tolist()
        return [(row, int(self._generation[row])) for row in rows if self._id[1, row] == second]

    def end(self, row: int) -> None:
        self._end[row] = 0

    def end_all(self, generation: int) -> None:
        self._end[self._of(generation)] = 0

    def hand_on(self, old: int, new: int) -> None:
        """Pins of one generation become those of another."""
        self._generation[self._of(old)] = new

    def held(self, now: int) -> Array:
        """The generations that are pinned, some of them perhaps more than once or no more there."""
        used = self._used
        return self._generation[:used][self._end[:used] > now]

    @property
    def _used(self) -> int:
        return min(int(self._ever[0]), self._end.size)

    def _of(self, generation: int) -> Array:
        rows: Array = (self._generation[: self._used] == generation).nonzero()[0]
        return rows
