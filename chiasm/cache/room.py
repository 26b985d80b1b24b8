"""Where an entry fits among others, and who has to go for it.

Those that may go are thought away in turn until there is a gap that is wide enough, and of those only the ones in that
gap have to go. Nothing is ever moved. Whoever would hold more than its share gives up as many of its own as bring it
back, and if that opens no gap, more of its own before anybody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from chiasm.cache.columns import Array

_FEW = 64
"""Of the first to go, that are found without sorting the others: mostly one or two are enough."""

_SOONER = 1 << 61
"""Taken from an age, in nanoseconds, it is before every other age."""


Candidates: TypeAlias = Callable[[], tuple[Array, Array]]
"""Asked only if somebody has to go: (extents,) bool, which may go at all; (extents,) int64, when each was used."""


class Room(NamedTuple):
    """Where an entry begins, and the numbers of the extents that go for it."""

    start: int
    gone: Array


def make_room(
    starts: Array,
    ends: Array,
    candidates: Candidates,
    *,
    needed: int,
    capacity: int,
    own: Array | None = None,
    share: int = 0,
) -> Room | None:
    """Room for `needed` bytes, if it can be made.

    Args:
        starts, ends: (extents,) int64, of what is there, in order, none overlapping another.
        own: (extents,) bool, which are of the owner who needs room, if that may hold no more than `share` bytes.
    """
    if own is not None and (over := int((ends - starts)[own].sum()) + needed - share) > 0:
        going, age = candidates()
        mine = np.fromiter(_in_turn(lambda: (going & own, age)), np.intp)
        enough = int(np.searchsorted(np.cumsum((ends - starts)[mine]), over)) + 1
        if enough > mine.size:
            return None
        left = np.delete(np.arange(starts.size), mine[:enough])
        sooner = np.where(own, age - _SOONER, age)
        room = make_room(
            starts[left], ends[left], lambda: (going[left], sooner[left]), needed=needed, capacity=capacity
        )
        return room and Room(room.start, np.append(mine[:enough], left[room.gone]))

    start = _find(starts, ends, _in_turn(candidates), needed=needed, capacity=capacity)
    return None if start is None else Room(start, ((starts < start + needed) & (ends > start)).nonzero()[0])


def _in_turn(candidates: Candidates) -> Iterator[int]:
    """Numbers of extents, the first to go first."""
    going, age = candidates()
    extents = np.flatnonzero(going)
    age = age[extents]
    if extents.size > _FEW:
        parted = np.argpartition(age, _FEW)
        first, others = parted[:_FEW], parted[_FEW:]
    else:
        first, others = np.arange(extents.size), np.arange(0)
    for part in (first, others):
        yield from extents[part[np.argsort(age[part], kind="stable")]].tolist()


def _find(starts: Array, ends: Array, turn: Iterable[int], *, needed: int, capacity: int) -> int | None:
    """Where `needed` bytes begin, in the first gap that opens while those in `turn` are thought away."""
    left, right = np.empty((2, starts.size + 1), np.int64)  # of the gaps: gap i lies before extent i
    left[0], left[1:] = 0, ends
    right[:-1], right[-1] = starts, capacity
    wide = right - left >= needed
    first = int(wide.argmax())
    if wide[first]:
        return int(left[first])
    # Whoever is thought away joins the gaps on its two sides. What was joined is known by its outermost gaps.
    first_of: dict[int, int] = {}
    last_of: dict[int, int] = {}
    for extent in turn:
        first, last = first_of.pop(extent, extent), last_of.pop(extent + 1, extent + 1)
        if right[last] - left[first] >= needed:
            return int(left[first])
        first_of[last], last_of[first] = first, last
    return None
