"""Who looks at which slots of the cross pool, planned once per step: rows by what they see, not by whose they are.

A row sees vision tokens [first, last) of its sequence, which lie in the pool as runs of slots. Rows that see the same
runs are attended together, whichever sequences they belong to: sixteen questions about one video read its keys once.
Rows of a prefill that see one frame more every few rows form a staircase: rows of several steps are taken together,
over what all of them see without a mask, and over the few keys that only some see with one. No mask is ever larger
than `BLOCK_ROWS` by `DIAGONAL`, however long text and video are.

Nothing here knows a tensor, a layer or a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.pages import Run

Runs = tuple[Run, ...]
"""Slots in the order of the vision tokens they hold; never empty, neighbours in the pool joined."""

BLOCK_ROWS = 192
"""Rows of a staircase that are taken together. Four query heads to a key head make 768 folded rows of them, from
which on the CPU kernel works in its largest blocks."""

DIAGONAL = 2048
"""Most keys that only some rows of a block see."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a step that are attended together.

    Attributes:
        rows: their places in the step.
        shared: slots that every row sees; may be empty if `diagonal` is not.
        diagonal: slots of which row i sees the first `seen[i]`, at least one; empty where all rows see the same.
    """

    rows: npt.NDArray[np.int64]
    shared: Runs
    diagonal: Runs
    seen: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Segment:
    """Ranges of rows of the step that see the same slots."""

    runs: Runs
    ranges: list[tuple[int, int]]

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def plan_cross(step: Step) -> list[Block]:
    """The blocks of a step. Rows that see nothing are in none, every other row is in one.

    A row that sees a vision token which is not attached is a broken promise.
    """
    segments: dict[Runs, _Segment] = {}
    at = 0
    for sequence in step.sequences:
        for start, stop, runs in _segments(sequence):
            segment = segments.setdefault(runs, _Segment(runs, []))
            segment.ranges.append((at + start, at + stop))
        at += sequence.rows
    blocks: list[list[_Segment]] = []
    for segment in segments.values():
        if blocks and _joins(blocks[-1], segment):
            blocks[-1].append(segment)
        else:
            blocks.append([segment])
    return [_block(block) for block in blocks]


def length(runs: Sequence[Run]) -> int:
    """Slots of all runs together."""
    return sum(run.length for run in runs)


def pieces(runs: Runs, limit: int) -> list[Runs]:
    """The runs as pieces of at most `limit` slots, each one run, or several short ones that are to be copied together.

    Order is not kept, so pieces are for rows that see them whole. Shorter than half the limit counts as short.
    """
    cut: list[Runs] = []
    short: list[Run] = []
    for run in runs:
        if run.length < limit / 2:
            if length(short) + run.length > limit:
                cut.append(tuple(short))
                short = []
            short.append(run)
            continue
        parts = -(-run.length // limit)
        edges = [run.start + run.length * i // parts for i in range(parts + 1)]
        cut.extend((Run(start, stop - start),) for start, stop in pairwise(edges))
    if short:
        cut.append(tuple(short))
    return cut


def _segments(sequence: SequenceRows) -> Iterator[tuple[int, int, Runs]]:
    """Runs of a sequence's rows with equal boundaries, and the slots they see; rows that see nothing are in none."""
    spans = sequence.boundaries
    if not len(spans) or not (spans[:, 1] > spans[:, 0]).any():
        return
    base, merged = _merge_extents(sequence.extents)
    attached = base + length(merged)
    cuts = [0, *(np.flatnonzero(np.any(spans[1:] != spans[:-1], axis=1)) + 1).tolist(), len(spans)]
    for start, stop in pairwise(cuts):
        first, last = spans[start].tolist()
        if last > first:
            assert base <= first and last <= attached, "a row sees what is not attached"
            yield start, stop, _cut(merged, first - base, last - base)


def _merge_extents(extents: Sequence[tuple[int, int, int]]) -> tuple[int, Runs]:
    """The first vision token, and the slots of all: extents that are neighbours in the pool as well are joined."""
    merged: list[Run] = []
    base = expected = extents[0][0] if extents else 0
    for first, slot, size in extents:
        assert first == expected, f"vision tokens {expected} to {first} are not attached"
        expected += size
        if merged and sum(merged[-1]) == slot:
            merged[-1] = Run(merged[-1].start, merged[-1].length + size)
        else:
            merged.append(Run(slot, size))
    return base, tuple(merged)


def _cut(runs: Runs, first: int, last: int) -> Runs:
    """Slots [first, last) of the runs, counted over all of them."""
    kept = []
    for start, size in runs:
        low, high = max(first, 0), min(last, size)
        if low < high:
            kept.append(Run(start + low, high - low))
        first, last = first - size, last - size
        if last <= 0:
            break
    return tuple(kept)


def _begins(longer: Runs, shorter: Runs) -> bool:
    """Whether `shorter` is what `longer` begins with."""
    if len(shorter) > len(longer):
        return False
    *whole, (start, size) = shorter
    end = longer[len(whole)]
    return end.start == start and end.length >= size and all(a == b for a, b in zip(whole, longer, strict=False))


def _joins(block: list[_Segment], segment: _Segment) -> bool:
    """Whether a segment is the next step of a block's staircase, and the block is not yet full."""
    return (
        sum(one.rows for one in block) + segment.rows <= BLOCK_ROWS
        and length(segment.runs) - length(block[0].runs) < DIAGONAL
        and _begins(segment.runs, block[-1].runs)
    )


def _block(segments: list[_Segment]) -> Block:
    rows = np.concatenate([np.arange(*one) for segment in segments for one in segment.ranges])
    runs = segments[-1].runs
    if len(segments) == 1:
        return Block(rows, runs, (), np.zeros(0, dtype=np.int64))
    # The diagonal begins one key early, so that each row sees at least one key of it.
    common = length(segments[0].runs) - 1
    seen = np.repeat([length(one.runs) - common for one in segments], [one.rows for one in segments])
    return Block(rows, _cut(runs, 0, common), _cut(runs, common, length(runs)), seen)
