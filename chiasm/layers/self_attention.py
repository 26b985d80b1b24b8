"""Causal self-attention of the Qwen3 kind: per-head norms on queries and keys, grouped heads, rotary positions.

Where keys and values are kept is the attention backend's business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chiasm.attention.backend import Attention
from chiasm.layers.linear import Linear
from chiasm.layers.norm import RMSNorm
from chiasm.layers.rope import rotate


class SelfAttention(nn.Module):
    """One self-attention layer. The rows of its projection's weight are those of queries, keys and values.

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
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.qkv_proj = Linear(hidden, (heads + 2 * kv_heads) * head_dim, device=device, dtype=dtype)
        self.o_proj = Linear(heads * head_dim, hidden, device=device, dtype=dtype)
        self.q_norm = RMSNorm(head_dim, eps, device=device, dtype=dtype)
        self.k_norm = RMSNorm(head_dim, eps, device=device, dtype=dtype)

    def forward(self, x_nc: Tensor, cos_n1d: Tensor, sin_n1d: Tensor, attention: Attention) -> Tensor:
        """(rows, hidden) to (rows, hidden); the rows are those of the step the attention was planned for."""
        rows = x_nc.shape[0]
        both = self.heads + self.kv_heads
        qkv = self.qkv_proj(x_nc).view(rows, both + self.kv_heads, self.head_dim)
        # Queries and keys are normalised and rotated as one: each of these is some ten calls.
        qk, v_nkd = qkv.split_with_sizes((both, self.kv_heads), dim=1)
        qk = self.q_norm.quotient(qk)
        qk[:, : self.heads].mul_(self.q_norm.weight)
        qk[:, self.heads :].mul_(self.k_norm.weight)
        q_nhd, k_nkd = rotate(qk, cos_n1d, sin_n1d).split_with_sizes((self.heads, self.kv_heads), dim=1)
        out: Tensor = self.o_proj(attention.attend_self(q_nhd, k_nkd, v_nkd, layer=self.layer).flatten(1))
        return out
