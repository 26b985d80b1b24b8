"""Attention as a protocol: planned once per step, called per layer.

The rhythm is that of paged GPU kernels (plan, then run); other backends are written to fit. A backend knows rows,
pages and vision tokens; it has never seen a request, a medium or a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor


class VarlenAttention(Protocol):
    """Attention inside independent sequences that lie one after another."""

    def varlen(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, lengths: Sequence[int], *, causal: bool) -> Tensor:
        """(rows, heads, dim) queries over (rows, kv heads, dim) keys and values, `lengths` rows each sequence.

        Returns (rows, heads, dim). Scale is dim ** -0.5, softmax in float32 at least.
        """
        ...


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows one sequence adds in a step.

    Attributes:
        start: rows of the sequence that were computed before; their keys and values are in the self pool.
        rows: rows added.
        pages: self-pool pages of the sequence, enough for start + rows.
        boundaries: (rows, 2) vision tokens [first, last) each new row sees; first == last where it sees none.
        extents: (first vision token, cross-pool slot, length) of each attached unit, in vision order. Sequences that
            look at the same unit may name the same slots: they are then read once for all of them.
        overlaid: (rows,) slot whose features lie over each new row, -1 for none; None where there are none at all.
    """

    start: int
    rows: int
    pages: Sequence[int]
    boundaries: npt.NDArray[np.int64]
    extents: Sequence[tuple[int, int, int]]
    overlaid: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass computes: rows of several sequences, one sequence after another."""

    sequences: Sequence[SequenceRows]

    @property
    def rows(self) -> int:
        return sum(sequence.rows for sequence in self.sequences)

    def sees(self) -> npt.NDArray[np.bool_]:
        """(rows,) whether a row sees any vision token."""
        if not self.sequences:
            return np.zeros(0, dtype=np.bool_)
        spans = np.concatenate([sequence.boundaries for sequence in self.sequences])
        return spans[:, 1] > spans[:, 0]

    def overlaid(self) -> npt.NDArray[np.int64] | None:
        """(rows,) slot whose features lie over each row, -1 for none; None where there are none at all."""
        if all(sequence.overlaid is None for sequence in self.sequences):
            return None
        return np.concatenate(
            [
                np.full(sequence.rows, -1, dtype=np.int64) if sequence.overlaid is None else sequence.overlaid
                for sequence in self.sequences
            ]
        )


class Attention(VarlenAttention, Protocol):
    """The attention of a decoder's forward pass."""

    def plan(self, step: Step) -> None:
        """Prepares what the layers of one step share. Called once, before the first layer."""
        ...

    def attend_self(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, *, layer: int) -> Tensor:
        """Stores the step's keys and values of self layer `layer`, then attends causally over each sequence's own.

        (rows, heads, dim) queries, (rows, kv heads, dim) keys and values; returns (rows, heads, dim).
        """
        ...

    def attend_cross(self, q_nhd: Tensor, *, layer: int) -> Tensor:
        """Attends over the attached vision tokens of cross layer `layer`, each row over its own [first, last).

        (rows, heads, dim) in and out; a row that sees nothing comes out zero.
        """
        ...
