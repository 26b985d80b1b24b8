"""What clients ask in a tell-tale run: requests that can be written down in a line and made again from it.

Pictures are named by a number and drawn from it, so whoever judges a history later has the same pixels.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal, TypeAlias

import blake3
import numpy as np
import PIL.Image

from chiasm import Frames, Image, SamplingParams, Video
from chiasm.client import Content
from tests import digits

Rgb = digits.Rgb

_CELL = 8
"""Pixels of a picture's squares, each of one colour: small files, and no two pictures alike."""


_LIKE = 4
"""Pictures that are alike but for their last square: 4, 5, 6 and 7, and so on."""

_FLAT = 1
"""Pictures below have one colour: their bytes are the same, whichever side is the longer one."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture by number, and its size."""

    number: int
    height: int = 64
    width: int = 64

    @property
    def rgb(self) -> Rgb:
        """(height, width, 3)."""
        return _drawn(self)


@lru_cache(maxsize=1 << 12)
def _drawn(picture: Picture) -> Rgb:
    rows, columns = -(-picture.height // _CELL), -(-picture.width // _CELL)
    cells = np.frombuffer(_bits(picture.number // _LIKE, rows * columns * 3), np.uint8).reshape(rows, columns, 3).copy()
    if picture.number < _FLAT:
        cells[:] = cells[0, 0]
    cells[-1, -1] = np.frombuffer(_bits(-1 - picture.number, 3), np.uint8) if picture.number >= _FLAT else cells[0, 0]
    drawn = cells.repeat(_CELL, 0).repeat(_CELL, 1)[: picture.height, : picture.width]
    return np.ascontiguousarray(drawn)


def _bits(number: int, count: int) -> bytes:
    return blake3.blake3(f"picture {number}".encode()).digest(count)


@lru_cache(maxsize=1 << 12)
def png(picture: Picture) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(picture.rgb).save(file, "PNG", compress_level=1)
    return file.getvalue()


@cache
def clips() -> Sequence[bytes]:
    """The clips that ship with the digits."""
    return [clip.path.read_bytes() for clip in digits.shipped_clips()]


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium.

    Attributes:
        kind: `broken` is an image whose file ends in the middle.
        pictures: of an image the one, of frames all of them, a second apart.
        clip: number of a shipped clip, for `clip`.
    """

    kind: Literal["image", "frames", "clip", "broken"]
    pictures: tuple[Picture, ...] = ()
    clip: int = 0

    @property
    def asked(self) -> Image | Frames | Video:
        if self.kind == "clip":
            return Video(clips()[self.clip])
        files = [png(picture) for picture in self.pictures]
        if self.kind == "frames":
            return Frames(files, fps=1.0)
        return Image(files[0][: len(files[0]) // 2] if self.kind == "broken" else files[0])


Part: TypeAlias = str | int
"""A text, or the place of a medium."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        name: its label, once in a history.
        tenant: who asks, by name.
        parts: of one user turn.
        leave: events after which its client leaves, 0 for one that leaves before there is any; None for one that stays.
    """

    name: str
    tenant: str
    media: tuple[Medium, ...]
    parts: tuple[Part, ...]
    seed: int = 0
    temperature: float = 0.0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    leave: int | None = None

    @property
    def content(self) -> Content:
        return [part if isinstance(part, str) else self.media[part].asked for part in self.parts]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            seed=self.seed, temperature=self.temperature, max_tokens=self.max_tokens, stop=list(self.stop)
        )


_SIZES = ((64, 64), (64, 96), (96, 64), (70, 90), (128, 64))
_WORDS = ("what", "which", "digit", "seconds", "shows", "frame", "and", "then", "is", "at", "the", "of", "first")
_STOPS = ("e", "1", "th", "\n", " say")


class Asking:
    """Requests drawn from a seed, without end: known media again and again, in other places and other company, and
    media that nobody has seen.

    Args:
        leaving: share of requests whose client leaves in the middle.
        broken: share of requests with a broken medium.
    """

    def __init__(
        self, seed: int, *, tenants: Sequence[str] = ("one", "two"), leaving: float = 0.1, broken: float = 0.03
    ) -> None:
        self._draw = random.Random(seed)
        self._seed = seed
        self._tenants = tenants
        self._leaving = leaving
        self._broken = broken
        self._made = 0
        self._new = seed * 1_000_000 + 1_000
        self._known = [self._medium() for _ in range(8)]
        self._asked: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        draw = self._draw
        self._made += 1
        media = tuple(self._one() for _ in range(draw.choice((0, 1, 1, 1, 1, 2, 2, 3))))
        parts: list[Part] = []
        if media and draw.random() < 0.3:
            parts.append(self._text())
        for place in range(len(media)):
            parts.append(place)
            if draw.random() < 0.3:
                parts.append(self._text())
        parts.append(self._text())
        if self._asked and draw.random() < 0.3:  # a known prompt with other words behind it
            before = draw.choice(self._asked[-20:])
            media, parts = before.media, [*before.parts]
            if media and draw.random() < 0.5:  # or the same words about another medium of the same kind and size
                at = draw.randrange(len(media))
                media = (*media[:at], self._like(media[at]), *media[at + 1 :])
            else:
                parts.append(self._text())
        request = Request(
            name=f"{self._seed}-{self._made}",
            tenant=draw.choice(self._tenants),
            media=media,
            parts=tuple(parts),
            seed=draw.getrandbits(64) if draw.random() < 0.7 else draw.randrange(3),
            temperature=draw.choice((0.0, 0.0, 0.7, 1.3)),
            max_tokens=draw.choice((1, 4, 12, 24, 40)),
            stop=tuple(draw.sample(_STOPS, draw.choice((0, 0, 1, 2)))),
            leave=draw.randint(0, 12) if draw.random() < self._leaving else None,
        )
        if not any(medium.kind == "broken" for medium in media):
            self._asked.append(request)
        return request

    def _text(self) -> str:
        return " ".join(self._draw.choices(_WORDS, k=self._draw.randint(2, 12)))

    def _one(self) -> Medium:
        chance = self._draw.random()
        if chance < self._broken:
            return Medium("broken", (self._picture(),))
        if chance < 0.5:
            return self._draw.choice(self._known)
        return self._medium()

    def _medium(self) -> Medium:
        chance = self._draw.random()
        if chance < 0.1:
            return Medium("clip", clip=self._draw.randrange(4))
        if chance < 0.5:
            return Medium("image", (self._picture(),))
        size = self._draw.choice(_SIZES)
        # Some frames of a list are those of others: equal units meet in one medium, and in several.
        return Medium("frames", tuple(self._picture(size) for _ in range(self._draw.randint(1, 6))))

    def _like(self, medium: Medium) -> Medium:
        """Another medium that is laid as this one is."""
        pictures = [replace(picture, number=picture.number ^ self._draw.randrange(4)) for picture in medium.pictures]
        return replace(medium, pictures=tuple(pictures))

    def _picture(self, size: tuple[int, int] | None = None) -> Picture:
        if self._draw.random() < 0.3:
            number = self._draw.choice((0, 0, 0, *range(4, 12)))
        else:
            self._new += 1
            number = self._new
        return Picture(number, *(size or self._draw.choice(_SIZES)))
