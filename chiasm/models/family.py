"""What a model family declares, so that services need to know no family by name. No torch at import.

A family is a folder of `chiasm.models` whose package has one attribute `FAMILY`. See `docs/models.md` for how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from chiasm.chat_template import Piece, Turn
from chiasm.media.sample import SamplingOptions
from chiasm.media.types import Probed
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
class SizedMedium:
    """What becomes of one medium once the budgets of its request are shared.

    Attributes:
        indices: frames of the file that are used, in presentation order; a unit each.
        offsets: seconds of each of them.
        height, width: pixels after resizing.
        grid: patches of each unit.
        tokens: vision tokens of each unit as the decoder counts them.
        flags: what was altered, for example `upscaled`.
    """

    kind: str
    indices: tuple[int, ...]
    offsets: tuple[float, ...]
    height: int
    width: int
    grid: Grid
    tokens: int
    flags: tuple[str, ...] = ()

    @property
    def units(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class EntryShape:
    """What an entry of this model must look like: (layers, K|V, heads, tokens, dim) without the tokens."""

    layers: int
    heads: int
    dim: int


class Processor(Protocol):
    """The family's rules about pixels and prompts, for one checkpoint. Needs no device and no torch."""

    def describe(self) -> bytes:
        """Everything about preprocessing that changes an entry, as bytes for the fingerprint."""
        ...

    def size(self, media: Sequence[tuple[Probed, SamplingOptions]]) -> list[SizedMedium]:
        """Shares the pixel and frame budgets of a request among its media, all of them at once.

        Raises InvalidRequest for a medium the family cannot take, with `item` None: the caller knows the path.
        """
        ...

    def unit_layout(self, grid: Grid) -> UnitLayout:
        """How one unit of that grid sits on a timeline."""
        ...

    def key_steps(self, grid: Grid) -> npt.NDArray[np.int64]:
        """(3, vision tokens) positions of a unit's keys, minus the counter at which the unit is laid."""
        ...


class Prompt(Protocol):
    """The family's template and media framing over one tokenizer."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def banned_ids(self) -> frozenset[int]:
        """Ids that sampling must never produce: visibility counts them as units."""
        ...

    def turns(self, turns: Sequence[Turn]) -> list[Piece]:
        """The rendered template: runs of token ids, and slots where media go."""
        ...

    def medium(self, medium: SizedMedium) -> list[list[int] | int]:
        """What stands for a medium: token ids, and the numbers of its units where they are laid."""
        ...

    def frame(self, offset: float) -> tuple[list[int], list[int]]:
        """Token ids before and after one unit of a growing timeline, `offset` seconds from its start."""
        ...

    def spliced(self, text: str) -> list[int]:
        """Token ids of a user turn put into a running answer."""
        ...


class EncoderHalf(Protocol):
    """The part of a model that sees pixels. Holds no language model."""

    device: torch.device
    dtype: torch.dtype

    def encode(self, frames: Sequence[Tensor], attention: VarlenAttention) -> list[Tensor]:
        """Resized uint8 RGB frames, each (3, height, width), to entries, each (layers, 2, heads, tokens, dim)."""
        ...


class DecoderHalf(Protocol):
    """The part of a model that sees text and entries. Holds no vision transformer."""

    device: torch.device
    dtype: torch.dtype
    entry_shape: EntryShape
    self_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int

    def place(self, entry: Tensor, positions_3t: Tensor) -> Tensor:
        """(layers, 2, heads, tokens, dim) entry with its keys rotated to where the unit is laid."""
        ...

    def forward(
        self, ids_n: Tensor, positions_3n: Tensor, sees_n: Tensor | None, logits_at: Tensor, attention: Attention
    ) -> Tensor:
        """(len(logits_at), vocabulary) logits of the rows `logits_at` of a step the attention was planned for.

        `sees_n` (rows,) tells which rows see any vision token; None when none does.
        """
        ...


class Family(Protocol[C]):
    """One family: how to read its checkpoints and make its halves. C is its own configuration class."""

    @property
    def name(self) -> str: ...

    @property
    def architectures(self) -> Sequence[str]:
        """What `architectures` in a config.json may say for this family to take the checkpoint."""
        ...

    def read_config(self, data: dict[str, object], where: str) -> C:
        """Raises CheckpointError listing all that is missing, impossible or refused."""
        ...

    def processor(self, config: C, files: Mapping[str, dict[str, object]], where: str) -> Processor: ...

    def prompt(self, config: C, tokenizer: Tokenizer, template: str | None) -> Prompt: ...

    def weights(self, config: C) -> WeightTable:
        """Every tensor of a checkpoint of that configuration, and which half owns it."""
        ...

    def encoder(self, config: C, *, device: torch.device, dtype: torch.dtype) -> EncoderHalf:
        """The encoder half, a `torch.nn.Module`, allocated and not filled."""
        ...

    def decoder(self, config: C, *, device: torch.device, dtype: torch.dtype) -> DecoderHalf:
        """The decoder half, a `torch.nn.Module`, allocated and not filled."""
        ...
