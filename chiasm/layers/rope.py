"""Rotary embeddings: angles in float32, halves rotated against each other ("neox" pairs j and j + dim/2).

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


def rotate(x_nhd: Tensor, cos_nd: Tensor, sin_nd: Tensor) -> Tensor:
    """Rotates (rows, heads, dim) by (rows, dim) tables; products in the common type of x and the tables."""
    half = x_nhd.shape[-1] // 2
    turned = torch.cat((-x_nhd[..., half:], x_nhd[..., :half]), dim=-1)
    return x_nhd * cos_nd.unsqueeze(1) + turned * sin_nd.unsqueeze(1)


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
        """cos and sin, each (rows, dim) in `dtype`, of (3, rows) integer positions. Computed in float32, cast last."""
        angles = positions_3n.float()[self.axis].T * self.inverse
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)
