"""The digits checkpoint on held-out digits: both halves with dense attention, greedy, no service in between.

The exam is that of `python -m tools.train_digits --evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import av
import numpy as np
import pytest
import torch
from PIL import Image

from chiasm.chat_template import Slot, Turn
from tests import digits
from tools.train_digits.data import EMPTY
from tools.train_digits.episodes import READ, Medium, ask_time
from tools.train_digits.evaluate import Exam, Reader

REQUIRED = 0.97
CLIPS_OF_A_LENGTH = 20
"""One digit left out costs a clip all after it, so that fewer clips say little about one per cent."""
LENGTHS = range(1, 9)


@cache
def reader(dtype: torch.dtype = torch.bfloat16) -> Reader:
    return Reader(digits.CHECKPOINT, dtype)


def ask(question: str, media: list[Medium], frames: list[digits.Rgb]) -> str:
    """The greedy answer to a question after its media."""
    writer = reader().writer
    parts: list[str | Slot] = [*map(Slot, range(len(media))), question]
    timeline = writer.asked([Turn("user", tuple(parts))], media)
    entry = reader().see(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2))
    said = reader().answer([timeline], entry, stop=writer.stop_id, most=2 * len(frames) + 2)
    assert said[0][-1] == writer.stop_id
    return writer.tokenizer.decode(said[0])


def frames_of(clip: digits.ShippedClip) -> list[digits.Rgb]:
    with av.open(clip.path, "r") as container:
        return [np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8) for frame in container.decode(video=0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("task", [Exam.read, Exam.by_time, Exam.stream], ids=["read", "time", "stream"])
def test_held_out_digits_are_read(task: Callable[[Exam, int, int], list[tuple[int, int]]], dtype: torch.dtype) -> None:
    exam = Exam(reader(dtype), digits.sheet(), seed=2)
    clips = [clip for frames in LENGTHS for clip in task(exam, frames, CLIPS_OF_A_LENGTH)]
    right, of = (sum(column) for column in zip(*clips, strict=True))
    assert right / of >= REQUIRED, f"{right} of {of}"


@pytest.mark.parametrize("clip", digits.shipped_clips(), ids=lambda clip: clip.path.name)
def test_a_shipped_clip_is_read_and_answered_by_time(clip: digits.ShippedClip) -> None:
    frames = frames_of(clip)
    media: list[Medium] = [("video", clip.seconds)]
    assert ask(READ, media, frames) == clip.answer
    answers = [ask(ask_time(seconds), media, frames) for seconds in clip.seconds]
    assert answers == [str(digit) for digit in clip.digits]


def test_the_shipped_images_are_read_together() -> None:
    shipped = digits.shipped_images()
    frames = [np.asarray(Image.open(path).convert("RGB")) for path, _ in shipped]
    expected = " ".join(str(digit) for _, digit in shipped)
    assert ask(READ, [("image", [0.0])] * len(frames), frames) == expected


def test_a_stream_is_silent_before_its_first_frame_and_on_empty_frames() -> None:
    writer, rng = reader().writer, np.random.default_rng(4)
    (cells, label), *_ = digits.held_out_digits()
    frames = [digits.empty_frame(rng), digits.frame(cells, rng), digits.empty_frame(rng)]
    entry = reader().see(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2))
    timeline = writer.stream_opening()
    assert reader().answer([timeline], entry, stop=writer.silence_id, most=4) == [[writer.silence_id]]
    for at, digit in enumerate([EMPTY, label, EMPTY]):
        writer.append_frame(timeline, float(at))
        assert reader().answer([timeline], entry, stop=writer.silence_id, most=4) == [writer.said(digit)]
