"""Attention inside frames of any sizes in one call, on a CUDA device: torch's flash kernel over cumulative lengths.

The lengths lie on the device, so one kernel serves any mix of frames, and `FixedVarlen` can be captured in a graph: who
replays it writes other lengths to the same place. FlashInfer's kernels are not used here: they are built for heads of
64, 128 and 256, and those of the released vision transformer have 72.

The kernel is an argument, and what surrounds it runs on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from chiasm.attention.staged import Staged


class Kernel(Protocol):
    """Attention inside sequences that lie one after another."""

    def __call__(self, q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, starts: Tensor, longest: int) -> Tensor:
        """(rows, heads, dim). `starts` (sequences + 1,) int32 on the rows' device: where each begins, and where the
        last ends; none is longer than `longest`. Rows behind the last are anything."""
        ...


def flash(q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, starts: Tensor, longest: int) -> Tensor:
    """`Kernel` of torch, for 16-bit numbers on CUDA (`torch.nn.attention.varlen`, from 2.10 on)."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(q_nhd, k_nhd, v_nhd, starts, starts, longest, longest)
    assert isinstance(out, Tensor)
    return out


class FlashVarlen:
    """`VarlenAttention` without causality, in one call whatever the lengths."""

    def __init__(self, device: torch.device, kernel: Kernel = flash) -> None:
        self._device = device
        self._kernel = kernel
        self._lengths: tuple[int, ...] = ()
        self._starts = torch.zeros(1, dtype=torch.int32, device=device)

    def varlen(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, lengths: Sequence[int], *, causal: bool) -> Tensor:
        assert not causal, "frames are not causal"
        if tuple(lengths) != self._lengths:  # once for all layers of a pass
            self._lengths = tuple(lengths)
            starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            self._starts = starts.to(self._device)
        return self._kernel(q_nhd, k_nkd, v_nkd, self._starts, max(lengths))


class FixedVarlen:
    """The same over rows of one number, at most so many sequences, whose lengths are put in place before.

    Rows beyond them are a sequence of their own, so that all rows are defined.
    """

    def __init__(self, rows: int, sequences: int, *, device: torch.device, kernel: Kernel = flash) -> None:
        self._rows = rows
        self._starts = Staged(sequences + 2, device=device, dtype=torch.int32)
        self._kernel = kernel

    def put(self, lengths: Sequence[int]) -> None:
        """The sequences of the next call. The copy before must be done."""
        ends = np.cumsum(lengths)
        assert len(lengths) + 2 <= len(self._starts.numpy), "more sequences than there is room for"
        assert ends[-1] <= self._rows, "more rows than there are"
        starts = self._starts.numpy
        starts[0], starts[1 : len(lengths) + 1], starts[len(lengths) + 1 :] = 0, ends, self._rows
        self._starts.send()

    def varlen(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, lengths: Sequence[int], *, causal: bool) -> Tensor:
        """`lengths` are those that were put."""
        assert not causal, "frames are not causal"
        return self._kernel(q_nhd, k_nkd, v_nkd, self._starts.device, self._rows)
