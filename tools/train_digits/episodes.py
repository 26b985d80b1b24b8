"""What the model is asked and what it should say, laid on timelines as the decoder lays them, and padded to batches.

Three tasks: *read* the digits of a video or of images in order, answer by *time*, and follow a *stream* whose timeline
grows frame by frame. All ids, positions and boundaries come from the library's prompt, processor and timeline. Knows
numbers, not pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.chat_template import Piece, Slot, Turn
from chiasm.media.types import Kind
from chiasm.models.moss_vl.config import Config
from chiasm.models.moss_vl.layout import RESPONSE, SILENCE, MossVLPrompt
from chiasm.models.moss_vl.processing import Budgets, MossVLProcessor
from chiasm.timeline import Timeline, UnitName
from chiasm.tokenizer import Tokenizer
from tools.train_digits.data import EMPTY, SIDE

Task: TypeAlias = Literal["read", "time", "stream"]
Medium: TypeAlias = tuple[Kind, Sequence[float]]
"""A medium of a conversation: its kind, and the seconds of its frames."""

TASKS: tuple[Task, ...] = ("read", "time", "stream")

READ = "Read the digits."
STREAM = "Say each digit you see."
SYSTEM = ("Read the digits.", "You read digits in order.", "Answer the user.")
"""What a system turn may say, where there is one."""


def ask_time(offset: float) -> str:
    """The question for the digit at an offset in seconds, written as the frame's own time stamp is."""
    return f"Which digit is at {offset:.1f} seconds?"


def reading(digits: Sequence[int]) -> str:
    """The answer to `READ`."""
    return " ".join(map(str, digits))


@dataclass(slots=True)
class Episode:
    """A timeline with its answers.

    Attributes:
        shown: the digit of every frame in vision order, or EMPTY.
        taught: rows whose next token is an answer's.
    """

    timeline: Timeline
    shown: list[int]
    taught: list[int] = field(default_factory=list)


class Writer:
    """Lays episodes. One for a configuration and a tokenizer."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        patch = config.vision.patch_size
        self.grid = (SIDE // patch, SIDE // patch)
        self.tokenizer = tokenizer
        self.prompt = MossVLPrompt(config, tokenizer, None)
        processor = MossVLProcessor(config, Budgets())
        self.layout = processor.unit_layout(self.grid)
        self.key_steps = processor.key_steps(self.grid)
        self.stop_id = tokenizer.control["<|im_end|>"]
        self.silence_id = tokenizer.control[SILENCE]
        self.response_id = tokenizer.control[RESPONSE]
        self._opening = [tokenizer.control["<|im_start|>"], *tokenizer.encode("assistant\n")]

    # -- conversations ---------------------------------------------------------------------------------------------

    def asked(self, turns: Sequence[Turn], media: Sequence[Medium]) -> Timeline:
        """A conversation up to the opening of the answer."""
        timeline = Timeline()
        for piece in self.prompt.turns(turns):
            self._lay(timeline, piece, media)
        return timeline

    def _lay(self, timeline: Timeline, piece: Piece, media: Sequence[Medium]) -> None:
        if not isinstance(piece, Slot):
            timeline.append_text(piece)
            return
        for part in self.prompt.medium(*media[piece.index]):
            if isinstance(part, int):
                timeline.append_unit(UnitName(piece.index, part), self.layout)
            else:
                timeline.append_text(part)

    def answered(self, turns: Sequence[Turn], media: Sequence[Medium], last: str, shown: Sequence[int]) -> Episode:
        """A conversation with all its answers: those of its assistant turns, and `last`."""
        timeline = self.asked(turns, media)
        timeline.append_text([*self.tokenizer.encode(last), self.stop_id])
        ids, opening = timeline.ids(), self._opening
        taught: list[int] = []
        for start in range(len(ids) - len(opening)):
            if ids[start : start + len(opening)] == opening:
                first = start + len(opening)
                taught.extend(range(first - 1, ids.index(self.stop_id, first)))
        return Episode(timeline, list(shown), taught)

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream_opening(self) -> Timeline:
        """A stream's timeline before its first frame."""
        return self.asked([Turn("user", (STREAM,))], [])

    def append_frame(self, timeline: Timeline, offset: float) -> None:
        """Lays one frame of a stream."""
        before, after = self.prompt.frame(offset)
        timeline.append_text(before)
        timeline.append_unit(UnitName(0, len(timeline.units)), self.layout)
        timeline.append_text(after)

    def said(self, digit: int) -> list[int]:
        """What a stream should say to a frame."""
        if digit == EMPTY:
            return [self.silence_id]
        return [self.response_id, *self.tokenizer.encode(str(digit)), self.silence_id]

    def stream(self, shown: Sequence[int], offsets: Sequence[float], *, silent_first: bool) -> Episode:
        """A stream with its answers; `silent_first` where a token was sampled before there was any frame."""
        timeline = self.stream_opening()
        taught: list[int] = []
        answers = [[self.silence_id]] if silent_first else []

        def answer(ids: list[int]) -> None:
            taught.extend(range(len(timeline) - 1, len(timeline) - 1 + len(ids)))
            timeline.append_text(ids)

        for ids in answers:
            answer(ids)
        for digit, offset in zip(shown, offsets, strict=True):
            self.append_frame(timeline, offset)
            answer(self.said(digit))
        return Episode(timeline, list(shown), taught)


# -- random episodes ---------------------------------------------------------------------------------------------------


def draw_offsets(count: int, rng: np.random.Generator, *, regular: float = 0.7) -> list[float]:
    """Seconds of the frames of a clip, ascending, no two that are written alike.

    With the probability `regular` one second apart, as the processor samples a clip; mostly from 0.
    """
    step = 1.0 if rng.random() < regular else float(rng.choice([0.5, 1.1, 2.0, rng.integers(3, 26) / 10]))
    start = 0.0 if rng.random() < 0.9 else float(rng.integers(1, 300)) / 10
    return [round(start + i * step, 6) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Form:
    """What the episodes of a batch share, so that they are about equally long.

    Attributes:
        questions: asked about the same media, one after another; more of them teach more from the same frames.
        system: there is a system turn.
        images: the media are images.
    """

    questions: int = 1
    system: bool = False
    images: bool = False

    @classmethod
    def draw(
        cls, task: Task, frames: int, rng: np.random.Generator, *, questions: int = 4, images: float = 0.4
    ) -> Form:
        """A random form: at most `questions` by time about one clip; the share `images` of what is read are images."""
        most = questions if task == "time" else 1
        if task == "read" and rng.random() < 0.2:
            return cls(questions=2)
        pictures = task == "read" and rng.random() < images
        return cls(int(rng.integers(1, 1 + min(most, frames))), bool(rng.random() < 0.1), pictures)


def draw_episode(
    writer: Writer,
    task: Task,
    shown: Sequence[int],
    form: Form,
    rng: np.random.Generator,
    *,
    regular: float = 0.7,
    time_first: float = 0.3,
) -> Episode:
    """An episode of a task about frames that show `shown` (EMPTY only in a stream).

    With the probability `time_first` a question by time stands before its media; `regular` as in `draw_offsets`.
    """
    offsets = draw_offsets(len(shown), rng, regular=regular)
    if task == "stream":
        return writer.stream(shown, offsets, silent_first=bool(rng.random() < 0.5))
    media: list[Medium] = [("image", [0.0])] * len(shown) if form.images else [("video", offsets)]
    asked = [(ask_time(offsets[i]), str(shown[i])) for i in rng.permutation(len(shown))]
    if task == "read":
        asked.insert(0, (READ, reading(shown)))
    slots = [Slot(i) for i in range(len(media))]
    text_first = rng.random() < (time_first if task == "time" else 0.4)
    turns = [Turn("system", (str(rng.choice(SYSTEM)),))] if form.system else []
    for i, (question, _) in enumerate(asked[: form.questions]):
        if i:
            turns += [Turn("assistant", (asked[i - 1][1],)), Turn("user", (question,))]
        else:
            turns.append(Turn("user", (question, *slots) if text_first else (*slots, question)))
    return writer.answered(turns, media, asked[form.questions - 1][1], shown)


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Episodes of equally many frames, padded to equally many rows.

    Attributes:
        ids_bt, positions_3bt, boundaries_bt2: what the decoder is given; padding is zero.
        key_positions_3s: places of the keys of all episodes' frames, one episode after another.
        logits_at, targets: flat rows that are taught, and the tokens that follow them.
    """

    ids_bt: Tensor
    positions_3bt: Tensor
    boundaries_bt2: Tensor
    key_positions_3s: Tensor
    logits_at: Tensor
    targets: Tensor


def collate(episodes: Sequence[Episode], writer: Writer) -> Batch:
    """Raises ValueError if the episodes' numbers of frames differ."""
    if len({len(episode.timeline.units) for episode in episodes}) != 1:
        raise ValueError("the episodes of a batch must have equally many frames")
    rows = max(len(episode.timeline) for episode in episodes)
    ids = np.zeros((len(episodes), rows), dtype=np.int64)
    positions = np.zeros((3, len(episodes), rows), dtype=np.int64)
    boundaries = np.zeros((len(episodes), rows, 2), dtype=np.int64)
    at: list[int] = []
    targets: list[int] = []
    for i, episode in enumerate(episodes):
        timeline = episode.timeline
        count = len(timeline)
        laid = timeline.ids()
        ids[i, :count] = laid
        positions[:, i, :count] = timeline.positions()
        boundaries[i, :count] = timeline.boundaries()
        at += [i * rows + row for row in episode.taught]
        targets += [laid[row + 1] for row in episode.taught]
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(boundaries),
        torch.from_numpy(key_positions([e.timeline for e in episodes], writer)),
        torch.tensor(at),
        torch.tensor(targets),
    )


def key_positions(timelines: Sequence[Timeline], writer: Writer) -> npt.NDArray[np.int64]:
    """(3, vision tokens of all timelines) positions of the keys of all units laid."""
    starts = np.array([unit.start for timeline in timelines for unit in timeline.units], dtype=np.int64)
    return (starts[None, :, None] + writer.key_steps[:, None, :]).reshape(3, -1)
