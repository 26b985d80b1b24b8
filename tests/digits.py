"""Held-out digits for tests: as cells, as frames, as clips, and the files that ship with the checkpoint.

Nothing here needs scikit-learn: the digits come from the sheet in the checkpoint's `held_out` folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from chiasm.models.registry import SHIPPED
from tools.train_digits import held_out
from tools.train_digits.data import Digits, draw

CHECKPOINT = SHIPPED / "digits"
HELD_OUT = CHECKPOINT / "held_out"

Cells = npt.NDArray[np.uint8]  # (8, 8), 0 to 16
Rgb = npt.NDArray[np.uint8]  # (height, width, 3)


@dataclass(frozen=True, slots=True)
class ShippedClip:
    """A clip beside the checkpoint: its file, and what each frame shows at which second."""

    path: Path
    digits: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def answer(self) -> str:
        """What `Read the digits.` should be answered."""
        return " ".join(map(str, self.digits))


@cache
def sheet() -> Digits:
    """All held-out digits at once."""
    found = _answers()["sheet"]
    with Image.open(HELD_OUT / found["file"]) as image:
        return held_out.read_sheet(np.asarray(image), found["labels"])


def held_out_digits() -> list[tuple[Cells, int]]:
    """Every held-out digit: its 8x8 cells from 0 to 16, and the number it shows."""
    digits = sheet()
    return [(cells, int(label)) for cells, label in zip(digits.cells, digits.labels, strict=True)]


def frame(digit: Cells, rng: np.random.Generator) -> Rgb:
    """A 64x64 RGB frame that shows the digit, placed and degraded as in training."""
    return _drawn(digit, shown=True, rng=rng)


def empty_frame(rng: np.random.Generator) -> Rgb:
    """A 64x64 RGB frame that shows nothing."""
    return _drawn(np.zeros((8, 8), dtype=np.uint8), shown=False, rng=rng)


def clip(frames: Sequence[Rgb], fps: float = 1.0) -> bytes:
    """An H.264 mp4 of the frames, 1 / fps seconds each."""
    return held_out.mp4(frames, fps)


def without_last_frames(data: bytes) -> bytes:
    """The same mp4 with the samples of its last frames overwritten, its index untouched."""
    at = data.rindex(b"mdat")
    index_first = data.index(b"moov") < at
    end = len(data) if index_first else data.rindex(b"moov") - 4
    size = int.from_bytes(data[at - 4 : at], "big")
    assert at - 4 + size == end or index_first
    damaged = bytearray(data)
    cut = at - 4 + size - max(40, size // 40)
    damaged[cut : at - 4 + size] = bytes(at - 4 + size - cut)
    return bytes(damaged)


def image(picture: Rgb) -> bytes:
    """A PNG of one frame."""
    return held_out.png(picture)


def shipped_clips() -> list[ShippedClip]:
    """The clips beside the checkpoint."""
    return [
        ShippedClip(HELD_OUT / found["file"], tuple(found["digits"]), tuple(found["seconds"]))
        for found in _answers()["clips"]
    ]


def shipped_images() -> list[tuple[Path, int]]:
    """The images beside the checkpoint, and the digit each shows."""
    return [(HELD_OUT / found["file"], found["digit"]) for found in _answers()["images"]]


@cache
def _answers() -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((HELD_OUT / "answers.json").read_text(encoding="utf-8"))
    return answers


def _drawn(digit: Cells, *, shown: bool, rng: np.random.Generator) -> Rgb:
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    picture = draw(torch.from_numpy(digit).unsqueeze(0), torch.tensor([shown]), generator)
    return np.ascontiguousarray(picture[0].permute(1, 2, 0).numpy())
