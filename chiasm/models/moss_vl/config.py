"""What a MOSS-VL checkpoint's `config.json` says, read strictly. No torch.

Every key that the mathematics needs must be there; every option this family does not do is refused by name. Sources of
the rules: the released configuration, as the public ports read it, and the tensor list of the released checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from chiasm.models.family import EntryShape
from chiasm.models.reading import Reader
from chiasm.models.rotary import read_mrope

ARCHITECTURE = "MossVLForConditionalGeneration"

MAX_LAYERS = 4096
"""Lists as long as the layers are made before a weight is looked at."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The ViT and its joint merger. Sizes in channels, patches and pixels as their names say."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    """Blocks whose outputs go to the merger beside the last one's, ascending."""

    layer_norm_eps: float = 1e-6
    """Not in the configuration: fixed in every implementation of this ViT."""

    rope_theta: float = 10_000.0
    """Likewise fixed."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def position_grid(self) -> int:
        """Side of the square table of learned positions."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_values(self) -> int:
        """Values of one patch: channels * patch_size**2."""
        return self.in_channels * self.patch_size**2

    @property
    def factor(self) -> int:
        """Pixels of a merged token's side: what both sides of a resized frame are multiples of."""
        return self.patch_size * self.spatial_merge_size


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The decoder: self layers, and cross layers in their place at `cross_attention_layers`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    cross_attention_layers: tuple[int, ...]
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]

    @property
    def self_attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.cross_attention_layers)


@dataclass(frozen=True, slots=True)
class Config:
    """A whole MOSS-VL configuration. Token ids are those of the checkpoint's own vocabulary."""

    vision: VisionConfig
    text: TextConfig
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int

    @property
    def entry_shape(self) -> EntryShape:
        t = self.text
        return EntryShape(len(t.cross_attention_layers), t.num_key_value_heads, t.head_dim, t.hidden_size)


def read_config(data: dict[str, object], where: str) -> Config:
    """Reads the object of a `config.json`.

    Raises CheckpointError that lists every missing key, every impossible value and every refused option.
    """
    top = Reader(data)
    top.refuse_unless("tie_word_embeddings", False, why="MOSS-VL checkpoints carry a head of their own")
    top.refuse_unless("vision_seq_pad_multiple", 1, why="padding is always masked, set it to 1")
    top.refuse_unless("quantization_config", why="quantised checkpoints are not loaded")
    vision = _read_vision(top.section("vision_config"))
    text = _read_text(top.section("text_config"))
    tokens = {
        name: top.integer(name, at_least=0)
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    }
    for name, token in tokens.items():
        if token >= text.vocab_size:
            top.problem(name, f"is {token}, the vocabulary has {text.vocab_size} ids")
    if vision.out_hidden_size != text.hidden_size:
        top.problem(
            "vision_config.out_hidden_size",
            f"is {vision.out_hidden_size}, text_config.hidden_size is {text.hidden_size}",
        )
    top.finish(where)
    return Config(vision=vision, text=text, **tokens)


def _read_vision(section: Reader) -> VisionConfig:
    section.refuse_unless("hidden_act", "gelu_pytorch_tanh", why="the blocks use the tanh GELU")
    section.refuse_unless("temporal_patch_size", 1, why="a unit is one frame")
    section.refuse_unless("in_channels", 3, why="frames are RGB")
    config = VisionConfig(
        depth=section.integer("depth", at_most=MAX_LAYERS),
        hidden_size=section.integer("hidden_size"),
        intermediate_size=section.integer("intermediate_size"),
        num_heads=section.integer("num_heads"),
        in_channels=section.integer("in_channels"),
        patch_size=section.integer("patch_size"),
        spatial_merge_size=section.integer("spatial_merge_size"),
        out_hidden_size=section.integer("out_hidden_size"),
        num_position_embeddings=section.integer("num_position_embeddings"),
        deepstack_visual_indexes=tuple(sorted(section.integers("deepstack_visual_indexes"))),
    )
    section.integer("temporal_patch_size")
    section.string("hidden_act")
    taps = config.deepstack_visual_indexes
    if len(set(taps)) != len(taps) or any(not 0 <= tap < config.depth for tap in taps):
        section.problem("deepstack_visual_indexes", f"are {list(taps)}, must be distinct blocks of {config.depth}")
    if config.hidden_size % config.num_heads or config.head_dim % 4:
        section.problem("hidden_size", f"is {config.hidden_size}, not heads ({config.num_heads}) times a multiple of 4")
    if config.position_grid**2 != config.num_position_embeddings:
        section.problem("num_position_embeddings", f"is {config.num_position_embeddings}, not a square")
    return config


def _read_text(section: Reader) -> TextConfig:
    section.refuse_unless("hidden_act", "silu", why="the MLP is gated by SiLU")
    section.refuse_unless("attention_bias", False, why="the released layers have no biases")
    section.refuse_unless("partial_rotary_factor", 1, 1.0, why="the whole head is rotated")
    section.refuse_unless("quantization_config", why="quantised checkpoints are not loaded")
    theta, mrope_section = read_mrope(section)
    config = TextConfig(
        hidden_size=section.integer("hidden_size"),
        intermediate_size=section.integer("intermediate_size"),
        num_hidden_layers=section.integer("num_hidden_layers", at_most=MAX_LAYERS),
        num_attention_heads=section.integer("num_attention_heads"),
        num_key_value_heads=section.integer("num_key_value_heads"),
        head_dim=section.integer("head_dim", at_least=2),
        cross_attention_layers=tuple(sorted(section.integers("cross_attention_layers"))),
        vocab_size=section.integer("vocab_size"),
        max_position_embeddings=section.integer("max_position_embeddings"),
        rms_norm_eps=section.number("rms_norm_eps"),
        rope_theta=theta,
        mrope_section=mrope_section,
    )
    section.string("hidden_act")
    cross = config.cross_attention_layers
    if not cross or len(set(cross)) != len(cross) or any(not 0 <= i < config.num_hidden_layers for i in cross):
        section.problem(
            "cross_attention_layers", f"are {list(cross)}, must be distinct layers of {config.num_hidden_layers}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        section.problem(
            "num_attention_heads",
            f"is {config.num_attention_heads}, not a multiple of num_key_value_heads ({config.num_key_value_heads})",
        )
    if 2 * sum(mrope_section) != config.head_dim:
        section.problem("head_dim", f"is {config.head_dim}, mrope_section {list(mrope_section)} covers half of another")
    return config
