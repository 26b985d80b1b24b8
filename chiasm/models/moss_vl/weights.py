"""Every tensor of a MOSS-VL checkpoint, the half that owns it and the parameter it fills. No torch code runs here.

895 tensors at the released size. The encoder half owns the vision transformer, the merger, the separator and, of each
cross layer, the three tensors that make keys and values of vision states; the decoder half owns all others. One that
projects states itself fills those three too.
"""

from __future__ import annotations

from collections.abc import Iterator

from chiasm.layers.vit import rows_paired
from chiasm.models.moss_vl.config import Config, VisionConfig
from chiasm.models.weights import Part, Weight, WeightTable, whole

_LAYERS = "model.language_model.layers"


def weight_table(config: Config) -> WeightTable:
    return WeightTable((*_vision(config.vision), *_crossing(config), *_text(config)))


def _vision(v: VisionConfig) -> Iterator[Weight]:
    c, inner = v.hidden_size, v.intermediate_size
    yield whole(
        "encoder",
        "visual.patch_embed.weight",
        "model.visual.patch_embed.proj.weight",
        *(c, v.in_channels, 1, v.patch_size, v.patch_size),
    )
    yield whole("encoder", "visual.patch_embed.bias", "model.visual.patch_embed.proj.bias", c)
    yield whole("encoder", "visual.pos_embed.weight", "model.visual.pos_embed.weight", v.num_position_embeddings, c)
    order = rows_paired(c, v.num_heads)
    for i in range(v.depth):
        block = f"visual.blocks.{i}"
        for norm in ("norm1", "norm2"):
            yield from _affine(f"{block}.{norm}", c)
        for kind, shape in (("weight", (c,)), ("bias", ())):
            yield _fused(f"{block}.attn", kind, c, shape, order)
        yield from _affine(f"{block}.attn.proj", c, c)
        yield from _affine(f"{block}.mlp.linear_fc1", inner, c)
        yield from _affine(f"{block}.mlp.linear_fc2", c, inner)
    levels = 1 + len(v.deepstack_visual_indexes)
    for i in range(levels):
        yield from _affine(f"merger.norms.{i}", c, prefix="model.visual.")
    width = c * levels * v.spatial_merge_size**2
    yield from _affine("merger.linear_fc1", width, width, prefix="model.visual.")
    yield from _affine("merger.linear_fc2", v.out_hidden_size, width, prefix="model.visual.")


def _affine(parameter: str, *shape: int, prefix: str = "model.") -> Iterator[Weight]:
    yield whole("encoder", f"{parameter}.weight", f"{prefix}{parameter}.weight", *shape)
    yield whole("encoder", f"{parameter}.bias", f"{prefix}{parameter}.bias", shape[0])


def _fused(attention: str, kind: str, rows: int, columns: tuple[int, ...], order: tuple[int, ...]) -> Weight:
    """Queries, keys and values of a block: one tensor, or three under either of their usual names."""
    fused = (Part(f"model.{attention}.qkv.{kind}", (3 * rows, *columns)),)
    split = (
        tuple(
            Part(f"model.{attention}.{part}.{kind}", (rows, *columns), (i * rows, (i + 1) * rows))
            for i, part in enumerate(names)
        )
        for names in (("q", "k", "v"), ("q_proj", "k_proj", "v_proj"))
    )
    return Weight("encoder", f"{attention}.qkv.{kind}", (fused, *split), order=order)


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
    hidden, queries, keys = t.hidden_size, t.num_attention_heads * t.head_dim, t.num_key_value_heads * t.head_dim

    def own(parameter: str, *shape: int, prefix: str = "model.language_model.") -> Weight:
        return whole("decoder", parameter, f"{prefix}{parameter}", *shape)

    yield own("embed_tokens.weight", t.vocab_size, hidden)
    yield own("norm.weight", hidden)
    yield own("lm_head.weight", t.vocab_size, hidden, prefix="")
    for i in range(t.num_hidden_layers):
        layer = f"layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield own(f"{layer}.{norm}.weight", hidden)
        yield _stacked(
            f"{layer}.mlp", "gate_up_proj", hidden, gate_proj=t.intermediate_size, up_proj=t.intermediate_size
        )
        yield own(f"{layer}.mlp.down_proj.weight", hidden, t.intermediate_size)
        crosses = i in t.cross_attention_layers
        attention = f"{layer}.{'cross_attn' if crosses else 'self_attn'}"
        yield own(f"{attention}.o_proj.weight", hidden, queries)
        yield own(f"{attention}.q_norm.weight", t.head_dim)
        if crosses:
            yield own(f"{attention}.q_proj.weight", queries, hidden)
            for gate in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
                yield own(f"{layer}.{gate}", 1)
        else:
            yield _stacked(attention, "qkv_proj", hidden, q_proj=queries, k_proj=keys, v_proj=keys)
            yield own(f"{attention}.k_norm.weight", t.head_dim)


def _stacked(module: str, parameter: str, inputs: int, **outputs: int) -> Weight:
    """Projections of the same input, computed as one: tensors of so many rows each, one above the other."""
    parts = []
    at = 0
    for projection, rows in outputs.items():
        name = f"model.language_model.{module}.{projection}.weight"
        parts.append(Part(name, (rows, inputs), (at, at + rows)))
        at += rows
    return Weight("decoder", f"{module}.{parameter}.weight", (tuple(parts),))
