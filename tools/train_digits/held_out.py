"""What ships beside the weights for tests and demonstrations: held-out digits as clips, pictures and one sheet.

digits.png      every held-out digit in cells of 8x8, row by row, 15 grey levels a step
clip_N.mp4      H.264, 64x64, a frame and a digit per second
image_D.png     one frame that shows D
answers.json    labels of the sheet, digits and seconds of the clips, digits of the images
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from tools.train_digits.data import INK, Digits, draw

Rgb = npt.NDArray[np.uint8]

COLUMNS = 20
GREY = 15
"""Grey levels of the sheet per step of ink: 16 steps stay within a byte."""

CLIPS = (3, 5, 6, 8)
IMAGES = (0, 2, 4, 5, 7, 9)
FPS = 1


def pictures(digits: Digits, generator: torch.Generator) -> list[Rgb]:
    """A frame, RGB (64, 64, 3), of every digit."""
    shown = torch.ones(len(digits), dtype=torch.bool)
    frames = draw(torch.from_numpy(digits.cells), shown, generator)
    return [np.ascontiguousarray(frame) for frame in frames.permute(0, 2, 3, 1).numpy()]


def mp4(frames: Sequence[Rgb], fps: float = FPS) -> bytes:
    """An H.264 file of RGB (height, width, 3) frames, all of one size, 1 / fps seconds each."""
    rate = Fraction(fps).limit_denominator(1000)
    height, width = frames[0].shape[:2]
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.options = {"crf": "20", "threads": "1"}
        for i, rgb in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            frame.pts, frame.time_base = i, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def png(picture: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of a grey (height, width) or RGB (height, width, 3) picture."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG", optimize=True)
    return file.getvalue()


def sheet(digits: Digits) -> npt.NDArray[np.uint8]:
    """All digits as one grey picture, `COLUMNS` cells wide; a last row is filled up with black."""
    rows = -(-len(digits) // COLUMNS)
    cells = np.zeros((rows * COLUMNS, 8, 8), dtype=np.uint8)
    cells[: len(digits)] = digits.cells
    tiled = cells.reshape(rows, COLUMNS, 8, 8).transpose(0, 2, 1, 3).reshape(rows * 8, COLUMNS * 8)
    return tiled * np.uint8(GREY)


def read_sheet(picture: npt.NDArray[np.uint8], labels: str) -> Digits:
    """The digits of a sheet; `labels` has a character for each. Raises ValueError if it is none."""
    rows, columns = picture.shape[0] // 8, picture.shape[1] // 8
    cells = picture.reshape(rows, 8, columns, 8).transpose(0, 2, 1, 3).reshape(-1, 8, 8)
    if np.any(cells % GREY) or cells.max() > INK * GREY or len(cells) < len(labels):
        raise ValueError(f"{len(cells)} cells of up to {cells.max()} grey levels are no sheet of {len(labels)} digits")
    return Digits(cells[: len(labels)] // np.uint8(GREY), np.array([int(label) for label in labels], dtype=np.int64))


def write(directory: Path, digits: Digits, *, seed: int = 7) -> None:
    """Writes the folder. Which digits the clips show is drawn from `seed` and from nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    frames = pictures(digits, torch.Generator().manual_seed(seed))
    (directory / "digits.png").write_bytes(png(sheet(digits)))
    clips = []
    for count in CLIPS:
        chosen = rng.choice(len(digits), size=count, replace=False)
        name = f"clip_{count}.mp4"
        (directory / name).write_bytes(mp4([frames[i] for i in chosen]))
        seconds = [i / FPS for i in range(count)]
        clips.append({"file": name, "fps": FPS, "seconds": seconds, "digits": digits.labels[chosen].tolist()})
    images = []
    for digit in IMAGES:
        name = f"image_{digit}.png"
        (directory / name).write_bytes(png(frames[rng.choice(np.flatnonzero(digits.labels == digit))]))
        images.append({"file": name, "digit": digit})
    answers = {
        "sheet": {"file": "digits.png", "labels": "".join(map(str, digits.labels))},
        "clips": clips,
        "images": images,
    }
    (directory / "answers.json").write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
