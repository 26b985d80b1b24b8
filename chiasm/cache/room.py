"""Where an entry fits among others, and who has to go for it.

Least recently used goes first, and only what is in the way: as many of the first in turn are thought away as make one
gap that is wide enough, and of those only the ones in that gap have to go. Nothing is ever moved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chiasm.cache.columns import Array


def find_room(starts: Array, ends: Array, turn: Array, *, going: int, needed: int, capacity: int) -> int | None:
    """Where `needed` bytes begin, in the first gap that opens.

    Args:
        starts, ends: (extents,) of what is there, in order, none overlapping another.
        turn: (extents,) which is the first to go (0), the second (1), and so on; `going` and more stays in any case.
    """

    def gaps(gone: int) -> tuple[Array, Array]:
        """Starts and widths of the room between extents, were the first `gone` not there."""
        stay = turn >= gone
        left = np.concatenate([[0], ends[stay]])
        right = np.concatenate([starts[stay], [capacity]])
        return left, right - left

    gone = _least(lambda count: bool((gaps(count)[1] >= needed).any()), going)
    if gone is None:
        return None
    left, width = gaps(gone)
    return int(left[np.argmax(width >= needed)])


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
