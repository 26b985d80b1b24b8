"""The rows of a step through the half: all at once, or in blocks of fixed sizes so that no row depends on the others.

In a block of fixed size every product outside attention has a fixed shape, and is computed in one fixed order. A step
is cut into such blocks, one after another: each is a step of its own, and finds what those before it have stored. Which
sizes may stand for each other is found out when the half is made ready (`agreeing`). It knows no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from chiasm.attention.agreeing import agreeing
from chiasm.attention.backend import Attention, SequenceRows, Step
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.layers.mlp import keep_steady
from chiasm.models.family import DecoderHalf

SIZES = (16, 64, 256)
"""Rows of a block. Products of 3 rows and fewer, in larger layers of 8 and fewer, give other float32 results than those
of 16 (MKL; torch 2.13 on a CPU with AVX-512). Those of 16 and 64 agreed in all layers that were tried, those of 256 in
most."""


class Forward(Protocol):
    def __call__(
        self, step: Step, ids: Sequence[int], positions_3n: npt.NDArray[np.int64], wanted: Sequence[int]
    ) -> Tensor:
        """(wanted, vocabulary) logits of those rows of a step, from its ids and (3, N) positions."""
        ...


class Whole:
    """`Forward` of all rows at once."""

    def __init__(self, half: DecoderHalf, attention: Attention) -> None:
        self._half = half
        self._attention = attention

    def __call__(
        self, step: Step, ids: Sequence[int], positions_3n: npt.NDArray[np.int64], wanted: Sequence[int]
    ) -> Tensor:
        sees = step.sees()
        device = self._half.device
        self._attention.plan(step)
        return self._half.forward(
            torch.tensor(ids, device=device),
            torch.from_numpy(positions_3n).to(device),
            torch.from_numpy(sees).to(device) if sees.any() else None,
            torch.tensor(wanted, dtype=torch.long, device=device),
            self._attention,
        )


class FixedRows:
    """`Forward` in blocks of fixed sizes.

    Args:
        attention: takes rows beyond those of the step, and its results for a row depend on no other.

    Raises SettingsError where rows of a block depend on their place in it.
    """

    def __init__(self, half: DecoderHalf, attention: Attention) -> None:
        if isinstance(half, nn.Module):
            keep_steady(half)
        self._half = half
        self._attention = attention
        self._sizes = agreeing([*SIZES], self._equal_rows)

    def __call__(
        self, step: Step, ids: Sequence[int], positions_3n: npt.NDArray[np.int64], wanted: Sequence[int]
    ) -> Tensor:
        logits = []
        for start, stop, size in blocks(step.rows, self._sizes):
            part = rows_of(step, start, stop)
            # Padding repeats a row; it is stored nowhere and attends to nothing.
            at = np.minimum(np.arange(start, start + size), stop - 1)
            seen = step.sees()[at]
            here = [row - start for row in wanted if start <= row < stop]
            padded = [*here, *[0] * (self._enough(len(here)) - len(here))]
            device = self._half.device
            self._attention.plan(part)
            some = self._half.forward(
                torch.tensor([ids[row] for row in at], device=device),
                torch.from_numpy(positions_3n[:, at]).to(device),
                torch.from_numpy(seen).to(device) if seen.any() else None,
                torch.tensor(padded, dtype=torch.long, device=device),
                self._attention,
            )
            logits.append(some[: len(here)])
        return torch.cat(logits)

    def _enough(self, count: int) -> int:
        """The size that so many rows are padded to."""
        return next(size for size in self._sizes if size >= count) if count else 0

    @torch.inference_mode()
    def _equal_rows(self, size: int, draw: int) -> Tensor:
        """(rows, vocabulary) logits of a block of equal rows, told in every number of rows it can be asked for."""
        generator = torch.Generator().manual_seed(draw)
        half = self._half
        token = torch.randint(half.vocab_size, (1,), generator=generator)
        position = torch.randint(half.max_positions, (3, 1), generator=generator)
        return torch.cat(
            [
                half.forward(
                    token.expand(size).to(half.device),
                    position.expand(3, size).to(half.device),
                    torch.ones(size, dtype=torch.bool, device=half.device),
                    torch.arange(asked, device=half.device),
                    _Itself(),
                )
                for asked in SIZES
                if asked <= size
            ]
        )


def blocks(rows: int, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, stop, size) of blocks of so many rows: of each the largest of the rising sizes that is at least half
    full, and else the least."""
    made = []
    start = 0
    while start < rows:
        left = rows - start
        size = next((size for size in reversed(sizes) if size <= 2 * left), sizes[0])
        stop = min(rows, start + size)
        made.append((start, stop, size))
        start = stop
    return made


def rows_of(step: Step, start: int, stop: int) -> Step:
    """Rows [start, stop) of a step, as a step of their own."""
    parts = []
    at = 0
    for one in step.sequences:
        low, high = max(start - at, 0), min(stop - at, one.rows)
        if low < high:
            parts.append(SequenceRows(one.start + low, high - low, one.pages, one.boundaries[low:high], one.extents))
        at += one.rows
    return Step(parts)


class _Itself(TorchVarlen):
    """`Attention` in which every row looks at itself alone, whatever that is."""

    def plan(self, step: Step) -> None:
        """There is nothing to prepare."""

    def attend_self(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, *, layer: int) -> Tensor:
        return q_nhd + (k_nkd + v_nkd).repeat_interleave(q_nhd.shape[1] // k_nkd.shape[1], dim=1)

    def attend_cross(self, q_nhd: Tensor, *, layer: int) -> Tensor:
        return q_nhd
