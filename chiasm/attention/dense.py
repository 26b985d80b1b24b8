"""Attention as plain functions of tensors, without pages: what training differentiates through.

A step is a batch of equally long rows (shorter sequences are padded on the right and their rows ignored by the caller).
Masks over all rows and keys are built here, and only here: serving knows a row's mask as two integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from chiasm.attention.backend import Step


def grouped_attention(
    q_bhtd: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """(B, heads, T, dim) queries over (B, kv heads, S, dim) keys and values; heads share keys in groups.

    `mask` is boolean, broadcast to (B, heads, T, S), true where a row may look. Returns (B, heads, T, dim).
    """
    grouped = q_bhtd.shape[1] != k_bksd.shape[1]
    return F.scaled_dot_product_attention(q_bhtd, k_bksd, v_bksd, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def varlen(q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, lengths: Sequence[int], *, causal: bool) -> Tensor:
    """`VarlenAttention.varlen` in one batched product per run of equally long sequences."""
    outs = []
    at = 0
    for length, count in _runs(lengths):
        stop = at + length * count
        q, k, v = (x[at:stop].unflatten(0, (count, length)).transpose(1, 2) for x in (q_nhd, k_nkd, v_nkd))
        outs.append(grouped_attention(q, k, v, causal=causal).transpose(1, 2).flatten(0, 1))
        at = stop
    assert at == q_nhd.shape[0], f"lengths cover {at} rows of {q_nhd.shape[0]}"
    return torch.cat(outs) if len(outs) != 1 else outs[0]


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1)
        else:
            runs.append((length, 1))
    return runs


class DenseAttention:
    """`Attention` over B padded sequences of T rows each, all from their first row, with gradients.

    Args:
        batch: B.
        cross: per cross layer the rotated keys and the values, each (B, kv heads, S, dim).
        boundaries_bt2: (B, T, 2) vision tokens [first, last) each row sees, in its own sequence's S.
    """

    def __init__(self, batch: int, cross: Sequence[tuple[Tensor, Tensor]], boundaries_bt2: Tensor) -> None:
        self._batch = batch
        self._cross = cross
        self._mask_b1ts: Tensor | None = None
        self._seen_bt = boundaries_bt2[..., 1] > boundaries_bt2[..., 0]
        if cross:
            at_s = torch.arange(cross[0][0].shape[2], device=boundaries_bt2.device)
            first, last = boundaries_bt2[..., :1], boundaries_bt2[..., 1:]
            mask_bts = (at_s >= first) & (at_s < last)
            # A row that sees nothing gets one key to look at, so that its softmax is defined; its result is zeroed.
            mask_bts[..., 0] |= ~self._seen_bt
            self._mask_b1ts = mask_bts.unsqueeze(1)

    def plan(self, step: Step) -> None:
        """Nothing is shared beyond what the constructor was given."""

    def varlen(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, lengths: Sequence[int], *, causal: bool) -> Tensor:
        return varlen(q_nhd, k_nkd, v_nkd, lengths, causal=causal)

    def attend_self(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, *, layer: int) -> Tensor:
        q, k, v = (x.unflatten(0, (self._batch, -1)).transpose(1, 2) for x in (q_nhd, k_nkd, v_nkd))
        return grouped_attention(q, k, v, causal=True).transpose(1, 2).flatten(0, 1)

    def attend_cross(self, q_nhd: Tensor, *, layer: int) -> Tensor:
        k_bksd, v_bksd = self._cross[layer]
        q_bhtd = q_nhd.unflatten(0, (self._batch, -1)).transpose(1, 2)
        out = grouped_attention(q_bhtd, k_bksd, v_bksd, mask=self._mask_b1ts)
        return (out * self._seen_bt[:, None, :, None]).transpose(1, 2).flatten(0, 1)
