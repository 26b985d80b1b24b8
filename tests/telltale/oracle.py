"""What a request must be answered, from the request and its tenant alone: no pool, no page, no store, no stream.

Sizes, words and template are the family's own; whatever moves, keeps, shares, schedules or resumes is not asked.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from chiasm.cache.form import Form
from chiasm.cache.tenant import owner
from chiasm.chat_template import Slot, Turn
from chiasm.media import video
from chiasm.media.patches import resize
from chiasm.media.sample import SamplingOptions, pick
from chiasm.media.types import Limits, Probed
from chiasm.models.family import MediumFacts, MediumPlan
from chiasm.models.registry import Model
from tests.telltale import telling
from tests.telltale.asking import Medium, Request, clips
from tests.telltale.model import CHECKPOINT

BROKEN = "MEDIA_DECODE_FAILED"
"""With what an image is refused whose file ends in the middle."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame on the timeline, as clients are told of it."""

    slot: int
    index: int
    offset: float | None
    grid: tuple[int, int, int]
    tokens: int
    at_index: int


@dataclass(frozen=True, slots=True)
class Used:
    """What became of one medium, as usage tells it."""

    kind: str
    frames_used: int
    grid: tuple[int, int, int]
    tokens: int
    resized_size: tuple[int, int]
    offsets: tuple[float, ...]
    units: int


@dataclass(frozen=True, slots=True)
class Truth:
    """What there is to be told.

    Attributes:
        refusal: the reason with which the request is refused, before anything of the rest is told.
        until: when the last frame is shown.
        text: without the stop string.
        certain: of the text, how many characters no stop string could cut any more behind each token.
        rows: of prompt and answer, as far as they are computed: equal ones may be shared between requests.
        units: digests of the pixels of each unit, by medium.
    """

    refusal: str | None = None
    frames: tuple[Frame, ...] = ()
    prompt_tokens: int = 0
    visual_tokens: int = 0
    until: float | None = None
    ids: tuple[int, ...] = ()
    text: str = ""
    certain: tuple[int, ...] = ()
    reason: str = ""
    stop: str | None = None
    media: tuple[Used, ...] = ()
    rows: tuple[bytes, ...] = ()
    units: tuple[tuple[bytes, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class _Looked:
    """A medium as it is encoded: the plan, resized pixels (3, height, width) of each unit, and their times."""

    plan: MediumPlan
    pixels: list[npt.NDArray[np.uint8]]
    offsets: tuple[float, ...]


class Oracle:
    """Knows one checkpoint's configuration and no weights."""

    def __init__(self) -> None:
        model = Model(CHECKPOINT)
        self._processor = model.processor
        self._prompt = model.prompt()
        self._shape = model.entry_shape
        self._fingerprint = model.checkpoint.fingerprint
        self._vocabulary = model.config.text.vocab_size
        (self._end,) = self._prompt.stop_ids
        self._banned = sorted(self._prompt.banned_ids)

    def truth(self, request: Request, root: bytes, *, sequence: int = 0) -> Truth:
        """The answer of a request to a tenant of that root; one of several, by number."""
        looked = self._looked(request.media)
        timeline = _Timeline(self, looked, owner(root))
        parts = tuple(part if isinstance(part, str) else Slot(part) for part in request.parts)
        for piece in self._prompt.turns([Turn("user", parts)]):
            if isinstance(piece, Slot):
                timeline.lay_medium(piece.index)
            else:
                timeline.lay(piece)
        rows, prompt = [*timeline.rows()], len(timeline.ids)
        ids, certain, text, reason, stop = self._answer(request, timeline, rows, sequence)
        last = timeline.frames[-1] if timeline.frames else None
        return Truth(
            refusal=BROKEN if any(medium.kind == "broken" for medium in request.media) else None,
            frames=tuple(timeline.frames),
            prompt_tokens=prompt,
            visual_tokens=timeline.visual,
            until=None if last is None else last.offset,
            ids=tuple(ids),
            text=text,
            certain=tuple(certain),
            reason=reason,
            stop=stop,
            media=tuple(_used(medium) for medium in looked),
            rows=tuple(rows),
            units=tuple(tuple(telling.name(pixels) for pixels in medium.pixels) for medium in looked),
        )

    def _answer(
        self, request: Request, timeline: _Timeline, rows: list[bytes], sequence: int
    ) -> tuple[list[int], list[int], str, str, str | None]:
        """Ids, `Truth.certain`, text, reason and stop string. The rows of the answer are laid behind those of the
        prompt."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        ids: list[int] = []
        certain: list[int] = []
        text = ""
        looks = timeline.looks(timeline.visual)
        while True:
            token = self._drawn(request, b"".join(rows), len(ids), sequence)
            ids.append(token)
            before = len(text)
            text += decoder.decode(self._prompt.token_bytes(token))
            found = _first_stop(text, before, request.stop)
            if found is not None:
                return ids, [*certain, found[0]], text[: found[0]], "stop", found[1]
            certain.append(len(text) - _may_be_cut(text, request.stop))
            if token == self._end or len(ids) == request.max_tokens:
                text += decoder.decode(b"", final=True)
                return ids, certain, text, "stop" if token == self._end else "length", None
            rows.append(telling.row(token, [timeline.counter] * 3, looks))
            timeline.counter += 1

    def _drawn(self, request: Request, rows: bytes, index: int, sequence: int) -> int:
        scores = telling.scores(rows, self._vocabulary, self._end, self._banned).astype(np.float64)
        scores[self._banned] = -np.inf
        if request.temperature:
            # To 32 bits, as the wire has it.
            scores /= float(np.float32(request.temperature))
            scores += _noise(request.seed, sequence, index, self._vocabulary)
        return int(scores.argmax())

    def _looked(self, media: Sequence[Medium]) -> list[_Looked]:
        probed = [_probed(medium) for medium in media]
        options = [SamplingOptions(every_frame=medium.kind == "frames") for medium in media]
        plans = self._processor.size([MediumFacts.of(*facts) for facts in zip(probed, options, strict=True)])
        return [_look(*one) for one in zip(media, probed, options, plans, strict=True)]

    # -- what a timeline asks --------------------------------------------------------------------------------------

    def pieces(self, looked: _Looked) -> list[list[int] | int]:
        return self._prompt.medium(looked.plan.kind, looked.offsets)

    def layout(self, grid: tuple[int, int]) -> tuple[Sequence[int], Sequence[Sequence[int]], int, int]:
        """Placeholders, their steps, how far the counter moves, vision tokens."""
        laid = self._processor.unit_layout(grid)
        return laid.placeholder_ids, laid.placeholder_steps.T.tolist(), laid.advance, laid.vision_tokens

    def keys_values(
        self, pixels: npt.NDArray[np.uint8], grid: tuple[int, int], start: int, tokens: int, tenant: bytes
    ) -> telling.Numbers:
        """A unit as it is attached at a position."""
        placed = telling.entry(pixels, self._fingerprint, tenant, self._shape.of(tokens, Form.CROSS_KV))
        placed[:, 0] += telling.shift(self._processor.key_steps(grid) + start, self._shape.dim)
        return placed


class _Timeline:
    """Rows one after another: ids, positions, and how many vision tokens each sees."""

    def __init__(self, oracle: Oracle, media: Sequence[_Looked], tenant: bytes) -> None:
        self._oracle = oracle
        self._media = media
        self._tenant = tenant
        self._units: list[telling.Numbers] = []
        self._looks: dict[int, bytes] = {0: telling.NOTHING}
        self._positions: list[tuple[int, int, int]] = []
        self._sees: list[int] = []
        self.ids: list[int] = []
        self.frames: list[Frame] = []
        self.counter = 0
        self.visual = 0

    def lay(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._add(token, (self.counter,) * 3)
            self.counter += 1

    def lay_medium(self, slot: int) -> None:
        medium = self._media[slot]
        for piece in self._oracle.pieces(medium):
            if isinstance(piece, int):
                self._lay_unit(slot, medium, piece)
            else:
                self.lay(piece)

    def _lay_unit(self, slot: int, medium: _Looked, unit: int) -> None:
        grid = medium.plan.grid
        placeholders, steps, advance, tokens = self._oracle.layout(grid)
        start, at = self.counter, len(self.ids)
        self._units.append(self._oracle.keys_values(medium.pixels[unit], grid, start, tokens, self._tenant))
        for number, (token, step) in enumerate(zip(placeholders, steps, strict=True), 1):
            if number == len(placeholders):  # it completes the unit, and sees it
                self.visual += tokens
            self._add(token, (start + step[0], start + step[1], start + step[2]))
        offset = medium.offsets[unit] if medium.plan.kind == "video" else None
        self.frames.append(Frame(slot, unit, offset, (1, *grid), tokens, at + len(placeholders) - 1))
        self.counter += advance

    def _add(self, token: int, positions: tuple[int, int, int]) -> None:
        self.ids.append(token)
        self._positions.append(positions)
        self._sees.append(self.visual)

    def looks(self, visual: int) -> bytes:
        """What a row sees that sees so many vision tokens."""
        if visual not in self._looks:
            self._looks[visual] = telling.seen(np.concatenate(self._units, axis=3)[:, :, :, :visual])
        return self._looks[visual]

    def rows(self) -> Iterator[bytes]:
        for token, positions, sees in zip(self.ids, self._positions, self._sees, strict=True):
            yield telling.row(token, positions, self.looks(sees))


def _first_stop(text: str, before: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is whole first, and the longest of those that end there."""
    for end in range(before + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), stop
    return None


def _may_be_cut(text: str, stops: Sequence[str]) -> int:
    """Characters at the end that may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def _noise(seed: int, sequence: int, index: int, vocabulary: int) -> npt.NDArray[np.float64]:
    """The Gumbel numbers of one place, as numpy's Philox makes them of key and counter."""
    bits = np.random.Philox(
        key=np.array([seed, sequence], dtype=np.uint64), counter=np.array([0, 0, index, 0], dtype=np.uint64)
    )
    uniform = np.random.Generator(bits).random(vocabulary).clip(min=2.0**-53)
    made: npt.NDArray[np.float64] = -np.log(-np.log(1 - uniform))
    return made


def _probed(medium: Medium) -> Probed:
    if medium.kind == "clip":
        return video.probe(clips()[medium.clip], "mov,mp4", Limits())
    first, count = medium.pictures[0], len(medium.pictures)
    if medium.kind == "image":
        return Probed("image", first.height, first.width, (0.0,), 0.0, "PNG")
    offsets = tuple(float(second) for second in range(count))
    return Probed("video", first.height, first.width, offsets, float(count if count > 1 else 0), "PNG")


def _look(medium: Medium, probed: Probed, options: SamplingOptions, plan: MediumPlan) -> _Looked:
    if medium.kind == "clip":
        indices = pick(probed.frame_offsets, options, plan.units)
        decoded = video.decode(clips()[medium.clip], "mov,mp4", indices, Limits(), video.Ending())
        frames = [rgb for _, _, rgb in decoded]
        offsets = tuple(probed.frame_offsets[index] for index in indices)
    else:
        frames = [picture.rgb for picture in medium.pictures]
        offsets = probed.frame_offsets
    return _Looked(plan, [_resized(frame.tobytes(), frame.shape, plan.height, plan.width) for frame in frames], offsets)


@lru_cache(maxsize=1 << 12)
def _resized(data: bytes, shape: tuple[int, ...], height: int, width: int) -> npt.NDArray[np.uint8]:
    """(3, height, width)."""
    frame = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(shape).copy())
    made: npt.NDArray[np.uint8] = resize(frame.permute(2, 0, 1).unsqueeze(0), height, width)[0].contiguous().numpy()
    return made


def _used(looked: _Looked) -> Used:
    plan, count = looked.plan, len(looked.pixels)
    return Used(
        kind=plan.kind,
        frames_used=count,
        grid=(count, *plan.grid),
        tokens=plan.tokens * count,
        resized_size=(plan.height, plan.width),
        offsets=looked.offsets if plan.kind == "video" else (),
        units=count,
    )
