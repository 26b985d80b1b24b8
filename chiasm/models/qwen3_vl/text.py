"""Qwen3-VL's decoder half: token ids, and features laid over placeholders, to logits. Holds no vision transformer.

The layers are Qwen3's. A placeholder's embedding is the main merger's output for its vision token; behind each of the
first layers what that token's next tap gave is added to its row. No other row hears of an image but through attention.
A step may begin or end inside an image: every row brings its own features.

Shape suffixes: N rows of a step, M of them wanted, V of them placeholders, E width, W = E * (1 + taps).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from chiasm.attention.backend import Attention
from chiasm.layers.decoder_layer import DecoderLayer
from chiasm.layers.linear import Linear, Tied
from chiasm.layers.norm import RMSNorm
from chiasm.layers.rope import MultimodalRope
from chiasm.layers.stack import Stack
from chiasm.models.family import Overlay
from chiasm.models.qwen3_vl.config import Config


class Qwen3VLLayers(nn.Module):
    """The embeddings and the first layers: what a whole decoder half and one that is cut after a layer have in common.

    Args:
        layers: how many.
    """

    def __init__(self, config: Config, layers: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        t = config.text
        self.device = device
        self.dtype = dtype
        self.entry_shape = config.entry_shape
        self.layers_total = self.self_layers = layers
        self.heads = t.num_attention_heads
        self.kv_heads = t.num_key_value_heads
        self.head_dim = t.head_dim
        self.width = t.hidden_size
        self.vocab_size = t.vocab_size
        self.max_positions = t.max_position_embeddings
        self.taps = config.taps
        self.rope = MultimodalRope(t.head_dim, t.rope_theta, t.mrope_section, device=device)
        self.embed_tokens = nn.Embedding(t.vocab_size, t.hidden_size, device=device, dtype=dtype)
        self.layers = Stack(DecoderLayer(t, layer=i, device=device, dtype=dtype) for i in range(layers))

    @property
    def projects(self) -> bool:
        """It does not: features are laid over placeholders as they are."""
        return False

    def project(self, states: Tensor) -> Tensor:
        """Not of this family: nothing attends to features apart from the text."""
        raise NotImplementedError("features are laid over placeholders as they are")

    def place(self, entry: Tensor, positions_3t: Tensor) -> Tensor:
        """The (tokens, W) entry as it is: its rows are rotated with the text's."""
        return entry

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
        """(M, E) after each of those layers, of those rows, from (N,) ids and (3, N) positions. A tap's features are
        in the state after the layer that they are added behind.

        Args:
            sees_n: None, for no layer attends to visual tokens apart.
            overlay: (V,) rows that are placeholders and their (V, W) features. Raises ValueError for another width.
        """
        assert sees_n is None, "no layer of this family attends to visual tokens apart"
        h_ne = self.embed_tokens(ids_n)
        taps: list[Tensor] = []
        if overlay is not None:
            main_ve, *taps = self._levels(overlay.features_vw)
            h_ne.index_copy_(0, overlay.rows_v, main_ve)
        cos_n1d, sin_n1d = self.rope.tables(positions_3n, h_ne.dtype)
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            h_ne = layer(h_ne, cos_n1d, sin_n1d, attention)
            if overlay is not None and i < len(taps):
                h_ne.index_put_((overlay.rows_v,), taps[i], accumulate=True)
            if i + 1 in layers:
                kept.append(h_ne[rows_at])
                if len(kept) == len(layers):
                    break
        return kept

    def _levels(self, features_vw: Tensor) -> tuple[Tensor, ...]:
        """What the main merger gave and what each tap gave, (V, E) each."""
        levels, width = 1 + self.taps, features_vw.shape[-1]
        if width != self.entry_shape.hidden:
            raise ValueError(f"features are {width} wide, not {levels} times {self.embed_tokens.embedding_dim}")
        return features_vw.chunk(levels, dim=-1)


class Qwen3VLDecoder(Qwen3VLLayers):
    """`DecoderHalf` of Qwen3-VL."""

    headed = True

    def __init__(self, config: Config, *, device: torch.device, dtype: torch.dtype) -> None:
        t = config.text
        assert config.taps <= t.num_hidden_layers, f"{config.taps} taps are for {t.num_hidden_layers} layers"
        super().__init__(config, t.num_hidden_layers, device=device, dtype=dtype)
        self.norm = RMSNorm(t.hidden_size, t.rms_norm_eps, device=device, dtype=dtype)
        self.lm_head = (
            Tied(self.embed_tokens.weight, device=device)
            if config.tie_word_embeddings
            else Linear(t.hidden_size, t.vocab_size, device=device, dtype=dtype)
        )

    def normed(self, states_me: Tensor) -> Tensor:
        """(M, E) after the last layer to (M, E)."""
        normed: Tensor = self.norm(states_me)
        return normed

    def logits(self, states_me: Tensor) -> Tensor:
        """(M, E) normed states to (M, vocabulary)."""
        return self.lm_head(states_me)

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
