"""What a model family declares, so that services need to know no family by name. No torch at import.

A family is a folder of `chiasm.models` whose package has one attribute `FAMILY`. See `docs/models.md` for how to add
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from chiasm.cache.form import Form
from chiasm.chat_template import Piece, Turn
from chiasm.errors import InvalidRequest
from chiasm.media.sample import SamplingOptions, eligible, seconds_covered
from chiasm.media.types import Kind, Probed
from chiasm.timeline import UnitLayout
from chiasm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chiasm.attention.backend import Attention, VarlenAttention
    from chiasm.models.weights import WeightTable

C = TypeVar("C")

Grid = tuple[int, int]
"""Patches of one unit: (rows, columns)."""


@dataclass(frozen=True, slots=True)
class MediumFacts:
    """What sharing the budgets of a request needs to know of each of its media.

    Attributes:
        height, width: pixels as shown.
        frames: frames to choose from; 1 for an image.
        seconds: of video to sample from; 0 for an image.
    """

    kind: Kind
    height: int
    width: int
    frames: int
    seconds: float
    options: SamplingOptions

    @classmethod
    def of(cls, probed: Probed, options: SamplingOptions) -> MediumFacts:
        """Raises InvalidRequest for options that contradict each other or leave no frame."""
        if probed.kind == "image":
            if options != SamplingOptions():
                raise InvalidRequest("UNKNOWN_FIELD", "an image has no frames to sample")
            return cls("image", probed.height, probed.width, 1, 0.0, options)
        options.check()
        frames = len(eligible(probed.frame_offsets, options)) if probed.frame_offsets else 0
        if not frames:
            raise InvalidRequest("NO_FRAMES", "the video has no frames")
        seconds = seconds_covered(probed.frame_offsets, probed.duration, options)
        return cls("video", probed.height, probed.width, frames, seconds, options)


@dataclass(frozen=True, slots=True)
class MediumPlan:
    """What becomes of one medium once the budgets of its request are shared.

    Attributes:
        frames: how many frames are used.
        height, width: pixels after resizing.
        grid: patches of each unit.
        tokens: vision tokens of each unit as the decoder counts them.
        upscaled: the frames are enlarged.
        span: frames of a unit. The last unit has what is left.
    """

    kind: Kind
    frames: int
    height: int
    width: int
    grid: Grid
    tokens: int
    upscaled: bool
    span: int = 1

    @property
    def units(self) -> int:
        """How many units it becomes."""
        return self.units_of(self.frames)

    def units_of(self, frames: int) -> int:
        """How many units so many of its frames become."""
        return -(-frames // self.span)


@dataclass(frozen=True, slots=True)
class EntryShape:
    """What entries of this model look like, in every form.

    Attributes:
        layers: that attend to visual tokens. 0 where an entry's states are laid over the placeholders of its unit.
        heads: of keys and values, in each of those layers.
        dim: width of a head.
        hidden: width of a visual state, as it is laid over a placeholder or before it is projected to keys and values.
    """

    layers: int
    heads: int
    dim: int
    hidden: int

    @property
    def overlaid(self) -> bool:
        """Whether states are laid over placeholders, and no layer attends to visual tokens apart."""
        return not self.layers

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms that there are of such entries, the plainest first."""
        return (Form.STATES,) if self.overlaid else tuple(Form)

    def of(self, tokens: int, form: Form = Form.CROSS_KV) -> tuple[int, ...]:
        """The shape of an entry of so many vision tokens."""
        return (tokens, self.hidden) if form is Form.STATES else (self.layers, 2, self.heads, tokens, self.dim)

    def bytes_of(self, tokens: int, form: Form, dtype: torch.dtype) -> int:
        """Bytes of an entry's payload, computed in a type; scales included."""
        return form.payload_bytes(self.of(tokens, form), dtype.itemsize)

    def bytes_per_token(self, form: Form, dtype: torch.dtype) -> int:
        """What a vision token adds to that."""
        return self.bytes_of(2, form, dtype) - self.bytes_of(1, form, dtype)


class Processor(Protocol):
    """The family's rules about pixels and prompts, for one checkpoint. Needs no device and no torch."""

    def describe(self) -> bytes:
        """Everything about preprocessing that changes an entry, as bytes for the fingerprint."""
        ...

    def size(self, media: Sequence[MediumFacts]) -> list[MediumPlan]:
        """Shares the pixel and frame budgets of a request among its media, all of them at once.

        Raises InvalidRequest for a medium the family cannot take, with item `media[i]`.
        """
        ...

    def pick(self, offsets: Sequence[float], options: SamplingOptions, count: int) -> list[int]:
        """Which `count` frames of a video are used, ascending. `offsets` are the times of all its frames."""
        ...

    def unit_layout(self, grid: Grid) -> UnitLayout:
        """How one unit of that grid sits on a timeline."""
        ...

    def key_steps(self, grid: Grid) -> npt.NDArray[np.int64]:
        """(3, vision tokens) positions of a unit's keys, minus the counter at which the unit is laid."""
        ...


class WrittenMedium(NamedTuple):
    """A medium as a caller's own tokenizer wrote it.

    Attributes:
        pieces: as `Prompt.medium` gives them.
        pads: how many placeholders were written for each unit. How many there must be is known once it is sized.
    """

    pieces: list[list[int] | int]
    pads: list[int]


class Prompt(Protocol):
    """The family's template and media framing over one tokenizer."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    @property
    def silence_id(self) -> int | None:
        """The id with which a model says nothing and waits; None for a family without one."""
        ...

    def text(self, text: str) -> list[int]:
        """Ordinary token ids of `text`, whatever it spells."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes an id stands for; none for control tokens."""
        ...

    @property
    def banned_ids(self) -> frozenset[int]:
        """Ids that sampling must never produce: visibility counts them as units."""
        ...

    def turns(self, turns: Sequence[Turn]) -> list[Piece]:
        """The rendered template: runs of token ids, and slots where media go."""
        ...

    def opening(self, kind: Kind) -> str:
        """Text with which every medium of that kind begins, and which is tokenised as one with the text before it."""
        ...

    def medium(self, kind: Kind, offsets: Sequence[float]) -> list[list[int] | int]:
        """What stands for a medium with units at those seconds, behind its opening: token ids, and numbers of units
        where they are laid.

        Args:
            offsets: of each unit: where it is of several frames the mean of their times.
        """
        ...

    def written(self, ids: Sequence[int]) -> list[list[int] | WrittenMedium]:
        """Token ids that a caller's own tokenizer made, cut at the media among them.

        Raises InvalidRequest PLACEHOLDER_MISMATCH for pads that no medium of this family is written with.
        """
        ...

    def frame(self, offset: float) -> tuple[list[int], list[int]]:
        """Token ids before and after one unit of a growing timeline, `offset` seconds from its start."""
        ...

    def spliced(self, text: str) -> list[int]:
        """Token ids of a user turn put into a running answer."""
        ...


class Trunk(Protocol):
    """The greatest part of an encoder half: patches to merged tokens, blocks and mergers."""

    def __call__(self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention) -> Tensor:
        """(patches, values) of `grids`, one after another, to (merged tokens, width)."""
        ...


class EncoderHalf(Protocol):
    """The part of a model that sees pixels. Holds no language model."""

    device: torch.device
    dtype: torch.dtype
    entry_shape: EntryShape
    head_dim: int
    """Of the blocks' attention."""

    def encode(self, units: Sequence[Tensor], attention: VarlenAttention, trunk: Trunk | None = None) -> list[Tensor]:
        """Units of resized uint8 RGB frames, each (frames, 3, height, width), to keys and values:
        (layers, 2, heads, tokens, dim) each. Only where layers attend to visual tokens.

        Args:
            trunk: what gives the same as the half's own.
        """
        ...

    def encode_states(
        self, units: Sequence[Tensor], attention: VarlenAttention, trunk: Trunk | None = None
    ) -> list[Tensor]:
        """The same units to states, each (tokens, hidden): laid over placeholders as they are, or made into keys and
        values."""
        ...

    def largest_tensor(self, patches: int, units: int) -> int:
        """Elements of the largest tensor that `encode` makes of so many patches of so many units. More of either never
        make it smaller."""
        ...


class Overlay(NamedTuple):
    """What lies over the placeholders of a step.

    Attributes:
        rows_v: (V,) rows of the step, ascending.
        features_vw: (V, hidden) states of their units, `EntryShape.hidden` wide.
    """

    rows_v: Tensor
    features_vw: Tensor


class DecoderHalf(Protocol):
    """The part of a model that sees text and entries. Holds no vision transformer."""

    device: torch.device
    dtype: torch.dtype
    entry_shape: EntryShape
    layers_total: int
    self_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Of a state."""
    vocab_size: int
    max_positions: int

    @property
    def projects(self) -> bool:
        """Whether it makes keys and values of states: it then holds what the encoder half does that with too."""
        ...

    @property
    def headed(self) -> bool:
        """Whether it has the last norm and the head. One that is cut after a layer has not: it is asked for
        `states_after` and nothing else."""
        ...

    def project(self, states: Tensor) -> Tensor:
        """(tokens, hidden) states of a unit to (layers, 2, heads, tokens, dim), keys normed and not rotated. Only where
        it `projects`."""
        ...

    def place(self, entry: Tensor, positions_3t: Tensor) -> Tensor:
        """(layers, 2, heads, tokens, dim) entry with its keys rotated to where the unit is laid. States that are laid
        over placeholders are placed nowhere else."""
        ...

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
        """(len(rows_at), width) of the residual stream after each of some layers, before any norm, for the rows
        `rows_at` of a step the attention was planned for. What is added behind a layer is in it. Layers behind the last
        of these are not computed.

        Args:
            layers: from 1, ascending.
            sees_n: (rows,) which rows see any vision token in layers that attend to them; None when none does.
            overlay: of a half whose entries are overlaid; None when no row is a placeholder.
        """
        ...

    def normed(self, states_me: Tensor) -> Tensor:
        """(M, width) after the last layer to (M, width) behind the last norm: what an embedding is made of, and what
        `logits` takes."""
        ...

    def logits(self, states_me: Tensor) -> Tensor:
        """(M, width) of `normed` to (M, vocabulary)."""
        ...

    def forward(
        self,
        ids_n: Tensor,
        positions_3n: Tensor,
        sees_n: Tensor | None,
        logits_at: Tensor,
        attention: Attention,
        overlay: Overlay | None = None,
    ) -> Tensor:
        """`logits` of the `normed` states after the last layer: (len(logits_at), vocabulary)."""
        ...


class Family(Protocol[C]):
    """One family: how to read its checkpoints and make its halves. C is its own configuration class."""

    @property
    def name(self) -> str: ...

    @property
    def architectures(self) -> Sequence[str]:
        """What `architectures` in a config.json may say for this family to take the checkpoint."""
        ...

    @property
    def refused(self) -> Mapping[str, str]:
        """Architectures near to these that nobody takes, and why."""
        ...

    def read_config(self, data: dict[str, object], where: str) -> C:
        """Raises CheckpointError listing all that is missing, impossible or refused."""
        ...

    def processor(self, config: C, files: Mapping[str, dict[str, object]], where: str) -> Processor: ...

    def prompt(self, config: C, tokenizer: Tokenizer, template: str | None) -> Prompt: ...

    def entry_shape(self, config: C) -> EntryShape:
        """That of both halves."""
        ...

    def weights(self, config: C) -> WeightTable:
        """Every tensor of a checkpoint of that configuration, and which half owns it."""
        ...

    def encoder(self, config: C, *, device: torch.device, dtype: torch.dtype) -> EncoderHalf:
        """The encoder half, a `torch.nn.Module`, allocated and not filled."""
        ...

    def decoder(self, config: C, *, device: torch.device, dtype: torch.dtype, projects: bool = False) -> DecoderHalf:
        """The decoder half, a `torch.nn.Module`, allocated and not filled; `projects` as it shall have it."""
        ...


@runtime_checkable
class CutFamily(Family[C], Protocol[C]):
    """One whose checkpoints are another family's, and whose decoder half is cut after a layer. No architecture names
    it: whoever opens a checkpoint does. The encoder half and the entries are those of the whole."""

    @property
    def cuts(self) -> str:
        """The name of the family whose checkpoints it opens."""
        ...

    def read_cut(self, data: dict[str, object], where: str, layers: int) -> C:
        """As `read_config`, for a decoder of so many layers. Raises CheckpointError, with both numbers, for more than
        there are."""
        ...
