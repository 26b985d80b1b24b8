"""What clients ask in a chaos run, and what a quiet system in one process answers. Knows no fault."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chiasm import AsyncClient, Frames, Handle, Image, Video
from chiasm.client import Content, Generation
from tests import digits
from tests.e2e.test_digits import drawn

MODEL = "digits"
MAX_TOKENS = 24
READ = "Read the digits."

Asked = Image | Video | Frames


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Media and a question about them.

    Attributes:
        media: in order.
        kept: whether the media are uploaded once and named by their handles from then on.
    """

    name: str
    media: tuple[Asked, ...]
    text: str = READ
    kept: bool = False

    @property
    def content(self) -> Content:
        return [*self.media, self.text]


class Questions:
    """Known clips, images, lists of frames and handles, again and again, and clips that nobody has seen."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._drawn = np.random.default_rng(seed)
        self._made = 0
        self._known = self._repeated()

    def next(self) -> Question:
        """One in three is about a clip or a list of frames that is new."""
        if self._draw.random() < 1 / 3:
            self._made += 1
            return self._new(listed=self._made % 3 == 0)
        return self._draw.choice(self._known)

    def _new(self, *, listed: bool) -> Question:
        count = self._draw.randint(1, 8)
        frames, _ = drawn(self._drawn, count)
        name, text = f"new {self._made} of {count} frames", READ
        if self._draw.random() < 0.3:
            text = f"Which digit is at {self._draw.randrange(count)}.0 seconds?"
        if listed:
            return Question(f"{name}, listed", (_list(frames),), text)
        return Question(name, (Video(digits.clip(frames)),), text)

    def _repeated(self) -> Sequence[Question]:
        clips = digits.shipped_clips()
        pictures = [Image(path.read_bytes()) for path, _ in digits.shipped_images()]
        listed = _list(drawn(self._drawn, 5)[0])
        return [
            *(Question(clip.path.name, (Video(clip.path),)) for clip in clips),
            *(Question(f"{clip.path.name}, kept", (Video(clip.path),), kept=True) for clip in clips),
            Question("second 1", (Video(clips[0].path),), "Which digit is at 1.0 seconds?"),
            Question("half the frames", (Video(clips[1].path, fps=0.5),)),
            *(Question(f"image {number}", (picture,)) for number, picture in enumerate(pictures[:3])),
            Question("images and a clip", (pictures[0], Video(clips[2].path), pictures[1])),
            Question("listed", (listed,)),
            Question("listed, kept", (listed,), kept=True),
        ]


def _list(frames: Sequence[digits.Rgb]) -> Frames:
    return Frames([digits.image(frame) for frame in frames], fps=1.0)


class Truth:
    """What a quiet system in this process answers, asked once for each question.

    Attributes:
        encoded: units that it had to encode: what no fault can spare.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._answers: dict[str, asyncio.Task[Generation]] = {}
        self.encoded = 0

    async def of(self, question: Question) -> Generation:
        if question.name not in self._answers:
            self._answers[question.name] = asyncio.create_task(self._ask(question))
        return await asyncio.shield(self._answers[question.name])

    async def _ask(self, question: Question) -> Generation:
        answer = await self._client.generate(MODEL, question.content, max_tokens=MAX_TOKENS)
        self.encoded += sum(medium.units - (medium.units_cached or 0) for medium in answer.usage.media)
        return answer


class Handles:
    """Media that were uploaded to a router, each once."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._sent: dict[Asked, asyncio.Task[Handle]] = {}

    async def content(self, question: Question) -> Content:
        """The question, with handles in the place of media that are kept."""
        if not question.kept:
            return question.content
        for medium in question.media:
            if medium not in self._sent:
                self._sent[medium] = asyncio.create_task(self._client.upload(medium, ttl=3600))
        return [*[await self._sent[medium] for medium in question.media], question.text]
