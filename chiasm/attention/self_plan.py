"""Where the rows of a step find their sequence's earlier keys and values in the self pool, planned once per step.

Sequences come in three kinds. A fresh one has no earlier rows, so its own keys are all it needs. A continued one adds
several rows to earlier ones: it looks at those without a mask and at its own causally. A single row, a decode step,
sees all there is.

Single rows are padded to a common length and attended in one batch, which copies their keys. Measured on CPU, from
`VIEW_FROM` numbers on the copy costs more than a call from Python: a longer sequence whose pages lie side by side is
read where it lies. Padding repeats a row of the sequence's own: what else lies in the pool may be anything, NaN too.

Nothing here knows a layer or a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """

    rows: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


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
    plan = SelfPlan(np.zeros(0, dtype=np.int64))
    written: list[npt.NDArray[np.int64]] = []
    single: list[tuple[int, npt.NDArray[np.int64]]] = []
    at = 0
    for sequence in step.sequences:
        start, rows = sequence.start, sequence.rows
        if not rows:
            continue
        slots = _slots(sequence, page_size)
        written.append(slots[start:])
        if start == 0:
            last = plan.fresh[-1] if plan.fresh else None
            if last is not None and last.stop == at:
                plan.fresh[-1] = Fresh(last.start, at + rows, [*last.lengths, rows])
            else:
                plan.fresh.append(Fresh(at, at + rows, [rows]))
        elif rows > 1:
            run = _run(slots[:start])
            plan.continued.append(Continued(at, at + rows, slots[:start] if run is None else run))
        else:
            run = _run(slots) if len(slots) * width >= VIEW_FROM else None
            if run is None:
                single.append((at, slots))
            else:
                plan.viewed.append(Viewed(at, run))
        at += rows
    if written:
        plan.written = np.concatenate(written)
    plan.padded = [_pad(some) for some in _alike(single)]
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


def _alike(single: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> list[list[tuple[int, npt.NDArray[np.int64]]]]:
    """Batches in which the longest is at most a quarter and sixteen rows longer than the shortest."""
    batches: list[list[tuple[int, npt.NDArray[np.int64]]]] = []
    for row, slots in sorted(single, key=lambda one: len(one[1])):
        if batches and len(slots) <= 1.25 * len(batches[-1][0][1]) + 16:
            batches[-1].append((row, slots))
        else:
            batches.append([(row, slots)])
    return batches


def _pad(batch: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Padded:
    lengths = np.array([len(slots) for _, slots in batch])
    padded = np.empty((len(batch), lengths[-1]), dtype=np.int64)
    for line, (_, slots) in zip(padded, batch, strict=True):
        line[: len(slots)] = slots
        line[len(slots) :] = slots[0]
    return Padded(np.array([row for row, _ in batch]), padded, lengths)
