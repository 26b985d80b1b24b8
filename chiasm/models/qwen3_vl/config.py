"""What a Qwen3-VL checkpoint's `config.json` says, read strictly. No torch.

Every key that the mathematics needs must be there; every option this family does not do is refused by name. Source of
the rules: the released configurations, and what `transformers` reads of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from chiasm.models.family import EntryShape
from chiasm.models.reading import Reader, shown
from chiasm.models.rotary import read_mrope

ARCHITECTURE = "Qwen3VLForConditionalGeneration"

_EXPERTS = "its MLPs are mixtures of experts, and only dense ones are done"
_OMNI = "it hears and speaks, and only pictures, videos and text are done"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "Qwen3VLMoeForConditionalGeneration": _EXPERTS,
        "Qwen3OmniMoeForConditionalGeneration": _OMNI,
        "Qwen3OmniMoeThinkerForConditionalGeneration": _OMNI,
    }
)
"""Relatives that this family does not take, and why."""

MAX_LAYERS = 4096
"""Lists as long as the layers are made before a weight is looked at."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The ViT and its mergers. Sizes in channels, patches and pixels as their names say."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    """Blocks whose outputs are taps, in the order in which the checkpoint numbers their mergers: that of the n-th block
    named here is merger n, wherever the block stands."""

    rope_theta: float = 10_000.0

    align_corners: bool = True
    """How the learned positions are interpolated: true as `transformers` does, false as other servers do by default."""

    layer_norm_eps: float = 1e-6
    """Not in the configuration: fixed in every implementation of this ViT."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def position_grid(self) -> int:
        """Side of the square table of learned positions."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_values(self) -> int:
        """Values of one patch: channels * time * patch_size**2."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def factor(self) -> int:
        """Pixels of a merged token's side: what both sides of a resized frame are multiples of."""
        return self.patch_size * self.spatial_merge_size

    @property
    def taps(self) -> tuple[tuple[int, int], ...]:
        """(block, its merger) by ascending block, the order in which features go to the decoder's layers."""
        return tuple(sorted((block, merger) for merger, block in enumerate(self.deepstack_visual_indexes)))


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The decoder: Qwen3's dense layers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Config:
    """A whole Qwen3-VL configuration. Token ids are those of the checkpoint's own vocabulary."""

    vision: VisionConfig
    text: TextConfig
    tie_word_embeddings: bool
    """The head is the table of embeddings."""

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    nested_videos: bool = False
    """A vision start and end stand around a whole video too, not only around each of its temporal patches."""

    @property
    def taps(self) -> int:
        """How many of the decoder's first layers are followed by features of their own."""
        return len(self.vision.deepstack_visual_indexes)

    @property
    def entry_shape(self) -> EntryShape:
        """The main merger's features and each tap's, side by side; no layer attends to them apart from the text."""
        t = self.text
        return EntryShape(0, t.num_key_value_heads, t.head_dim, t.hidden_size * (1 + self.taps))


def read_config(data: dict[str, object], where: str) -> Config:
    """Reads the object of a `config.json`.

    Raises CheckpointError that lists every missing key, every impossible value and every refused option.
    """
    top = Reader(data)
    top.refuse_unless("quantization_config", why="quantised checkpoints are not loaded")
    vision = _read_vision(top.section("vision_config"))
    section = top.section("text_config")
    text = _read_text(section)
    tied = [_flag(reader, "tie_word_embeddings") for reader in (top, section) if "tie_word_embeddings" in reader]
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
    taps, layers = len(vision.deepstack_visual_indexes), text.num_hidden_layers
    if taps > layers:
        top.problem("vision_config.deepstack_visual_indexes", f"name {taps} blocks, the text has {layers} layers")
    nested = _flag(top, "nested_videos")
    top.finish(where)
    # The outer one rules where both say something, as in transformers; transformers 4 wrote both.
    return Config(vision=vision, text=text, tie_word_embeddings=next(iter(tied), False), nested_videos=nested, **tokens)


def _flag(section: Reader, key: str) -> bool:
    """Whether it is set; false where it is absent."""
    value = section.raw(key)
    if not isinstance(value, bool | None):
        section.problem(key, f"is {shown(value)}, must be true or false")
    return value is True


def _read_vision(section: Reader) -> VisionConfig:
    section.refuse_unless("hidden_act", "gelu_pytorch_tanh", why="the blocks use the tanh GELU")
    section.refuse_unless("temporal_patch_size", 2, why="a unit is two frames")
    section.refuse_unless("in_channels", 3, why="frames are RGB")
    config = VisionConfig(
        depth=section.integer("depth", at_most=MAX_LAYERS),
        hidden_size=section.integer("hidden_size"),
        intermediate_size=section.integer("intermediate_size"),
        num_heads=section.integer("num_heads"),
        in_channels=section.integer("in_channels"),
        patch_size=section.integer("patch_size"),
        temporal_patch_size=section.integer("temporal_patch_size"),
        spatial_merge_size=section.integer("spatial_merge_size"),
        out_hidden_size=section.integer("out_hidden_size"),
        num_position_embeddings=section.integer("num_position_embeddings"),
        deepstack_visual_indexes=section.integers("deepstack_visual_indexes"),
        rope_theta=_read_axial(section),
        align_corners="align_corners" not in section or _flag(section, "align_corners"),
    )
    section.string("hidden_act")
    taps = config.deepstack_visual_indexes
    if any(not 0 <= tap < config.depth for tap in taps):
        section.problem("deepstack_visual_indexes", f"are {list(taps)}, must be blocks of {config.depth}")
    if len(set(taps)) != len(taps):
        section.problem(
            "deepstack_visual_indexes",
            f"are {list(taps)}: {len(taps)} mergers for {len(set(taps))} blocks, so that some would never be used",
        )
    if config.hidden_size % config.num_heads or config.head_dim % 4:
        section.problem("hidden_size", f"is {config.hidden_size}, not heads ({config.num_heads}) times a multiple of 4")
    if config.position_grid**2 != config.num_position_embeddings:
        section.problem("num_position_embeddings", f"is {config.num_position_embeddings}, not a square")
    return config


def _read_axial(section: Reader) -> float:
    """The base of the ViT's rotary angles, which only transformers 5 writes down; it has never been another."""
    if "rope_parameters" not in section:
        return 10_000.0
    rope = section.section("rope_parameters")
    rope.refuse_unless("rope_type", "axial", "default", why="patches are turned by row and column")
    return rope.number("rope_theta") if "rope_theta" in rope else 10_000.0


def _read_text(section: Reader) -> TextConfig:
    section.refuse_unless("hidden_act", "silu", why="the MLP is gated by SiLU")
    section.refuse_unless("attention_bias", False, why="the released layers have no biases")
    section.refuse_unless("partial_rotary_factor", 1, 1.0, why="the whole head is rotated")
    section.refuse_unless("quantization_config", why="quantised checkpoints are not loaded")
    section.refuse_unless("num_experts", why=_EXPERTS)
    theta, mrope_section = read_mrope(section)
    config = TextConfig(
        hidden_size=section.integer("hidden_size"),
        intermediate_size=section.integer("intermediate_size"),
        num_hidden_layers=section.integer("num_hidden_layers", at_most=MAX_LAYERS),
        num_attention_heads=section.integer("num_attention_heads"),
        num_key_value_heads=section.integer("num_key_value_heads"),
        head_dim=section.integer("head_dim", at_least=2),
        vocab_size=section.integer("vocab_size"),
        max_position_embeddings=section.integer("max_position_embeddings"),
        rms_norm_eps=section.number("rms_norm_eps"),
        rope_theta=theta,
        mrope_section=mrope_section,
    )
    section.string("hidden_act")
    if config.num_attention_heads % config.num_key_value_heads:
        section.problem(
            "num_attention_heads",
            f"is {config.num_attention_heads}, not a multiple of num_key_value_heads ({config.num_key_value_heads})",
        )
    if 2 * sum(mrope_section) != config.head_dim:
        section.problem("head_dim", f"is {config.head_dim}, mrope_section {list(mrope_section)} covers half of another")
    return config
