"""Causal self-attention of the Qwen3 kind: per-head norms on queries and keys, grouped heads, rotary positions.

Where keys and values are kept is the attention backend's business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chiasm.attention.backend import Attention
from chiasm.layers.norm import RMSNorm
from chiasm.layers.rope import rotate


class SelfAttention(nn.Module):
    """One self-attention layer.

    Args:
        layer: number among the self-attention layers from 0: its place in the self pool.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        layer: int,
        eps: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False, device=device, dtype=dtype)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False, device=device, dtype=dtype)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False, device=device, dtype=dtype)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False, device=device, dtype=dtype)
        self.q_norm = RMSNorm(head_dim, eps, device=device, dtype=dtype)
        self.k_norm = RMSNorm(head_dim, eps, device=device, dtype=dtype)

    def forward(self, x_nc: Tensor, cos_nd: Tensor, sin_nd: Tensor, attention: Attention) -> Tensor:
        """(rows, hidden) to (rows, hidden); the rows are those of the step the attention was planned for."""
        rows = x_nc.shape[0]
        q_nhd = rotate(self.q_norm(self.q_proj(x_nc).view(rows, -1, self.head_dim)), cos_nd, sin_nd)
        k_nkd = rotate(self.k_norm(self.k_proj(x_nc).view(rows, -1, self.head_dim)), cos_nd, sin_nd)
        v_nkd = self.v_proj(x_nc).view(rows, -1, self.head_dim)
        out: Tensor = self.o_proj(attention.attend_self(q_nhd, k_nkd, v_nkd, layer=self.layer).reshape(rows, -1))
        return out
