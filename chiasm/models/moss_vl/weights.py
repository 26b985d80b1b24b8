"""Every tensor of a MOSS-VL checkpoint, the half that owns it and the parameter it fills. No torch code runs here.

895 tensors at the released size. The encoder half owns the vision transformer, the merger, the separator and, of each
cross layer, the three tensors that make keys and values of vision states; the decoder half owns all others. One that
projects states itself fills those three too.
"""

from __future__ import annotations

from collections.abc import Iterator

from chiasm.models.moss_vl.config import Config, VisionConfig
from chiasm.models.tables import TEXT, affine, feed, own, self_attention, vision_transformer
from chiasm.models.weights import Weight, WeightTable, whole

_LAYERS = f"{TEXT}layers"


def weight_table(config: Config) -> WeightTable:
    return WeightTable((*_vision(config.vision), *_crossing(config), *_text(config)))


def _vision(v: VisionConfig) -> Iterator[Weight]:
    yield from vision_transformer(v, (v.in_channels, 1, v.patch_size, v.patch_size))
    levels = 1 + len(v.deepstack_visual_indexes)
    for i in range(levels):
        yield from affine(f"merger.norms.{i}", v.hidden_size)
    width = v.hidden_size * levels * v.spatial_merge_size**2
    yield from affine("merger.linear_fc1", width, width)
    yield from affine("merger.linear_fc2", v.out_hidden_size, width)


def _crossing(config: Config) -> Iterator[Weight]:
    """The encoder's share of the cross layers, and the separator that ends every frame."""
    t = config.text
    yield whole("encoder", "separator_token", "model.separator_token", t.hidden_size)
    for number, i in enumerate(t.cross_attention_layers):
        name = f"{_LAYERS}.{i}.cross_attn"
        for projection in ("k_proj", "v_proj"):
            shape = (t.num_key_value_heads * t.head_dim, t.hidden_size)
            parameter = f"cross.{number}.{projection}.weight"
            yield whole("encoder", parameter, f"{name}.{projection}.weight", *shape, projects=True)
        norm = f"{name}.k_norm.weight"
        yield whole("encoder", f"cross.{number}.k_norm.weight", norm, t.head_dim, projects=True)


def _text(config: Config) -> Iterator[Weight]:
    t = config.text
    hidden, queries = t.hidden_size, t.num_attention_heads * t.head_dim
    yield own("embed_tokens.weight", t.vocab_size, hidden)
    yield own("norm.weight", hidden)
    yield own("lm_head.weight", t.vocab_size, hidden, prefix="")
    for i in range(t.num_hidden_layers):
        layer = f"layers.{i}"
        yield from feed(t, layer)
        if i in t.cross_attention_layers:
            attention = f"{layer}.cross_attn"
            yield own(f"{attention}.o_proj.weight", hidden, queries)
            yield own(f"{attention}.q_norm.weight", t.head_dim)
            yield own(f"{attention}.q_proj.weight", queries, hidden)
            for gate in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
                yield own(f"{layer}.{gate}", 1)
        else:
            yield from self_attention(t, layer)
