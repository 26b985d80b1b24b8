"""One undivided float64 pass of a checkpoint over a whole timeline, and what had to be drawn from it.

It shares the model's arithmetic with the engine, and nothing of how the engine divides, schedules, stores or draws:
attention is dense, the timeline is laid from the messages of the caller, and the random numbers are numpy's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.attention.dense import DenseAttention
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.chat_template import Slot, Turn
from chiasm.media.sample import SamplingOptions
from chiasm.media.types import Rgb
from chiasm.models.family import DecoderHalf, EncoderHalf, Grid, MediumFacts, Overlay, Processor
from chiasm.models.registry import Model
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import Timeline, UnitName
from decoder_service.convert import opening_of

CLOSE = 1e-6
"""Of what is told as float32, and of scores between which a rounding may decide."""


def span_of(processor: Processor) -> int:
    """Frames of a unit of a video."""
    (plan,) = processor.size([MediumFacts("video", 64, 64, 8, 4.0, SamplingOptions(every_frame=True))])
    return plan.span


PATCH = 16
"""Pixels of a side of a patch, in every checkpoint that is judged."""


def grid_of(frame: Rgb) -> Grid:
    height, width, _ = frame.shape
    return height // PATCH, width // PATCH


@dataclass(frozen=True)
class Clip:
    """A medium as its caller hands it over.

    Attributes:
        offsets: seconds at which each frame is shown.
        span: frames of a unit; the last has what is left.
    """

    frames: Sequence[Rgb]
    offsets: Sequence[float]
    kind: pb.MediaKind.ValueType = pb.MEDIA_KIND_VIDEO
    span: int = 1

    @property
    def units(self) -> list[Sequence[Rgb]]:
        """The frames of each."""
        return [self.frames[at : at + self.span] for at in range(0, len(self.frames), self.span)]

    @property
    def times(self) -> list[float]:
        """Of each unit: the mean of its frames' times."""
        split = [self.offsets[at : at + self.span] for at in range(0, len(self.offsets), self.span)]
        return [sum(times) / len(times) for times in split]

    @property
    def grid(self) -> Grid:
        """Patches of each unit."""
        return grid_of(self.frames[0])


class Oracle(Model):
    """A checkpoint in float64, each half made once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.writer = super().prompt()
        self._encoder = super().encoder(dtype=torch.float64)
        self._decoder = super().decoder(dtype=torch.float64)
        self._entries: dict[bytes, Tensor] = {}

    def encoder(self, **_: Any) -> EncoderHalf:
        return self._encoder

    def decoder(self, **_: Any) -> DecoderHalf:
        return self._decoder

    @property
    def overlaid(self) -> bool:
        """Whether units lie over their placeholders."""
        return self._decoder.entry_shape.overlaid

    def entry(self, frames: Sequence[Rgb]) -> Tensor:
        """Of a unit: (layers, K|V, heads, tokens, dim), keys not rotated; or the (tokens, hidden) that lie over it."""
        data = b"".join(frame.tobytes() for frame in frames) + bytes(grid_of(frames[0]))
        if data not in self._entries:
            pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
            (self._entries[data],) = self._encoder.encode([pixels], TorchVarlen())
        return self._entries[data]

    @torch.inference_mode()
    def logits(self, timeline: Timeline, clips: Mapping[int, Clip]) -> Tensor:
        """(rows, vocabulary): those behind every row."""
        return self._decoder.logits(self.states(timeline, clips))

    @torch.inference_mode()
    def states(self, timeline: Timeline, clips: Mapping[int, Clip]) -> Tensor:
        """(rows, width): what they are made of."""
        return self._decoder.normed(self.states_after((self._decoder.layers_total,), timeline, clips)[0])

    @torch.inference_mode()
    def states_after(self, layers: Sequence[int], timeline: Timeline, clips: Mapping[int, Clip]) -> list[Tensor]:
        """(rows, width) after each of some layers."""
        half, rows = self._decoder, len(timeline)
        boundaries = torch.from_numpy(timeline.boundaries())
        sees, cross, overlay = None, [], None
        entries = [self.entry(clips[unit.name.slot].units[unit.name.unit]) for unit in timeline.units]
        if entries and self.overlaid:
            over = [row for unit in timeline.units for row in range(unit.index, unit.end_index)]
            overlay = Overlay(torch.tensor(over), torch.cat(entries))
        elif entries:
            placed = []
            for unit, entry in zip(timeline.units, entries, strict=True):
                steps = torch.from_numpy(self.processor.key_steps(clips[unit.name.slot].grid) + unit.start)
                placed.append(half.place(entry, steps))
            keys_values = torch.cat(placed, dim=3).unsqueeze(2)  # (layers, K|V, 1, heads, tokens, dim)
            cross = [(layer[0], layer[1]) for layer in keys_values]
            sees = boundaries[:, 1] > boundaries[:, 0]
        attention = DenseAttention(1, cross, boundaries.unsqueeze(0))
        ids, positions = torch.tensor(timeline.ids()), torch.from_numpy(timeline.positions())
        return half.states_after(layers, ids, positions, sees, torch.arange(rows), attention, overlay)


@dataclass
class Replay:
    """A timeline laid again: by what its caller said, and by what it was told in which order.

    Attributes:
        drawn: rows of the tokens that were drawn.
    """

    oracle: Oracle
    opened: dpb.DecodeOpen
    clips: Mapping[int, Clip]
    timeline: Timeline = field(default_factory=Timeline)
    drawn: list[int] = field(default_factory=list)

    def lay_prompt(self) -> None:
        turns = [Turn("user", tuple(self.parts(turn))) for turn in self.opened.prompt.conversation.turns]
        for piece in self.oracle.writer.turns(turns):
            if isinstance(piece, Slot):
                self.lay_slot(piece.index)
            else:
                self.timeline.append_text(piece)

    def parts(self, turn: pb.Turn) -> Iterator[str | Slot]:
        for part in turn.parts:
            if part.HasField("text"):
                yield part.text
            else:
                if opening := opening_of(self.clips[part.slot].kind, self.oracle.writer):
                    yield opening
                yield Slot(part.slot)

    def lay_slot(self, slot: int) -> None:
        clip, writer = self.clips[slot], self.oracle.writer
        if clip.kind == pb.MEDIA_KIND_FRAME:
            before, after = writer.frame(clip.offsets[0])
            pieces: list[list[int] | int] = [before, 0, after]
        else:
            pieces = writer.medium("image" if clip.kind == pb.MEDIA_KIND_IMAGE else "video", clip.times)
        layout = self.oracle.processor.unit_layout(clip.grid)
        for piece in pieces:
            if isinstance(piece, int):
                self.timeline.append_unit(UnitName(slot, piece), layout)
            else:
                self.timeline.append_text(piece)

    def lay_event(self, event: dpb.DecodeAppend | dpb.DecodeDrop) -> None:
        if isinstance(event, dpb.DecodeDrop):
            self.timeline.drop_units(event.first_visible - self.timeline.dropped)
        elif event.HasField("turn"):
            self.timeline.append_text(self.oracle.writer.spliced(event.turn.parts[0].text))
        else:
            self.lay_slot(event.slot)

    def draw(self, token: int) -> None:
        self.drawn.append(len(self.timeline))
        self.timeline.append_token(token)

    def check(self, told: Sequence[pb.TokenLogprobs | None], *, number: int) -> None:
        """Every token is the one that an undivided pass draws there, and what was told of it is what that pass says."""
        if not self.drawn:
            return
        sampling = self.opened.sampling
        logits_rv = self.oracle.logits(self.timeline, self.clips).numpy()
        ids = self.timeline.ids()
        said: Counter[int] = Counter()
        for index, (row, logprobs) in enumerate(zip(self.drawn, told, strict=True)):
            scores_v = logits_rv[row - 1].copy()
            scores_v[list(self.oracle.writer.banned_ids)] = -np.inf
            for token, times in said.items():
                scores_v[token] -= times * sampling.frequency_penalty
            scores_v /= sampling.temperature or 1.0
            where = f"token {index} of sequence {number}, row {row}"
            if logprobs is not None:
                _check_logprobs(scores_v, ids[row], logprobs, where)
            if sampling.temperature:
                scores_v += gumbel(self.opened.seed, number, index, len(scores_v))
            assert scores_v[ids[row]] >= scores_v.max() - CLOSE, (where, ids[row], int(scores_v.argmax()))
            said[ids[row]] += 1


def gumbel(seed: int, sequence: int, before: int, vocabulary: int) -> npt.NDArray[np.float64]:
    """The noise of one place, as numpy's Philox makes it of key and counter."""
    bits = np.random.Philox(
        key=np.array([seed, sequence], dtype=np.uint64), counter=np.array([0, 0, before, 0], dtype=np.uint64)
    )
    made: npt.NDArray[np.float64] = -np.log(-np.log(1 - np.random.Generator(bits).random(vocabulary)))
    return made


def _check_logprobs(scores_v: npt.NDArray[np.float64], token: int, told: pb.TokenLogprobs, where: str) -> None:
    largest = scores_v.max()
    expected_v = scores_v - (largest + np.log(np.exp(scores_v - largest).sum()))
    assert told.drawn.token_id == token, where
    for one in (told.drawn, *told.top):
        assert abs(one.logprob - expected_v[one.token_id]) < CLOSE * max(1.0, abs(one.logprob)), (where, one)
