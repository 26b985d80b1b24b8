"""Feed-forward layers of the text models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases (Qwen3)."""

    def __init__(self, hidden: int, intermediate: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, hidden) to (rows, hidden)."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down
