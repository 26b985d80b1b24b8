"""Rows of weight tables that families share: of the vision transformer and of the self layer of `chiasm.layers`.

Names are those of Hugging Face; how a family's own parts are called is the family's. No torch code runs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from chiasm.layers.vit import rows_paired
from chiasm.models.weights import Part, Weight, whole

VISION = "model.visual."
TEXT = "model.language_model."


class VisionSizes(Protocol):
    """What the tensors of a vision transformer are as large as."""

    @property
    def depth(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_position_embeddings(self) -> int: ...


class TextSizes(Protocol):
    """What the tensors of a decoder's layer are as large as."""

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


def vision_transformer(v: VisionSizes, kernel: Sequence[int]) -> Iterator[Weight]:
    """Of `VisionTransformer`, the parameter `visual` of an encoder half.

    Args:
        kernel: of the patch embedding: channels, time, rows, columns.
    """
    c, inner = v.hidden_size, v.intermediate_size
    yield whole("encoder", "visual.patch_embed.weight", f"{VISION}patch_embed.proj.weight", c, *kernel)
    yield whole("encoder", "visual.patch_embed.bias", f"{VISION}patch_embed.proj.bias", c)
    yield whole("encoder", "visual.pos_embed.weight", f"{VISION}pos_embed.weight", v.num_position_embeddings, c)
    order = rows_paired(c, v.num_heads)
    for i in range(v.depth):
        block = f"visual.blocks.{i}"
        for norm in ("norm1", "norm2"):
            yield from affine(f"{block}.{norm}", c, prefix="model.")
        for kind, shape in (("weight", (c,)), ("bias", ())):
            yield _fused(f"{block}.attn", kind, c, shape, order)
        yield from affine(f"{block}.attn.proj", c, c, prefix="model.")
        yield from affine(f"{block}.mlp.linear_fc1", inner, c, prefix="model.")
        yield from affine(f"{block}.mlp.linear_fc2", c, inner, prefix="model.")


def affine(parameter: str, *shape: int, prefix: str = VISION, name: str | None = None) -> Iterator[Weight]:
    """A weight and a bias of an encoder half; `name` in the checkpoint is the parameter's unless it is given."""
    stored = f"{prefix}{parameter if name is None else name}"
    yield whole("encoder", f"{parameter}.weight", f"{stored}.weight", *shape)
    yield whole("encoder", f"{parameter}.bias", f"{stored}.bias", shape[0])


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


def own(parameter: str, *shape: int, prefix: str = TEXT) -> Weight:
    """A parameter of a decoder half, stored under its own name."""
    return whole("decoder", parameter, f"{prefix}{parameter}", *shape)


def feed(t: TextSizes, layer: str) -> Iterator[Weight]:
    """The norms and the gated MLP of a layer of any kind."""
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield own(f"{layer}.{norm}.weight", t.hidden_size)
    yield stacked(
        f"{layer}.mlp", "gate_up_proj", t.hidden_size, gate_proj=t.intermediate_size, up_proj=t.intermediate_size
    )
    yield own(f"{layer}.mlp.down_proj.weight", t.hidden_size, t.intermediate_size)


def self_attention(t: TextSizes, layer: str) -> Iterator[Weight]:
    """`SelfAttention` of a layer."""
    attention, hidden = f"{layer}.self_attn", t.hidden_size
    queries, keys = t.num_attention_heads * t.head_dim, t.num_key_value_heads * t.head_dim
    yield own(f"{attention}.o_proj.weight", hidden, queries)
    yield own(f"{attention}.q_norm.weight", t.head_dim)
    yield stacked(attention, "qkv_proj", hidden, q_proj=queries, k_proj=keys, v_proj=keys)
    yield own(f"{attention}.k_norm.weight", t.head_dim)


def stacked(module: str, parameter: str, inputs: int, **outputs: int) -> Weight:
    """Projections of the same input, computed as one: tensors of so many rows each, one above the other."""
    parts = []
    at = 0
    for projection, rows in outputs.items():
        name = f"{TEXT}{module}.{projection}.weight"
        parts.append(Part(name, (rows, inputs), (at, at + rows)))
        at += rows
    return Weight("decoder", f"{module}.{parameter}.weight", (tuple(parts),))
