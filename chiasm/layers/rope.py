"""Rotary embeddings: angles in float32, halves rotated against each other ("neox" pairs j and j + dim/2).

Of two halves (a, b) a rotation makes (a cos - b sin, b cos + a sin). The tables carry the sign, so that this is two
products and a sum for all layers of a step: sines are negated in their first half.

Where the two numbers of a pair lie side by side (`paired`), a pair is a complex number and a rotation one product.

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


def paired(dim: int) -> list[int]:
    """The order in which the numbers of a head lie when those that are rotated against each other lie side by side."""
    return [number for pair in zip(range(dim // 2), range(dim // 2, dim), strict=True) for number in pair]


def turns(angles_nf: Tensor) -> Tensor:
    """(rows, 1, dim / 2) complex numbers of length 1, of (rows, dim / 2) angles."""
    return torch.polar(torch.ones_like(angles_nf), angles_nf).unsqueeze(1)


def turn(x_nhd: Tensor, turns_n1f: Tensor) -> Tensor:
    """Rotates (rows, heads, dim), whose pairs lie side by side, by `turns`."""
    return torch.view_as_real(_complex(x_nhd) * turns_n1f).flatten(-2)


def turn_(x_nhd: Tensor, turns_n1f: Tensor) -> Tensor:
    """As `turn`, in x's own memory, which is contiguous."""
    _complex(x_nhd).mul_(turns_n1f)
    return x_nhd


def _complex(x_nhd: Tensor) -> Tensor:
    """(rows, heads, dim / 2): pairs as complex numbers, in the same memory."""
    return torch.view_as_complex(x_nhd.unflatten(-1, (-1, 2)))


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
