"""MOSS-VL's decoder half: token ids and attached entries to logits. Holds no vision transformer.

Self layers are Qwen3's. At the cross layers' places a token looks at the vision tokens it may see, through gates; a
token that sees none passes a cross layer unchanged. The query is rotated in every step, prefill and decode alike.

Shape suffixes: N rows of a step, E width, H heads, D head dimension, S vision tokens of one unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from chiasm.attention.backend import Attention
from chiasm.layers.decoder_layer import Branches, DecoderLayer
from chiasm.layers.linear import Linear
from chiasm.layers.norm import RMSNorm
from chiasm.layers.rope import MultimodalRope, rotate
from chiasm.layers.stack import Stack
from chiasm.models.family import Overlay
from chiasm.models.moss_vl.config import Config, TextConfig
from chiasm.models.moss_vl.crossing import Crossing


class CrossAttention(nn.Module):
    """The decoder's share of a cross layer's attention: queries and output. Keys and values come attached.

    Args:
        layer: number among the cross layers from 0: its place in an entry and in the cross pool.
    """

    def __init__(self, t: TextConfig, *, layer: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = t.head_dim
        width = t.num_attention_heads * t.head_dim
        self.q_proj = Linear(t.hidden_size, width, device=device, dtype=dtype)
        self.o_proj = Linear(width, t.hidden_size, device=device, dtype=dtype)
        self.q_norm = RMSNorm(t.head_dim, t.rms_norm_eps, device=device, dtype=dtype)

    def forward(self, x_ne: Tensor, cos_n1d: Tensor, sin_n1d: Tensor, attention: Attention) -> Tensor:
        """(N, E) to (N, E), zero for a row that sees nothing; (N, 1, D) tables of the rows' text positions."""
        rows = x_ne.shape[0]
        q_nhd = rotate(self.q_norm(self.q_proj(x_ne).view(rows, -1, self.head_dim)), cos_n1d, sin_n1d)
        out: Tensor = self.o_proj(attention.attend_cross(q_nhd, layer=self.layer).reshape(rows, -1))
        return out


class CrossLayer(Branches):
    """Gated cross-attention and MLP, in the place of a self layer. Both branches are shut for a row that sees
    nothing."""

    def __init__(self, t: TextConfig, *, layer: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(t, device=device, dtype=dtype)
        self.cross_attn = CrossAttention(t, layer=layer, device=device, dtype=dtype)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(self, h_ne: Tensor, sees_n1: Tensor, cos_n1d: Tensor, sin_n1d: Tensor, attention: Attention) -> Tensor:
        """(N, E) residual stream to (N, E); `sees_n1` (N, 1) is 1 for a row that sees any vision token and 0 else."""
        crossed = self.cross_attn(self.input_layernorm(h_ne), cos_n1d, sin_n1d, attention)
        h_ne = h_ne + self.cross_attn_attn_gate.tanh() * sees_n1 * crossed
        fed: Tensor = self.mlp(self.post_attention_layernorm(h_ne))
        return h_ne + self.cross_attn_mlp_gate.tanh() * sees_n1 * fed


class MossVLDecoder(nn.Module):
    """`DecoderHalf` of MOSS-VL.

    Args:
        projects: holds the cross layers' projections of visual states too, to make keys and values of them itself.
    """

    def __init__(self, config: Config, *, device: torch.device, dtype: torch.dtype, projects: bool = False) -> None:
        super().__init__()
        t = config.text
        self.device = device
        self.dtype = dtype
        self.entry_shape = config.entry_shape
        self.layers_total = t.num_hidden_layers
        self.self_layers = len(t.self_attention_layers)
        self.heads = t.num_attention_heads
        self.kv_heads = t.num_key_value_heads
        self.head_dim = t.head_dim
        self.width = t.hidden_size
        self.vocab_size = t.vocab_size
        self.max_positions = t.max_position_embeddings
        self.rope = MultimodalRope(t.head_dim, t.rope_theta, t.mrope_section, device=device)
        self.embed_tokens = nn.Embedding(t.vocab_size, t.hidden_size, device=device, dtype=dtype)
        numbers = {kind: iter(range(t.num_hidden_layers)) for kind in (DecoderLayer, CrossLayer)}
        kinds = [CrossLayer if i in t.cross_attention_layers else DecoderLayer for i in range(t.num_hidden_layers)]
        self.layers = Stack(kind(t, layer=next(numbers[kind]), device=device, dtype=dtype) for kind in kinds)
        self.norm = RMSNorm(t.hidden_size, t.rms_norm_eps, device=device, dtype=dtype)
        self.lm_head = Linear(t.hidden_size, t.vocab_size, device=device, dtype=dtype)

        self.cross = Crossing(t, device=device, dtype=dtype) if projects else None

    @property
    def projects(self) -> bool:
        """Whether it makes keys and values of states."""
        return self.cross is not None

    def project(self, states: Tensor) -> Tensor:
        """(S, E) states to (layers, K|V, heads, S, D), keys normed and not rotated."""
        assert self.cross is not None, "this half was made without the projections of visual states"
        made: Tensor = self.cross(states)
        return made

    def place(self, entry: Tensor, positions_3t: Tensor) -> Tensor:
        """(layers, K|V, heads, S, D) with its keys rotated to (3, S) positions; values are left as they are."""
        cos_s1d, sin_s1d = self.rope.tables(positions_3t.to(self.device), entry.dtype)
        keys = entry[:, 0]
        rotated = rotate(keys.flatten(0, 1).transpose(0, 1), cos_s1d, sin_s1d).transpose(0, 1).reshape(keys.shape)
        return torch.stack((rotated, entry[:, 1]), dim=1)

    @property
    def headed(self) -> bool:
        """Always: no checkpoint of this family is cut."""
        return True

    def states_after(
        self,
        layers: Sequence[int],
        ids_n: Tensor,
        positions_3n: Tensor,
        sees_n: Tensor | None,
        rows_at: Tensor,
        attention: Attention,
        overlay: Overlay | None = None,
    ) -> list[Tensor]:
        """(len(rows_at), E) after each of those layers, of those rows, from (N,) ids and (3, N) positions. Self and
        cross layers are counted alike, from 1.

        `sees_n` (N,) tells which rows see any vision token; None when none does, and the cross layers are skipped.
        """
        assert overlay is None, "nothing is laid over a placeholder of this family"
        h_ne = self.embed_tokens(ids_n)
        cos_n1d, sin_n1d = self.rope.tables(positions_3n, h_ne.dtype)
        sees_n1 = None if sees_n is None else sees_n.to(h_ne.dtype).unsqueeze(-1)
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            if isinstance(layer, CrossLayer):
                if sees_n1 is not None:
                    h_ne = layer(h_ne, sees_n1, cos_n1d, sin_n1d, attention)
            else:
                h_ne = layer(h_ne, cos_n1d, sin_n1d, attention)
            if i + 1 in layers:
                kept.append(h_ne[rows_at])
                if len(kept) == len(layers):
                    break
        return kept

    def normed(self, states_me: Tensor) -> Tensor:
        """(M, E) after the last layer to (M, E)."""
        normed: Tensor = self.norm(states_me)
        return normed

    def logits(self, states_me: Tensor) -> Tensor:
        """(M, E) normed states to (M, vocabulary)."""
        logits: Tensor = self.lm_head(states_me)
        return logits

    def forward(
        self,
        ids_n: Tensor,
        positions_3n: Tensor,
        sees_n: Tensor | None,
        logits_at: Tensor,
        attention: Attention,
        overlay: Overlay | None = None,
    ) -> Tensor:
        """`logits` of the normed states of the rows `logits_at`."""
        last = (self.layers_total,)
        (states_me,) = self.states_after(last, ids_n, positions_3n, sees_n, logits_at, attention, overlay)
        return self.logits(self.normed(states_me))
