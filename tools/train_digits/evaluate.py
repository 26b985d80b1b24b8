"""Accuracy of a checkpoint on digits it was not trained on, by greedy decoding, task by task.

Both halves are loaded as a service loads them. Every new token is computed from the whole timeline anew: slow, and
simple enough to trust. Videos go through an H.264 file and back.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, cast

import av
import numpy as np
import torch
from torch import Tensor

from chiasm.chat_template import Slot, Turn
from chiasm.models.moss_vl.config import Config
from chiasm.models.moss_vl.text import MossVLDecoder
from chiasm.models.moss_vl.vision import MossVLEncoder
from chiasm.models.registry import Model
from chiasm.timeline import Timeline
from chiasm.tokenizer import Tokenizer
from tools.train_digits.data import EMPTY, Digits, draw
from tools.train_digits.episodes import READ, Episode, Medium, Writer, ask_time, collate, draw_offsets
from tools.train_digits.held_out import mp4
from tools.train_digits.train import encode, logits_of

LONGEST = 8
Score: TypeAlias = dict[str, float | dict[str, float]]
Counts: TypeAlias = dict[int, list[tuple[int, int]]]
"""Per number of frames: (right digits, digits) of each clip."""


class Reader:
    """Both halves of a checkpoint, and greedy decoding of many equally long clips at once."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        opened = Model(directory)
        self.writer = Writer(cast(Config, opened.config), Tokenizer.from_file(directory / "tokenizer.json"))
        self._encoder = cast(MossVLEncoder, opened.encoder(dtype=dtype))
        self._decoder = cast(MossVLDecoder, opened.decoder(dtype=dtype))
        self._banned = sorted(self.writer.prompt.banned_ids)

    def see(self, frames_n3hw: Tensor) -> Tensor:
        """The entry of all frames."""
        with torch.no_grad():
            return encode(self._encoder, frames_n3hw)

    def answer(self, timelines: Sequence[Timeline], entry: Tensor, *, stop: int, most: int) -> list[list[int]]:
        """Appends up to `most` tokens to each timeline, the last of them `stop`. Returns what was appended.

        `entry` has the units of all timelines, clip by clip, equally many each; those not laid yet are left out.
        """
        said: list[list[int]] = [[] for _ in timelines]
        for _ in range(most):
            open_ones = [i for i, ids in enumerate(said) if stop not in ids]
            if not open_ones:
                break
            for i, token in zip(open_ones, self._next(timelines, entry, open_ones), strict=True):
                timelines[i].append_text([token])
                said[i].append(token)
        return said

    def _next(self, timelines: Sequence[Timeline], entry: Tensor, which: Sequence[int]) -> list[int]:
        chosen = [timelines[i] for i in which]
        laid = chosen[0].vision_tokens
        seen = entry.unflatten(3, (len(timelines), -1))[:, :, :, which, :laid].flatten(3, 4)
        batch = collate([Episode(timeline, []) for timeline in chosen], self.writer)
        rows = batch.ids_bt.shape[1]
        last = torch.tensor([i * rows + len(timeline) - 1 for i, timeline in enumerate(chosen)])
        with torch.no_grad():
            logits = logits_of(self._decoder, seen, replace(batch, logits_at=last)).float()
        logits[:, self._banned] = -torch.inf
        return cast("list[int]", logits.argmax(-1).tolist())


class Exam:
    """Questions about random clips of held-out digits."""

    def __init__(self, reader: Reader, digits: Digits, seed: int) -> None:
        self._reader = reader
        self._digits = digits
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def read(self, frames: int, clips: int) -> list[tuple[int, int]]:
        """An even number of frames is a video, an odd number a video or images. The question comes first or last."""
        writer, rng = self._reader.writer, self._rng
        shown, pictures = self._clips(frames, clips, video=frames % 2 == 0)
        timelines = []
        for _ in range(clips):
            media: list[Medium] = [("image", [0.0])] * frames
            if frames % 2 == 0 or rng.random() < 0.5:
                media = [("video", draw_offsets(frames, rng))]
            slots = [Slot(i) for i in range(len(media))]
            turn = Turn("user", (READ, *slots) if rng.random() < 0.5 else (*slots, READ))
            timelines.append(writer.asked([turn], media))
        said = self._answers(timelines, pictures, most=2 * frames + 2)
        return [_compare(text.split(" "), [str(d) for d in row]) for text, row in zip(said, shown, strict=True)]

    def by_time(self, frames: int, clips: int) -> list[tuple[int, int]]:
        """One question about one frame of each video; the frames are one second apart, as a clip is sampled."""
        return self._by_time(clips, [[float(i) for i in range(frames)]] * clips)

    def by_other_times(self, frames: int, clips: int) -> list[tuple[int, int]]:
        """Likewise, of videos with the spacings of training."""
        return self._by_time(clips, [draw_offsets(frames, self._rng) for _ in range(clips)])

    def _by_time(self, clips: int, times: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
        frames = len(times[0])
        writer, rng = self._reader.writer, self._rng
        shown, pictures = self._clips(frames, clips, video=True)
        timelines, expected = [], []
        for row, offsets in zip(shown, times, strict=True):
            at = int(rng.integers(frames))
            expected.append([str(row[at])])
            question = ask_time(offsets[at])
            parts = (question, Slot(0)) if rng.random() < 0.5 else (Slot(0), question)
            timelines.append(writer.asked([Turn("user", parts)], [("video", offsets)]))
        said = self._answers(timelines, pictures, most=3)
        return [_compare([text], wanted) for text, wanted in zip(said, expected, strict=True)]

    def stream(self, frames: int, clips: int) -> list[tuple[int, int]]:
        """Frame by frame, some of them empty, each answered before the next one is laid; half begin with silence."""
        writer, rng = self._reader.writer, self._rng
        shown, pictures = self._clips(frames, clips, video=False, empty=0.3)
        entry = self._reader.see(pictures)
        timelines = [writer.stream_opening() for _ in range(clips)]
        for timeline in timelines[::2]:
            timeline.append_text([writer.silence_id])
        offsets = [draw_offsets(frames, rng) for _ in range(clips)]
        right = [0] * clips
        for at in range(frames):
            for timeline, seconds in zip(timelines, offsets, strict=True):
                writer.append_frame(timeline, seconds[at])
            said = self._reader.answer(timelines, entry, stop=writer.silence_id, most=4)
            for i, ids in enumerate(said):
                right[i] += ids == writer.said(shown[i][at])
        return [(count, frames) for count in right]

    def _clips(self, frames: int, clips: int, *, video: bool, empty: float = 0.0) -> tuple[list[list[int]], Tensor]:
        """What clips show, and their frames one clip after another; through H.264 if `video`."""
        chosen = self._rng.integers(len(self._digits), size=clips * frames)
        blank = self._rng.random(clips * frames) < empty
        cells = torch.from_numpy(self._digits.cells[chosen])
        pictures = draw(cells, torch.from_numpy(~blank), self._generator)
        if video:
            pictures = torch.cat([_through_h264(part) for part in pictures.split(frames)])
        labels = np.where(blank, EMPTY, self._digits.labels[chosen])
        return labels.reshape(clips, frames).tolist(), pictures

    def _answers(self, timelines: Sequence[Timeline], pictures: Tensor, *, most: int) -> list[str]:
        writer = self._reader.writer
        said = self._reader.answer(timelines, self._reader.see(pictures), stop=writer.stop_id, most=most)
        # An answer without its end is not an answer: what is missing shows as a wrong digit.
        return [writer.tokenizer.decode(ids) if ids[-1] == writer.stop_id else "" for ids in said]


def _through_h264(frames_n3hw: Tensor) -> Tensor:
    rgb = [frame.permute(1, 2, 0).contiguous().numpy() for frame in frames_n3hw]
    with av.open(io.BytesIO(mp4(rgb)), "r") as container:
        decoded = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return torch.stack(decoded).permute(0, 3, 1, 2)


def _compare(said: Sequence[str], expected: Sequence[str]) -> tuple[int, int]:
    """Right digits, place by place; digits said beyond the expected ones count as wrong."""
    right = sum(a == b for a, b in zip(said, expected, strict=False))
    return right, max(len(said), len(expected))


def _score(counts: Counts) -> Score:
    def share(clips: Sequence[tuple[int, int]]) -> float:
        return round(sum(right for right, _ in clips) / sum(of for _, of in clips), 4)

    everything = [clip for clips in counts.values() for clip in clips]
    whole = sum(right == of for right, of in everything) / len(everything)
    by_frames = {str(frames): share(clips) for frames, clips in counts.items()}
    return {"per_digit": share(everything), "whole_clips": round(whole, 4), "by_frames": by_frames}


def evaluate(directory: Path, *, digits: Digits, clips: int, dtype: torch.dtype, seed: int = 1) -> dict[str, object]:
    """Scores per task over about `clips` clips each, equally many of 1 to 8 frames.

    `per_digit` counts digits (in a stream: frames, empty ones included); `whole_clips` clips without any error.
    `time_mixed` is beside the three tasks: six of ten clips have frames a second apart, the others any spacing.
    """
    exam = Exam(Reader(directory, dtype), digits, seed)
    each = -(-clips // LONGEST)
    tasks: dict[str, Callable[[int, int], list[tuple[int, int]]]] = {
        "read": exam.read,
        "time": exam.by_time,
        "time_mixed": exam.by_other_times,
        "stream": exam.stream,
    }
    scores = {name: _score({n: ask(n, each) for n in range(1, LONGEST + 1)}) for name, ask in tasks.items()}
    return {"dtype": str(dtype).removeprefix("torch."), "clips_per_task": each * LONGEST, **scores}
