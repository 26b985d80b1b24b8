"""What MOSS-VL's cross layers do to visual states: keys and values of every layer. The encoder half does it, or, where
states are what entries hold, the decoder half.

Shape suffixes: L cross layers, S vision tokens (merged and separators), E text width, K kv heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chiasm.layers.norm import RMSNorm
from chiasm.models.moss_vl.config import TextConfig


class CrossingLayer(nn.Module):
    """What a cross layer does to vision states: keys, normed and not rotated, and values."""

    def __init__(self, t: TextConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = t.head_dim
        width = t.num_key_value_heads * t.head_dim
        self.k_proj = nn.Linear(t.hidden_size, width, bias=False, device=device, dtype=dtype)
        self.v_proj = nn.Linear(t.hidden_size, width, bias=False, device=device, dtype=dtype)
        self.k_norm = RMSNorm(t.head_dim, t.rms_norm_eps, device=device, dtype=dtype)

    def forward(self, states_se: Tensor) -> Tensor:
        """(S, E) to (K|V, K, S, D)."""
        k_skd = self.k_norm(self.k_proj(states_se).view(states_se.shape[0], -1, self.head_dim))
        v_skd = self.v_proj(states_se).view(states_se.shape[0], -1, self.head_dim)
        return torch.stack((k_skd, v_skd)).transpose(1, 2)


class Crossing(nn.ModuleList):
    """All cross layers' share, in order."""

    def __init__(self, t: TextConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(CrossingLayer(t, device=device, dtype=dtype) for _ in t.cross_attention_layers)

    def forward(self, states_se: Tensor) -> Tensor:
        """(S, E) to (L, K|V, K, S, D)."""
        return torch.stack([layer(states_se) for layer in self])
