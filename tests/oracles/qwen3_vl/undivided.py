"""The whole model in one: transformers' own, on what the divided system has laid.

It takes from the system the token ids that it lays, which are compared with recorded ones elsewhere, and the resized
pixels, likewise. Patches are cut here anew, positions and all that follows are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chiasm.chat_template import Piece, Slot, Turn
from chiasm.media.patches import resize
from chiasm.media.sample import SamplingOptions
from chiasm.media.types import Kind, Rgb
from chiasm.models.family import MediumFacts
from chiasm.models.registry import Model
from chiasm.timeline import unit_name
from decoder_service.laid import SizedSlot
from decoder_service.sequence import DecodeSequence

PATCH, MERGE = 16, 2


@dataclass(frozen=True)
class Medium:
    """An image, or the frames of a video in which each is shown for a second over `fps`."""

    kind: Kind
    frames: Sequence[Rgb]
    fps: float = 2.0

    @property
    def times(self) -> list[float]:
        return [i / self.fps for i in range(len(self.frames))]


@dataclass(frozen=True)
class Laid:
    """A prompt as the system lays it, and the units of its media.

    Attributes:
        sequence: the timeline.
        ids: its token ids.
        kinds: of each medium.
        units: of each medium, uint8 (frames, 3, height, width) each, resized.
    """

    sequence: DecodeSequence
    ids: list[int]
    kinds: list[Kind]
    units: list[list[Tensor]]


def lay(model: Model, turns: Sequence[tuple[str, Sequence[str | Medium]]], sequence: DecodeSequence) -> Laid:
    """Lays a conversation on an empty sequence of the model."""
    prompt = model.prompt()
    media: list[Medium] = []
    spoken = []
    for role, parts in turns:
        put: list[str | Slot] = []
        for part in parts:
            if isinstance(part, str):
                put.append(part)
            else:
                put += [*filter(None, [prompt.opening(part.kind)]), Slot(len(media))]
                media.append(part)
        spoken.append(Turn(role, tuple(put)))
    return lay_pieces(model, prompt.turns(spoken), media, sequence)


def lay_pieces(model: Model, pieces: Sequence[Piece], media: Sequence[Medium], sequence: DecodeSequence) -> Laid:
    """Lays pieces in which slots stand for media on an empty sequence of the model."""
    prompt = model.prompt()
    sequence.extend(pieces)
    facts = [_facts(medium) for medium in media]
    units = []
    for slot, (medium, plan) in enumerate(zip(media, model.processor.size(facts), strict=True)):
        assert plan.frames == len(medium.frames), "every frame of a list is used"
        resized = [
            resize(torch.from_numpy(frame).permute(2, 0, 1).unsqueeze(0), plan.height, plan.width)
            for frame in medium.frames
        ]
        units.append([torch.cat(resized[at : at + plan.span]) for at in range(0, len(resized), plan.span)])
        sized = SizedSlot((), [plan.grid] * plan.units, medium.times, True, plan.span)
        times = [sized.time_of(unit) for unit in range(plan.units)]
        shown = prompt.medium(medium.kind, times)
        sequence.size(slot, SizedSlot(shown, sized.grids, sized.offsets, True, plan.span))
    return Laid(sequence, sequence.timeline.ids(), [medium.kind for medium in media], units)


def _facts(medium: Medium) -> MediumFacts:
    height, width, _ = medium.frames[0].shape
    if medium.kind == "image":
        return MediumFacts("image", height, width, 1, 0.0, SamplingOptions())
    seconds = len(medium.frames) / medium.fps
    return MediumFacts("video", height, width, len(medium.frames), seconds, SamplingOptions(every_frame=True))


class Undivided:
    """transformers' model of a checkpoint folder."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, *, attention: str = "eager") -> None:
        from transformers import Qwen3VLForConditionalGeneration

        opened: Any = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention
        )
        self.model: Any = opened.eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        config = self.model.config
        self.pads: dict[str, int] = {"image": config.image_token_id, "video": config.video_token_id}

    def inputs(self, laid: Laid) -> dict[str, Tensor]:
        """What its `forward` takes."""
        ids = np.array(laid.ids)
        types = np.zeros(len(ids), dtype=np.int64)
        tensors: dict[str, Tensor] = {}
        patches: dict[Kind, list[Tensor]] = {"image": [], "video": []}
        grids: dict[Kind, list[tuple[int, int, int]]] = {"image": [], "video": []}
        for slot, (kind, units) in enumerate(zip(laid.kinds, laid.units, strict=True)):
            for unit in range(len(units)):
                found = laid.sequence.timeline.find(unit_name(slot, unit))
                assert found is not None
                ids[found.index : found.end_index] = self.pads[kind]
                types[found.index : found.end_index] = 1 if kind == "image" else 2
                patches[kind].append(_patches(units[unit]))
            height, width = units[0].shape[2:]
            grids[kind].append((len(units), height // PATCH, width // PATCH))
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if patches[kind]:
                tensors[name] = torch.cat(patches[kind]).to(self.model.dtype)
                tensors[f"{kind}_grid_thw"] = torch.tensor(grids[kind])
        return tensors | {
            "input_ids": torch.from_numpy(ids).unsqueeze(0),
            "mm_token_type_ids": torch.from_numpy(types).unsqueeze(0),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        }

    @torch.inference_mode()
    def logits(self, laid: Laid) -> Tensor:
        """(rows, vocabulary)."""
        out: Tensor = self.model(**self.inputs(laid)).logits[0]
        return out

    @torch.inference_mode()
    def states(self, laid: Laid) -> Tensor:
        """(rows, width) behind the last norm."""
        out: Tensor = self.model.model(**self.inputs(laid)).last_hidden_state[0]
        return out

    @torch.inference_mode()
    def greedy(self, laid: Laid, tokens: int, banned: Sequence[int]) -> list[int]:
        """The ids that it goes on with, none of them banned."""
        given = self.inputs(laid)
        out = self.model.generate(**given, max_new_tokens=tokens, do_sample=False, suppress_tokens=list(banned))
        answer: list[int] = out[0, given["input_ids"].shape[1] :].tolist()
        return answer


def _patches(unit: Tensor) -> Tensor:
    """(patches, 1536): blocks of 2x2 patches row by row; in a row channel, time, y, x. A lone frame is shown twice."""
    frames = (unit.float() - 127.5) / 127.5
    if len(frames) == 1:
        frames = frames.expand(2, -1, -1, -1)
    _, channels, height, width = frames.shape
    side = PATCH * MERGE
    cut = frames.reshape(2, channels, height // side, MERGE, PATCH, width // side, MERGE, PATCH)
    return cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, channels * 2 * PATCH * PATCH)
