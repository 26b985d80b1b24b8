"""Feed-forward layers of the text models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chiasm.layers.linear import Linear


def steady_silu(x: Tensor) -> Tensor:
    """`silu` that gives equal numbers equal results wherever they lie.

    On CPU torch's own computes what is left over of a row of vector registers, at the end of each thread's share, with
    another exponential, which differs in the last bit for one float32 number in a hundred. `exp` alone does not.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / wide.neg().exp_().add_(1)).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases (Qwen3). The rows of gate's weight lie above those of up's.

    Attributes:
        activation: `silu`, or `steady_silu`.
    """

    def __init__(self, hidden: int, intermediate: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = F.silu
        self.intermediate = intermediate
        self.gate_up_proj = Linear(hidden, 2 * intermediate, device=device, dtype=dtype)
        self.down_proj = Linear(intermediate, hidden, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, hidden) to (rows, hidden)."""
        if self.gate_up_proj.from_left(x.shape[0]):
            # On the side of the weight what lies between is not turned, which is most of what turning costs.
            both = self.gate_up_proj.columns(x.t(), self.gate_up_proj.weight)
            gate, up = both.split_with_sizes((self.intermediate, self.intermediate))
            return self.down_proj.columns(self.activation(gate) * up, self.down_proj.weight).t().contiguous()
        gate, up = self.gate_up_proj(x).split_with_sizes((self.intermediate, self.intermediate), dim=-1)
        down: Tensor = self.down_proj(self.activation(gate) * up)
        return down


def keep_steady(module: nn.Module) -> None:
    """Makes every MLP in a module give equal numbers equal results."""
    for part in module.modules():
        if isinstance(part, GatedMLP):
            part.activation = steady_silu
