"""RMS normalisation with the rounding of the reference implementation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis.

    The quotient is taken in float32 and cast to x's type before the weight is multiplied, as transformers' Qwen3 does:
    in bfloat16 the order decides the last bit. In float32 the sums of squares may differ from theirs by rounding.
    """

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self._wide = torch.promote_types(dtype, torch.float32)
        self._eps = torch.tensor(eps, device=device, dtype=self._wide)  # no parameter: it is never cast

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to the same shape and type."""
        return self.quotient(x).mul_(self.weight)

    def quotient(self, x: Tensor) -> Tensor:
        """x / rms(x), of x's shape and type."""
        if not x.is_cpu:
            return F.rms_norm(x, x.shape[-1:], eps=self.eps)
        # On a CPU torch's own makes twice as many calls, and a decode step of one row consists of calls.
        if x.dtype == self._wide:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x * torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self._wide)
        return (x * torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()).to(x.dtype)
