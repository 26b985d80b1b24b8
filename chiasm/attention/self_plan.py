"""Where the rows of a step find their sequence's earlier keys and values in the self pool, planned once per step.

Sequences come in three kinds. A fresh one has no earlier rows, so its own keys are all it needs. A continued one adds
several rows to earlier ones: it looks at those without a mask and at its own causally. A single row, a decode step,
sees all there is.

Single rows are padded to a common length and attended in one batch, which copies their keys. Measured on CPU, from
`VIEW_FROM` numbers on the copy costs more than a call from Python: a longer sequence whose pages lie side by side is
read where it lies, and so is one that has nobody to be batched with. Padding repeats a row of the sequence's own: what
else lies in the pool may be anything, NaN too.

Nothing here knows a layer or a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.pages import Run

VIEW_FROM = 1 << 15
"""Numbers in the keys of a sequence from which it is read in place, where its pages lie side by side."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """Rows [start, stop) of the step: whole sequences of these lengths, one after another."""

    start: int
    stop: int
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class Continued:
    """Rows [start, stop) of the step that continue one sequence, and where its earlier rows lie in the self pool."""

    start: int
    stop: int
    before: Run | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Viewed:
    """A single row, its place in the step, and its sequence's rows in the pool, itself included."""

    row: int
    context: Run


@dataclass(frozen=True, slots=True)
class Padded:
    """Single rows that are attended in one batch.

    Attributes:
        rows: (B,) their places in the step.
        slots: (B, longest) rows of the self pool, padded with the sequence's first.
        lengths: (B,) how many of them count.
        whole: they are all rows of the step, as they stand.
    """

    rows: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    whole: bool


@dataclass(slots=True)
class SelfPlan:
    """A step's self-attention. `written` (rows,) is where in the self pool each row's own key and value go."""

    written: npt.NDArray[np.int64]
    fresh: list[Fresh] = field(default_factory=list)
    continued: list[Continued] = field(default_factory=list)
    viewed: list[Viewed] = field(default_factory=list)
    padded: list[Padded] = field(default_factory=list)


def plan_self(step: Step, *, page_size: int, width: int) -> SelfPlan:
    """Sorts the sequences of a step by kind.

    Args:
        page_size: rows of a page of the self pool.
        width: numbers in the keys of one row: key heads times head dimension.
    """
    plan = SelfPlan(np.zeros(step.rows, dtype=np.int64))
    single: list[tuple[int, SequenceRows]] = []
    at = 0
    for sequence in step.sequences:
        start, rows = sequence.start, sequence.rows
        if not rows:
            continue
        if start and rows == 1:
            single.append((at, sequence))
            at += 1
            continue
        slots = _slots(sequence, page_size)
        plan.written[at : at + rows] = slots[start:]
        if start == 0:
            last = plan.fresh[-1] if plan.fresh else None
            if last is not None and last.stop == at:
                plan.fresh[-1] = Fresh(last.start, at + rows, [*last.lengths, rows])
            else:
                plan.fresh.append(Fresh(at, at + rows, [rows]))
        else:
            run = _run(slots[:start])
            plan.continued.append(Continued(at, at + rows, slots[:start] if run is None else run))
        at += rows
    if single:
        _plan_single(plan, single, page_size=page_size, width=width)
    return plan


def _slots(sequence: SequenceRows, page_size: int) -> npt.NDArray[np.int64]:
    rows = sequence.start + sequence.rows
    pages = np.asarray(sequence.pages[: -(-rows // page_size)], dtype=np.int64)
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:rows]


def _run(slots: npt.NDArray[np.int64]) -> Run | None:
    """The slots as one run, if they are one."""
    if slots[-1] - slots[0] != len(slots) - 1 or (slots[1:] - slots[:-1] != 1).any():
        return None
    return Run(int(slots[0]), len(slots))


def _plan_single(plan: SelfPlan, single: Sequence[tuple[int, SequenceRows]], *, page_size: int, width: int) -> None:
    """Plans sequences of one row each, given with its place: all of them at once, for there may be hundreds and each
    step plans them anew."""
    rows = np.array([row for row, _ in single])
    lengths = np.array([sequence.start + 1 for _, sequence in single])
    counts = -(-lengths // page_size)
    has_page = np.arange(counts.max()) < counts[:, None]
    pages = np.zeros(has_page.shape, dtype=np.int64)
    held = (sequence.pages[:count] for (_, sequence), count in zip(single, counts.tolist(), strict=True))
    pages[has_page] = np.fromiter(chain.from_iterable(held), dtype=np.int64, count=int(counts.sum()))
    own = lengths - 1
    plan.written[rows] = pages[np.arange(len(single)), own // page_size] * page_size + own % page_size
    neighbours = ((pages[:, 1:] - pages[:, :-1] == 1) | ~has_page[:, 1:]).all(1)
    in_place = neighbours & ((lengths * width >= VIEW_FROM) | (len(single) == 1))
    for i in np.flatnonzero(in_place).tolist():
        plan.viewed.append(Viewed(int(rows[i]), Run(int(pages[i, 0]) * page_size, int(lengths[i]))))
    rest = np.flatnonzero(~in_place)
    for some in _alike(rest[np.argsort(lengths[rest], kind="stable")], lengths):
        longest = int(lengths[some[-1]])
        slots = pages[some, : int(counts[some[-1]]), None] * page_size + np.arange(page_size)
        slots = slots.reshape(len(some), -1)[:, :longest]
        np.copyto(slots, slots[:, :1], where=np.arange(longest) >= lengths[some, None])
        whole = np.array_equal(rows[some], np.arange(len(plan.written)))
        plan.padded.append(Padded(rows[some], slots, lengths[some], whole))


def _alike(ordered: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Batches, of what is ordered by length, in which the longest is at most a quarter and sixteen rows longer than
    the shortest."""
    first = 0
    for i, length in enumerate(lengths[ordered].tolist()):
        if i > first and length > 1.25 * lengths[ordered[first]] + 16:
            yield ordered[first:i]
            first = i
    if len(ordered):
        yield ordered[first:]
