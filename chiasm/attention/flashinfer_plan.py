"""A step in the integers that FlashInfer's paged kernels take: which rows attend to which pages. Numpy alone.

The kernels know *parts*: a run of query rows that attends to one list of pages, all of it, or causally at its end. Self
attention has a part for each sequence. Cross-attention has no mask either: of the blocks of `cross_plan`, what all rows
of a block see is one part, and what only some of them see besides is a part for each run of rows that see equally much
of it. A row is then in two parts, whose results are merged by their log-sum-exp.

Why parts and not FlashInfer's packed mask. A mask holds a bit for each row and visual token (T * S / 8 bytes), makes
the kernels compute what it then hides, and shuts out those that take none; and of 0.6.13 `plan(packed_custom_mask=...)`
counts the offsets of the second and later sequences in bits where the kernel reads bytes. Parts compute what is seen
and nothing else, and rows of several sequences that look at the same slots read them once. Their price is a page table
of four bytes for each token that a part sees, about T * S * 4 / `cross_plan.BLOCK_ROWS` bytes together: a sixth of the
mask, and less again where rows see only a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from chiasm.attention import cross_plan
from chiasm.attention.backend import Step
from chiasm.attention.pages import Run

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]

LARGEST_TILE = 128
"""Rows times query heads of a key head that one block of threads takes at most (`FA2DetermineCtaTileQ` in FlashInfer's
utils.cuh)."""

RECOMMENDED_WORKSPACE = 128 << 20
"""Bytes, as the wrappers' own documentation recommends."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Parts, as the paged wrappers take them.

    Attributes:
        rows: (n,) row of the step that each row of the query is.
        qo_indptr: (parts + 1,) part i has the query's rows [qo_indptr[i], qo_indptr[i + 1]).
        indptr: (parts + 1,) and its pages are indices[indptr[i] : indptr[i + 1]].
        indices: pages, by their number in the pool.
        last_page_len: (parts,) tokens in each part's last page; all others are full.
        page_size: tokens of a page.
    """

    rows: Longs
    qo_indptr: Ints
    indptr: Ints
    indices: Ints
    last_page_len: Ints
    page_size: int

    @property
    def parts(self) -> int:
        return len(self.last_page_len)

    @property
    def one_row_each(self) -> bool:
        """Whether every part has a single row, which is what decode kernels are for."""
        return len(self.rows) == self.parts

    def check(self, *, step_rows: int, pages: int) -> None:
        """Asserts what the kernels take on trust: they read indptr and indices unchecked, and a wrong length has them
        read what was never written.

        Args:
            step_rows: rows of the step.
            pages: pages of the pool.
        """
        q, p = self.qo_indptr, self.indptr
        assert self.parts > 0 and len(q) == len(p) == self.parts + 1, (len(q), len(p), self.parts)
        assert q[0] == 0 and q[-1] == len(self.rows) and (np.diff(q) > 0).all(), "a part without rows"
        assert p[0] == 0 and p[-1] == len(self.indices) and (np.diff(p) > 0).all(), "a part without pages"
        assert self.indices.min() >= 0 and self.indices.max() < pages, "a page that is not of the pool"
        assert self.last_page_len.min() >= 1 and self.last_page_len.max() <= self.page_size, "a last page's tokens"
        assert self.rows.min() >= 0 and self.rows.max() < step_rows, "a row that is not of the step"
        assert len(np.unique(self.rows)) == len(self.rows), "a row twice"


@dataclass(frozen=True, slots=True)
class SelfPlan:
    """Causal attention over a sequence's own tokens.

    Attributes:
        parts: one for each sequence with rows; None in a step without rows.
        written: (rows,) token of the self pool that each row of the step becomes.
    """

    parts: PagedPlan | None
    written: Longs


@dataclass(frozen=True, slots=True)
class CrossPlan:
    """Attention over visual tokens, in pages of one token.

    A row is at most once in each; what both give it is merged. A row that sees nothing is in neither.

    Attributes:
        common: what all rows of a block see.
        rest: what some of them see besides.
    """

    common: PagedPlan | None
    rest: PagedPlan | None


def plan_self(step: Step, page_size: int) -> SelfPlan:
    """The parts of self-attention, in the order of the step's rows."""
    live = [sequence for sequence in step.sequences if sequence.rows]
    if not live:
        return SelfPlan(None, np.zeros(0, np.int64))
    starts = np.array([sequence.start for sequence in live])
    counts = np.array([sequence.rows for sequence in live])
    tokens = starts + counts
    pages = -(-tokens // page_size)
    held = (islice(sequence.pages, int(n)) for sequence, n in zip(live, pages, strict=True))
    indices = np.fromiter(chain.from_iterable(held), np.int32)
    qo_indptr, indptr = _indptr(counts), _indptr(pages)
    assert len(indices) == indptr[-1], "a sequence has fewer pages than its rows need"
    total = int(qo_indptr[-1])
    at = np.arange(total) + np.repeat(starts - qo_indptr[:-1], counts)
    page = indices[np.repeat(indptr[:-1], counts) + at // page_size].astype(np.int64)
    parts = PagedPlan(
        rows=np.arange(total),
        qo_indptr=qo_indptr,
        indptr=indptr,
        indices=indices,
        last_page_len=((tokens - 1) % page_size + 1).astype(np.int32),
        page_size=page_size,
    )
    return SelfPlan(parts, page * page_size + at % page_size)


def plan_cross(step: Step) -> CrossPlan:
    """The parts of cross-attention. Their pages are slots of the cross pool."""
    common, rest = _Parts(), _Parts()
    for block in cross_plan.plan_cross(step):
        if block.shared:
            common.add(block.rows, _slots(block.shared))
        if block.diagonal:
            slots = _slots(block.diagonal)
            cuts = [0, *(np.flatnonzero(np.diff(block.seen)) + 1).tolist(), len(block.rows)]
            for start, stop in pairwise(cuts):
                rest.add(block.rows[start:stop], slots[: block.seen[start]])
    return CrossPlan(common.plan(), rest.plan())


def plan_rows(step: Step, *, nowhere: int) -> PagedPlan:
    """Cross-attention of a step whose sequences have a row each, in one part for each run of neighbours that look at
    the same slots. Every row is in one part, and they stand in the step's order.

    Args:
        nowhere: the slot that a row looks at which sees nothing.
    """
    looks: list[cross_plan.Runs] = [(Run(nowhere, 1),)] * step.rows
    for row, sequence in enumerate(step.sequences):
        for block in cross_plan.plan_cross(Step([sequence])):
            looks[row] = block.shared
    parts = _Parts()
    at = 0
    for runs, alike in groupby(looks):
        count = len(list(alike))
        parts.add(np.arange(at, at + count), _slots(runs))
        at += count
    planned = parts.plan()
    assert planned is not None, "a step without rows"
    return planned


def workspace_bytes(*, heads: int, kv_heads: int, head_dim: int, multiprocessors: int, fixed_rows: int = 0) -> int:
    """What partial results of one call can need on a device with so many multiprocessors.

    A call whose keys are split makes at most two pieces of work for each multiprocessor over all key heads, and each
    keeps a tile of float32 results and their log-sum-exp (`PrefillPlan` in FlashInfer's scheduler.cuh). What is
    recommended holds the decode kernels' need many times over.

    Args:
        fixed_rows: the most rows of calls of fixed shapes. Those have room for a piece of each row, whatever the
            split, in tiles for one row each (`PrefillSplitQOKVIndptr`; of 64 at least before Ampere).
    """
    pieces, group = 2 * multiprocessors // kv_heads, heads // kv_heads
    fixed = max(pieces, -(-fixed_rows * group // 16) + fixed_rows) * (64 if group <= 64 else LARGEST_TILE)
    return max(RECOMMENDED_WORKSPACE, heads * max(pieces * LARGEST_TILE, fixed) * (head_dim + 1) * 4 + 64)


class _Parts:
    """Parts as they are found, with pages of one token."""

    def __init__(self) -> None:
        self._rows: list[Longs] = []
        self._slots: list[Ints] = []

    def add(self, rows: Longs, slots: Ints) -> None:
        self._rows.append(rows)
        self._slots.append(slots)

    def plan(self) -> PagedPlan | None:
        if not self._rows:
            return None
        return PagedPlan(
            rows=np.concatenate(self._rows),
            qo_indptr=_indptr([len(rows) for rows in self._rows]),
            indptr=_indptr([len(slots) for slots in self._slots]),
            indices=np.concatenate(self._slots),
            last_page_len=np.ones(len(self._rows), np.int32),
            page_size=1,
        )


def _slots(runs: cross_plan.Runs) -> Ints:
    """(tokens,) every slot of the runs, in order."""
    return np.concatenate([np.arange(start, start + size, dtype=np.int32) for start, size in runs])


def _indptr(counts: Sequence[int] | Longs) -> Ints:
    """(n + 1,) offsets from n counts."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    assert offsets[-1] < 2**31, f"{offsets[-1]} entries, and the kernels count in 32 bits"
    return offsets.astype(np.int32)
