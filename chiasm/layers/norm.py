"""RMS normalisation with the rounding of the reference implementation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis.

    The quotient is taken in float32 and cast to x's type before the weight is multiplied, as transformers' Qwen3 does:
    in bfloat16 the order decides the last bit.
    """

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to the same shape and type."""
        return self.weight * normalised(x, self.eps)


def normalised(x: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis, taken in float32 at least; of x's shape and type."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)
