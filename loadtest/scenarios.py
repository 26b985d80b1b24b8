"""What is asked: by number and seed, so that equal loads ask equal questions, in whichever process.

The pictures are the held-out digits that come with the model `digits`, which is right about all that is asked here, so
a wrong answer is a fault of the system. Other models may be asked the same; nobody judges them.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image as Pillow

from chiasm.client import Content, Frames, Image, Video

READ: Final = "Read the digits."

SEVERAL: Final = 3
"""Images of one question at most, and two at least."""

Picture = npt.NDArray[np.uint8]
"""(height, width, 3)."""


class Question(NamedTuple):
    """What is asked, and the right answer where there is one."""

    content: Content
    expected: str | None = None


class Digits:
    """The held-out pictures and clips, and what they show."""

    def __init__(self) -> None:
        self._folder = files("chiasm") / "checkpoints" / "digits" / "held_out"
        self._answers: dict[str, Any] = json.loads((self._folder / "answers.json").read_text(encoding="utf-8"))
        self.images: list[tuple[Picture, int]] = [
            (np.asarray(Pillow.open(io.BytesIO(self._read(image["file"]))).convert("RGB")), image["digit"])
            for image in self._answers["images"]
        ]
        longest = max(self._answers["clips"], key=lambda clip: len(clip["digits"]))
        self.clip: bytes = self._read(longest["file"])
        self.shown: list[int] = longest["digits"]

    @cache  # noqa: B019 - there is one for a process
    def frames(self) -> list[Picture]:
        """The pictures of the clip, one a second."""
        import av

        with av.open(io.BytesIO(self.clip), mode="r") as container:
            decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return [np.asarray(picture, dtype=np.uint8) for picture in decoded]

    def _read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()


@cache
def digits() -> Digits:
    return Digits()


class Asking:
    """The questions of one load.

    Args:
        fresh: marks each picture with seed and number of its question, in the low bits of a few pixels.
    """

    def __init__(self, scenario: str, *, seed: int, fresh: bool) -> None:
        self._make = SCENARIOS[scenario]
        self._seed = seed
        self.fresh = fresh

    def question(self, number: int) -> Question:
        return self._make(self, number, random.Random(f"{self._seed}/{number}"))

    def pictures(self, number: int, pictures: Sequence[Picture]) -> list[Picture]:
        """The pictures as they are shown with a question."""
        return [self._marked(picture, number) for picture in pictures] if self.fresh else list(pictures)

    def _marked(self, picture: Picture, number: int) -> Picture:
        marked = picture.copy()
        bits = (number + (self._seed << 16)) & 0xFFFFFF  # distinct for 65,536 questions of each of 256 seeds
        for at in range(8):
            marked[0, at] = (marked[0, at] & 0xF8) | [(bits >> (3 * at)) & 0x7, 0, 0]
        return marked


def _image(asking: Asking, number: int, chance: random.Random) -> Question:
    """One picture."""
    picture, digit = chance.choice(digits().images)
    return Question([Image(*asking.pictures(number, [picture])), READ], str(digit))


def _images(asking: Asking, number: int, chance: random.Random) -> Question:
    """Two or three pictures: frames of the clip, of which the model reads every choice and order right."""
    shown = list(zip(digits().frames(), digits().shown, strict=True))
    chosen = chance.sample(shown, chance.randint(2, SEVERAL))
    pictures = asking.pictures(number, [picture for picture, _ in chosen])
    return Question([*map(Image, pictures), READ], " ".join(str(digit) for _, digit in chosen))


def _questions(asking: Asking, number: int, chance: random.Random) -> Question:
    """One video, and each time another question about it."""
    shown = digits().shown
    video = Frames(asking.pictures(number, digits().frames()), fps=1.0) if asking.fresh else Video(digits().clip)
    at = chance.randint(-1, len(shown) - 1)
    if at < 0:
        return Question([video, READ], " ".join(map(str, shown)))
    return Question([video, f"Which digit is at {at}.0 seconds?"], str(shown[at]))


def _growing(asking: Asking, number: int, chance: random.Random) -> Question:
    """A clip that has one more frame with each question, until it begins again."""
    count = number % len(digits().shown) + 1
    clip = number // len(digits().shown)
    pictures = asking.pictures(clip, digits().frames()[:count])
    return Question([Frames(pictures, fps=1.0), READ], " ".join(map(str, digits().shown[:count])))


def _text(asking: Asking, number: int, chance: random.Random) -> Question:
    """No media at all, for models without eyes too."""
    return Question(f"Question {chance.randint(0, 999_999)}: what comes next?")


SCENARIOS: Final[dict[str, Callable[[Asking, int, random.Random], Question]]] = {
    "image": _image,
    "images": _images,
    "questions": _questions,
    "growing": _growing,
    "text": _text,
}
