"""Every tensor of a Qwen3-VL checkpoint, the half that owns it and the parameter it fills. No torch code runs here.

The encoder half owns the vision transformer and its mergers, the decoder half all others. Names are those that
`transformers` writes, or those of older checkpoints, in which the halves stand side by side at the top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from chiasm.models.qwen3_vl.config import Config, VisionConfig
from chiasm.models.tables import TEXT, VISION, affine, feed, own, self_attention, vision_transformer
from chiasm.models.weights import Part, Weight, WeightTable

HEAD = "lm_head.weight"

OLDER: Mapping[str, str] = MappingProxyType({TEXT: "model.", VISION: "visual."})
"""How names begin, and how they begin in older checkpoints."""


def weight_table(config: Config) -> WeightTable:
    weights = (*_vision(config.vision), *_text(config))
    return WeightTable(tuple(weight.also_under(OLDER) for weight in weights))


def _vision(v: VisionConfig) -> Iterator[Weight]:
    yield from vision_transformer(v, (v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size))
    width = v.hidden_size * v.spatial_merge_size**2
    yield from _merger(v, "merger", "merger", v.hidden_size)
    for n in range(len(v.deepstack_visual_indexes)):
        yield from _merger(v, f"tap_mergers.{n}", f"deepstack_merger_list.{n}", width)


def _merger(v: VisionConfig, parameter: str, name: str, normed: int) -> Iterator[Weight]:
    """A merger whose norm is so wide."""
    width = v.hidden_size * v.spatial_merge_size**2
    yield from affine(f"{parameter}.norm", normed, name=f"{name}.norm")
    yield from affine(f"{parameter}.linear_fc1", width, width, name=f"{name}.linear_fc1")
    yield from affine(f"{parameter}.linear_fc2", v.out_hidden_size, width, name=f"{name}.linear_fc2")


def _text(config: Config) -> Iterator[Weight]:
    t = config.text
    if config.tie_word_embeddings:
        # Stored once, or as the same tensor under both names. Two that differ are two weights, and so no tied head.
        names = (f"{TEXT}embed_tokens.weight", HEAD)
        ways = tuple((Part(name, (t.vocab_size, t.hidden_size)),) for name in names)
        yield Weight("decoder", "embed_tokens.weight", ways, tied=True)
    else:
        yield own("embed_tokens.weight", t.vocab_size, t.hidden_size)
        yield own(HEAD, t.vocab_size, t.hidden_size, prefix="")
    yield own("norm.weight", t.hidden_size)
    for i in range(t.num_hidden_layers):
        yield from feed(t, f"layers.{i}")
        yield from self_attention(t, f"layers.{i}")
