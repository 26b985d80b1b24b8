"""Feed-forward layers of the text models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chiasm.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases (Qwen3). The rows of gate's weight lie above those of up's."""

    def __init__(self, hidden: int, intermediate: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.intermediate = intermediate
        self.gate_up_proj = Linear(hidden, 2 * intermediate, device=device, dtype=dtype)
        self.down_proj = Linear(intermediate, hidden, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, hidden) to (rows, hidden)."""
        gate, up = self.gate_up_proj(x).split_with_sizes((self.intermediate, self.intermediate), dim=-1)
        down: Tensor = self.down_proj(F.silu(gate) * up)
        return down
