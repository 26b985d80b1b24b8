"""Which frames of a video are used: counts shared among videos, indices by number, by range or by time.

Rules that families share, on numbers alone; what a family's limits are it says itself. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import MAX_FRAMES, MAX_SECONDS


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a request asks of one video. None means the family's own value.

    Attributes:
        fps: frames per second of video to use, > 0.
        min_frames, max_frames: bounds on the number of frames, >= 1.
        start, end: seconds; only frames in [start, end) are used.
        timestamps: exact seconds instead of any rate; each gives the frame shown at that time.
        every_frame: the frames were handed over one by one, with their times: all are used as they are, and no other
            option goes with it.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    start: float | None = None
    end: float | None = None
    timestamps: tuple[float, ...] | None = None
    every_frame: bool = False

    @property
    def explicit(self) -> bool:
        """The request says itself which frames are used: how many is not the family's to choose."""
        return self.every_frame or self.timestamps is not None

    def check(self) -> None:
        """Raises InvalidRequest for a value out of range or two options that contradict each other."""
        if self.fps is not None and not (0 < self.fps <= 1000):
            raise InvalidRequest.out_of_range("fps", self.fps, "more than 0, at most 1000")
        for name, value in (("min_frames", self.min_frames), ("max_frames", self.max_frames)):
            if value is not None and not 1 <= value <= MAX_FRAMES:
                raise InvalidRequest.out_of_range(name, value, f"1 to {MAX_FRAMES}")
        if self.min_frames is not None and self.max_frames is not None and self.min_frames > self.max_frames:
            raise _conflict(f"min_frames {self.min_frames} is more than max_frames {self.max_frames}")
        for name, seconds in (("start", self.start), ("end", self.end)):
            if seconds is not None and not 0 <= seconds <= MAX_SECONDS:
                raise InvalidRequest.out_of_range(name, seconds, f"0 to {MAX_SECONDS:g} seconds")
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise _conflict(f"start {self.start} is not before end {self.end}")
        chosen = (self.fps, self.min_frames, self.max_frames, self.start, self.end)
        if self.every_frame and (self.timestamps is not None or any(o is not None for o in chosen)):
            raise _conflict("a list of frames is used as it is, it excludes every sampling option")
        if self.timestamps is not None:
            if any(o is not None for o in chosen):
                raise _conflict("timestamps exclude every other sampling option")
            if not self.timestamps:
                raise _conflict("timestamps are given and none is in them")
            _check_times(self.timestamps)


def share_frames(durations: Sequence[float], total: int) -> list[int]:
    """Splits `total` frames among videos: one each, the rest in proportion to duration by largest remainder, ties to
    the earlier video. One each if there are fewer frames than videos. (MOSS-VL's rule.)"""
    spare = total - len(durations)
    if spare <= 0:
        return [1] * len(durations)
    whole = sum(durations)
    shares = [spare * d / whole if whole > 0 else spare / len(durations) for d in durations]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (-(shares[i] - counts[i]), i))
    for i in by_remainder[: spare - sum(counts)]:
        counts[i] += 1
    return [1 + count for count in counts]


def frames_wanted(duration: float, fps: float, *, least: int, most: int) -> int:
    """Frames to take of `duration` seconds: ceil(duration * fps), a millionth forgiven, within the bounds."""
    return min(max(math.ceil(duration * fps - 1e-6), least), most)


def spread(total: int, count: int) -> list[int]:
    """`count` of `total` frames evenly, both ends included, fractions cut off, none twice."""
    return [int(i) for i in np.unique(np.linspace(0, total - 1, count).astype(np.int32))]


def eligible(offsets: Sequence[float], options: SamplingOptions) -> list[int]:
    """The frames that `options` leave to choose from: those on show at the times named, those in the range, or all.

    Raises InvalidRequest for a time more than a second after the last frame, and for a range that holds no frame.
    """
    if options.timestamps is not None:
        if options.timestamps[-1] > offsets[-1] + 1.0:
            raise InvalidRequest(
                "TIMESTAMPS_INVALID",
                f"time {options.timestamps[-1]} s is beyond the last frame at {offsets[-1]:.3f} s",
                facts={"index": len(options.timestamps) - 1, "limit": offsets[-1]},
            )
        return _on_show(offsets, options.timestamps)
    start = 0.0 if options.start is None else options.start
    chosen = [i for i, at in enumerate(offsets) if at >= start and (options.end is None or at < options.end)]
    if not chosen:
        raise InvalidRequest(
            "NO_FRAMES",
            f"no frame is shown from {start} s to {'the end' if options.end is None else f'{options.end} s'}",
            facts={"start": start, "last": offsets[-1]},
        )
    return chosen


def seconds_covered(offsets: Sequence[float], duration: float, options: SamplingOptions) -> float:
    """Seconds of video that `options` leave to sample from."""
    end = duration if options.end is None else min(options.end, duration)
    return max(end - (options.start or 0.0), 0.0) if offsets else 0.0


def pick(offsets: Sequence[float], options: SamplingOptions, count: int) -> list[int]:
    """`count` of the eligible frames: evenly over all of a file, both ends included; of a range those on show at evenly
    spaced times from its start, the end left out."""
    chosen = eligible(offsets, options)
    if options.timestamps is None and options.start is None and options.end is None:
        return spread(len(offsets), count)
    if len(chosen) == count:
        return chosen
    assert options.timestamps is None, "named times are counted as they are"
    times = np.linspace(offsets[chosen[0]], offsets[chosen[-1]], count, endpoint=False).tolist()
    shown = _on_show(offsets, times)
    return shown if len(shown) == count else [chosen[i] for i in spread(len(chosen), count)]


def _on_show(offsets: Sequence[float], times: Sequence[float]) -> list[int]:
    """The frames on show at those times, each once. A microsecond is forgiven."""
    indices = np.searchsorted(np.asarray(offsets), np.asarray(times) + 1e-6, side="right") - 1
    return [int(i) for i in np.unique(np.maximum(indices, 0))]


def _check_times(times: Sequence[float]) -> None:
    for i, time in enumerate(times):
        before = times[i - 1] if i else -1.0
        if not (0 <= time <= MAX_SECONDS and time > before):
            raise InvalidRequest(
                "TIMESTAMPS_INVALID", f"timestamp {i} is {time}, times must grow from 0", facts={"index": i}
            )


def _conflict(message: str) -> InvalidRequest:
    return InvalidRequest("SAMPLING_CONFLICT", message)
