"""The dense decoder layer of Qwen3, which more than one family is made of. It knows no family."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from chiasm.attention.backend import Attention
from chiasm.layers.mlp import GatedMLP
from chiasm.layers.norm import RMSNorm
from chiasm.layers.self_attention import SelfAttention


class Sizes(Protocol):
    """What a family's configuration says of every such layer."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class Branches(nn.Module):
    """What any layer of this kind has, whatever it attends to: two norms and a gated MLP."""

    def __init__(self, sizes: Sizes, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps, device=device, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(sizes.hidden_size, sizes.intermediate_size, device=device, dtype=dtype)


class DecoderLayer(Branches):
    """Self-attention and MLP, each normed before and added to what came in.

    Args:
        layer: number among the self-attention layers from 0: its place in the self pool.
    """

    def __init__(self, sizes: Sizes, *, layer: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(sizes, device=device, dtype=dtype)
        self.self_attn = SelfAttention(
            sizes.hidden_size,
            sizes.num_attention_heads,
            sizes.num_key_value_heads,
            sizes.head_dim,
            layer=layer,
            eps=sizes.rms_norm_eps,
            device=device,
            dtype=dtype,
        )

    def forward(self, h_ne: Tensor, cos_n1d: Tensor, sin_n1d: Tensor, attention: Attention) -> Tensor:
        """(N, E) residual stream to (N, E), in memory of its own; (N, 1, D) rotary tables."""
        h_ne = h_ne + self.self_attn(self.input_layernorm(h_ne), cos_n1d, sin_n1d, attention)
        out: Tensor = h_ne + self.mlp(self.post_attention_layernorm(h_ne))
        return out
