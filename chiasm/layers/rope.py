"""Rotary embeddings: angles in float32, halves rotated against each other ("neox" pairs j and j + dim/2).

Of two halves (a, b) a rotation makes (a cos - b sin, b cos + a sin). The tables carry the sign, so that this is two
products and a sum for all layers of a step: sines are negated in their first half.

Tables are plain tensors, never module buffers: casting a module to bfloat16 must not touch them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def inverse_frequencies(dim: int, theta: float, *, device: torch.device) -> Tensor:
    """(dim / 2,) float32: theta ** (-2 j / dim)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / (theta**exponents)


def tables(angles_nf: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, and sin with its sign, each (rows, 1, dim) in `dtype`, of (rows, dim / 2) angles. Cast last."""
    cos, sin = angles_nf.cos(), angles_nf.sin()
    both = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return both[0].unsqueeze(1).to(dtype), both[1].unsqueeze(1).to(dtype)


def rotate(x_nhd: Tensor, cos_n1d: Tensor, sin_n1d: Tensor) -> Tensor:
    """Rotates (rows, heads, dim) by `tables`; products in the common type of x and the tables."""
    swapped = x_nhd.roll(x_nhd.shape[-1] // 2, dims=-1)
    return (x_nhd * cos_n1d).addcmul_(swapped, sin_n1d)


def rotate_(x_nhd: Tensor, cos_n1d: Tensor, sin_n1d: Tensor) -> Tensor:
    """As `rotate`, in x's own memory and type."""
    swapped = x_nhd.roll(x_nhd.shape[-1] // 2, dims=-1)
    return x_nhd.mul_(cos_n1d).addcmul_(swapped, sin_n1d)


class MultimodalRope:
    """Interleaved mRoPE: one position per axis (time, height, width), frequencies dealt out to the axes in turn.

    Frequency j belongs to height if j = 1, 4, ... < 3 * section[1], to width if j = 2, 5, ... < 3 * section[2], else to
    time (Qwen3-VL's rule, which MOSS-VL shares).

    Args:
        section: frequencies per axis; they sum to dim / 2.
    """

    def __init__(self, dim: int, theta: float, section: Sequence[int], *, device: torch.device) -> None:
        self.inverse = inverse_frequencies(dim, theta, device=device)
        axis = torch.zeros(dim // 2, dtype=torch.long)
        for which in (1, 2):
            axis[which : 3 * section[which] : 3] = which
        self.axis = axis.to(device)

    def tables(self, positions_3n: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`tables` of (3, rows) integer positions, from angles in float32."""
        return tables(positions_3n.float()[self.axis].T * self.inverse, dtype)
