"""MOSS-VL's rules about pixels and places: which frames, which size, where a unit sits. Numbers only, no torch.

All sizes of a request are decided together, because its images share one pixel budget and its videos share another, and a
frame count besides. Source of the rules: the model's published processors, restated in `docs/models.md`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chiasm.errors import InvalidRequest
from chiasm.media.sample import SamplingOptions, at_times, frames_wanted, share_frames, spread
from chiasm.media.types import Probed
from chiasm.models.family import SizedMedium
from chiasm.models.moss_vl.config import Config
from chiasm.models.reading import Reader
from chiasm.timeline import UnitLayout

MAX_ASPECT_RATIO = 200
RESIZE = "torch uint8 bicubic antialias"
"""The kernel that resizes. Pillow's differs by up to 4 grey levels, so the kernel is part of an entry's identity."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Pixels and frames a request may use. The defaults are the official command line's.

    Attributes:
        min_pixels, max_pixels: of one image or one video frame.
        multi_image_max_pixels: of all images of a request together.
        video_max_pixels: of all frames of all videos of a request together.
        fps, min_frames, max_frames: sampling of videos; max_frames is shared among the videos of a request.
    """

    min_pixels: int = 4_096
    max_pixels: int = 16_777_216
    multi_image_max_pixels: int = 201_326_592
    video_max_pixels: int = 201_326_592
    fps: float = 1.0
    min_frames: int = 1
    max_frames: int = 256

    @property
    def frames_by_pixels(self) -> int:
        """Frames that the video budget holds at the smallest legal size."""
        return self.video_max_pixels // self.min_pixels


def resize_image(height: int, width: int, factor: int, *, least: int, most: int) -> tuple[int, int]:
    """Multiples of `factor` nearest to the sides (halves to even), shrunk or enlarged until least <= pixels <= most."""
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > most:
        return _shrunk(height, width, math.sqrt(height * width / most), factor)
    if h * w < least:
        return _enlarged(height, width, math.sqrt(least / (height * width)), factor)
    return h, w


def resize_video(
    frames: int, height: int, width: int, factor: int, *, budget: int, least: int, most: int
) -> tuple[int, int]:
    """The size of every frame of a video: as an image, then within `budget` pixels over all frames, then `least` each."""
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > most:
        h, w = _shrunk(height, width, math.sqrt(height * width / most), factor)
    if frames * h * w > budget:
        h, w = _shrunk(height, width, math.sqrt(frames * height * width / budget), factor)
    elif frames * h * w < least:
        h, w = _enlarged(height, width, math.sqrt(least / (frames * height * width)), factor)
    if h * w < least:
        h, w = _enlarged(height, width, math.sqrt(least / (height * width)), factor)
    return h, w


def _shrunk(height: int, width: int, by: float, factor: int) -> tuple[int, int]:
    h, w = (max(factor, math.floor(side / by / factor) * factor) for side in (height, width))
    return h, w


def _enlarged(height: int, width: int, by: float, factor: int) -> tuple[int, int]:
    h, w = (math.ceil(side * by / factor) * factor for side in (height, width))
    return h, w


class MossVLProcessor:
    """`Processor` of one checkpoint."""

    def __init__(self, config: Config, budgets: Budgets) -> None:
        self.config = config
        self.budgets = budgets

    @classmethod
    def read(cls, config: Config, files: Mapping[str, dict[str, object]], where: str) -> MossVLProcessor:
        """Takes budgets from the checkpoint's processor files where they are given.

        Raises CheckpointError if a file asks for another normalisation, patch or factor than the model's.
        """
        found: dict[str, int | float] = {}
        problems: list[str] = []
        for name, data in files.items():
            reader = Reader(data, prefix=f"{name}: ", problems=problems)
            vision = config.vision
            reader.refuse_unless("patch_size", vision.patch_size, why="config.json says otherwise")
            reader.refuse_unless("merge_size", vision.spatial_merge_size, why="config.json says otherwise")
            reader.refuse_unless("temporal_patch_size", 1, why="a unit is one frame")
            for key in ("image_mean", "image_std"):
                reader.refuse_unless(key, [0.5, 0.5, 0.5], why="pixels are (x - 127.5) / 127.5")
            for key in Budgets.__dataclass_fields__:
                if key in reader:
                    found[key] = reader.number(key) if key == "fps" else reader.integer(key)
        Reader({}, problems=problems).finish(where)
        return cls(config, Budgets(**found))  # type: ignore[arg-type]

    def describe(self) -> bytes:
        return json.dumps({"resize": RESIZE, "normalise": "(x-127.5)/127.5"}, sort_keys=True).encode()

    # -- sizes -----------------------------------------------------------------------------------------------------

    def size(self, media: Sequence[tuple[Probed, SamplingOptions]]) -> list[SizedMedium]:
        for i, (probed, options) in enumerate(media):
            try:
                self._check(probed, options)
            except InvalidRequest as error:
                raise error.at(f"media[{i}]") from None
        images = [probed for probed, _ in media if probed.kind == "image"]
        image_pixels = sum(p.height * p.width for p in images)
        videos = [(i, probed, options) for i, (probed, options) in enumerate(media) if probed.kind == "video"]
        caps = share_frames([probed.duration for _, probed, _ in videos], self.budgets.max_frames)
        chosen = {
            i: self._frames(probed, options, cap) for (i, probed, options), cap in zip(videos, caps, strict=True)
        }
        video_pixels = sum(len(chosen[i]) * probed.height * probed.width for i, probed, _ in videos)
        return [
            self._video(probed, chosen[i], video_pixels) if i in chosen else self._image(probed, image_pixels)
            for i, (probed, _) in enumerate(media)
        ]

    def _check(self, probed: Probed, options: SamplingOptions) -> None:
        ratio = max(probed.height, probed.width) / min(probed.height, probed.width)
        if ratio > MAX_ASPECT_RATIO:
            raise InvalidRequest(
                "ASPECT_RATIO",
                f"the sides {probed.width}x{probed.height} are as 1 to {ratio:.1f}, at most 1 to {MAX_ASPECT_RATIO}",
                facts={"ratio": round(ratio, 3), "limit": MAX_ASPECT_RATIO},
            )
        if probed.kind == "image":
            if options != SamplingOptions():
                raise InvalidRequest("UNKNOWN_FIELD", "an image has no frames to sample")
            return
        factor = self.config.vision.factor
        if min(probed.height, probed.width) < factor:
            raise InvalidRequest(
                "MEDIA_TOO_SMALL",
                f"a video of {probed.width}x{probed.height} has a side below {factor}",
                facts={"height": probed.height, "width": probed.width, "min": factor},
            )
        if not probed.frame_offsets:
            raise InvalidRequest("NO_FRAMES", "the video has no frames")
        options.check(max_frames_limit=self.budgets.max_frames)

    def _frames(self, probed: Probed, options: SamplingOptions, cap: int) -> list[int]:
        """Frames of one video, `cap` at most."""
        offsets = probed.frame_offsets
        if options.every_frame:
            if len(offsets) > cap:
                raise _too_many(len(offsets), cap)
            return list(range(len(offsets)))
        if options.timestamps is not None:
            if len(options.timestamps) > cap:
                raise _too_many(len(options.timestamps), cap)
            return at_times(offsets, options.timestamps)
        fps = self.budgets.fps if options.fps is None else options.fps
        least = self.budgets.min_frames if options.min_frames is None else options.min_frames
        most = min(cap if options.max_frames is None else min(cap, options.max_frames), self.budgets.frames_by_pixels)
        if options.start is None and options.end is None:
            count = frames_wanted(probed.duration, fps, least=least, most=min(most, len(offsets)))
            return spread(len(offsets), count)
        start = options.start or 0.0
        end = min(probed.duration if options.end is None else options.end, probed.duration)
        if start >= end:
            raise InvalidRequest(
                "NO_FRAMES",
                f"nothing is left from {start} s on: the video lasts {probed.duration:.3f} s",
                facts={"start": start, "seconds": probed.duration},
            )
        count = frames_wanted(end - start, fps, least=least, most=min(most, len(offsets)))
        return at_times(offsets, np.linspace(start, end, count, endpoint=False).tolist())

    def _image(self, probed: Probed, all_pixels: int) -> SizedMedium:
        b = self.budgets
        share = int(b.multi_image_max_pixels * (probed.height * probed.width / all_pixels))
        most = min(max(share, b.min_pixels), b.max_pixels)
        size = resize_image(probed.height, probed.width, self.config.vision.factor, least=b.min_pixels, most=most)
        return self._sized(probed, [0], size)

    def _video(self, probed: Probed, indices: Sequence[int], all_pixels: int) -> SizedMedium:
        b = self.budgets
        pixels = len(indices) * probed.height * probed.width
        size = resize_video(
            len(indices),
            probed.height,
            probed.width,
            self.config.vision.factor,
            budget=int(b.video_max_pixels * pixels / all_pixels),
            least=b.min_pixels,
            most=b.max_pixels,
        )
        return self._sized(probed, indices, size)

    def _sized(self, probed: Probed, indices: Sequence[int], size: tuple[int, int]) -> SizedMedium:
        height, width = size
        grid = (height // self.config.vision.patch_size, width // self.config.vision.patch_size)
        upscaled = height * width > probed.height * probed.width
        return SizedMedium(
            kind=probed.kind,
            indices=tuple(indices),
            offsets=tuple(probed.frame_offsets[i] for i in indices),
            height=height,
            width=width,
            grid=grid,
            tokens=self.unit_layout(grid).vision_tokens,
            flags=(*probed.flags, *(["upscaled"] if upscaled else [])),
        )

    # -- places ----------------------------------------------------------------------------------------------------

    def unit_layout(self, grid: tuple[int, int]) -> UnitLayout:
        """One image pad per frame, at the far corner of the frame's positions; the counter moves one beyond it."""
        rows, columns = self._merged(grid)
        corner = max(rows, columns)
        return UnitLayout(
            placeholder_ids=(self.config.image_token_id,),
            placeholder_steps=((corner, corner, corner),),
            advance=corner + 1,
            vision_tokens=rows * columns + 1,
        )

    def key_steps(self, grid: tuple[int, int]) -> npt.NDArray[np.int64]:
        """Merged tokens row by row at (0, y, x), then the separator at the far corner."""
        rows, columns = self._merged(grid)
        y, x = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
        corner = np.full((3, 1), max(rows, columns), dtype=np.int64)
        return np.concatenate([np.stack([np.zeros_like(y), y, x]), corner], axis=1)

    def _merged(self, grid: tuple[int, int]) -> tuple[int, int]:
        merge = self.config.vision.spatial_merge_size
        return grid[0] // merge, grid[1] // merge


def _too_many(got: int, limit: int) -> InvalidRequest:
    return InvalidRequest(
        "TOO_MANY_ITEMS", f"{got} frames are asked for, {limit} are allowed", facts={"got": got, "limit": limit}
    )
