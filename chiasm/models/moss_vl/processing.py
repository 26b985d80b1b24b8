"""MOSS-VL's rules about pixels and places: which frames, which size, where a unit sits. Numbers only, no torch.

All sizes of a request are decided together, because its images share one pixel budget and its videos share another,
and a frame count besides. Source of the rules: the model's published processors, restated in `docs/models.md`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from chiasm.errors import CheckpointError, InvalidRequest
from chiasm.media.sample import SamplingOptions, frames_wanted, pick, share_frames
from chiasm.models.family import MediumFacts, MediumPlan
from chiasm.models.moss_vl.config import Config
from chiasm.models.processor_files import (
    NORMALISE,
    RESIZE,
    VIDEO_FILE,
    known_value,
    pixel_bounds,
    refuse_other_pixels,
)
from chiasm.models.reading import Reader
from chiasm.models.sizing import check_ratio, enlarged, nearest, resize_image, shrunk
from chiasm.timeline import UnitLayout


@dataclass(frozen=True, slots=True)
class Budgets:
    """Pixels and frames a request may use. The defaults are the official command line's.

    Attributes:
        min_pixels, max_pixels: of one image.
        multi_image_max_pixels: of all images of a request together.
        frame_min_pixels, frame_max_pixels: of one video frame.
        video_max_pixels: of all frames of all videos of a request together.
        fps, min_frames, max_frames: sampling of videos; max_frames is shared among the videos of a request.
    """

    min_pixels: int = 4_096
    max_pixels: int = 16_777_216
    multi_image_max_pixels: int = 201_326_592
    frame_min_pixels: int = 4_096
    frame_max_pixels: int = 16_777_216
    video_max_pixels: int = 201_326_592
    fps: float = 1.0
    min_frames: int = 1
    max_frames: int = 256

    @property
    def frames_by_pixels(self) -> int:
        """Frames that the video budget holds at the smallest legal size."""
        return self.video_max_pixels // self.frame_min_pixels

    def problems(self) -> list[str]:
        """Bounds that leave nothing between them, by name."""
        pairs = (
            ("min_pixels", "max_pixels"),
            ("min_pixels", "multi_image_max_pixels"),
            ("frame_min_pixels", "frame_max_pixels"),
            ("frame_min_pixels", "video_max_pixels"),
            ("min_frames", "max_frames"),
        )
        named = [(low, getattr(self, low), high, getattr(self, high)) for low, high in pairs]
        return [f"{low} is {least}, more than {high}, {most}" for low, least, high, most in named if least > most]


def read_budgets(
    files: Mapping[str, Mapping[str, object]], patch_size: int, merge_size: int
) -> tuple[Budgets, list[str]]:
    """Budgets out of the processor files that are there, the defaults for the rest; and all that is wrong in them.

    The size of one image or frame is ruled by the file of its kind, under the names `min_pixels` and `max_pixels` or,
    as Hugging Face has it, `size.shortest_edge` and `size.longest_edge`, which are pixels too. A budget that has only
    one meaning may be in either file, or in both if they agree.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    for file, data in files.items():
        reader = Reader(data, prefix=f"{file}: ", problems=problems)
        refuse_other_pixels(
            reader, patch_size=patch_size, merge_size=merge_size, temporal_patch_size=1, unit="one frame"
        )
        of_frame = "frame_" if file == VIDEO_FILE else ""
        found |= {of_frame + name: pixels for name, pixels in pixel_bounds(reader).items()}
        for key in ("multi_image_max_pixels", "video_max_pixels", "min_frames", "max_frames", "fps"):
            if (value := known_value(reader, key)) is not None and found.setdefault(key, value) != value:
                reader.problem(key, f"is {value}, the other file says {found[key]}")
    read = Budgets(**found)
    return read, [*problems, *read.problems()]


def resize_video(
    frames: int, height: int, width: int, factor: int, *, budget: int, least: int, most: int
) -> tuple[int, int]:
    """The size of every frame of a video: as an image, then within `budget` pixels over all frames, then `least`
    each."""
    h, w = nearest(height, width, factor)
    if h * w > most:
        h, w = shrunk(height, width, math.sqrt(height * width / most), factor)
    if frames * h * w > budget:
        h, w = shrunk(height, width, math.sqrt(frames * height * width / budget), factor)
    elif frames * h * w < least:
        h, w = enlarged(height, width, math.sqrt(least / (frames * height * width)), factor)
    if h * w < least:
        h, w = enlarged(height, width, math.sqrt(least / (height * width)), factor)
    return h, w


class MossVLProcessor:
    """`Processor` of one checkpoint."""

    def __init__(self, config: Config, budgets: Budgets) -> None:
        self.config = config
        self.budgets = budgets

    @classmethod
    def read(cls, config: Config, files: Mapping[str, dict[str, object]], where: str) -> MossVLProcessor:
        """Takes budgets from the checkpoint's processor files where they are given (`read_budgets`).

        Raises CheckpointError listing all that the files ask for and that this family does not do, every value that
        cannot be, and bounds that leave nothing between them.
        """
        found, problems = read_budgets(files, config.vision.patch_size, config.vision.spatial_merge_size)
        if problems:
            raise CheckpointError(where, problems)
        return cls(config, found)

    def describe(self) -> bytes:
        return json.dumps({"resize": RESIZE, "normalise": NORMALISE}, sort_keys=True).encode()

    # -- sizes -----------------------------------------------------------------------------------------------------

    def size(self, media: Sequence[MediumFacts]) -> list[MediumPlan]:
        for i, facts in enumerate(media):
            try:
                self._check(facts)
            except InvalidRequest as error:
                raise error.at(f"media[{i}]") from None
        frames = self._frames(media)
        image_pixels = sum(m.height * m.width for m in media if m.kind == "image")
        video_pixels = sum(count * media[i].height * media[i].width for i, count in frames.items())
        return [
            self._video(facts, frames[i], video_pixels) if i in frames else self._image(facts, image_pixels)
            for i, facts in enumerate(media)
        ]

    def _check(self, facts: MediumFacts) -> None:
        check_ratio(facts.height, facts.width)
        factor = self.config.vision.factor
        if facts.kind == "video" and min(facts.height, facts.width) < factor:
            raise InvalidRequest(
                "MEDIA_TOO_SMALL",
                f"a video of {facts.width}x{facts.height} has a side below {factor}",
                facts={"height": facts.height, "width": facts.width, "min": factor},
            )

    def _frames(self, media: Sequence[MediumFacts]) -> dict[int, int]:
        """How many frames of every video are used, by its place in the request.

        Frames that the request names, in a list or by their times, are taken off the total first and all used; what is
        left is shared among the sampled videos by the model's rule. They are refused where they leave a sampled video
        no frame. (The model's processor knows no such requests: the order is this library's.)
        """
        videos = {i: facts for i, facts in enumerate(media) if facts.kind == "video"}
        sampled = [i for i, facts in videos.items() if not facts.options.explicit]
        left = self.budgets.max_frames
        frames = {}
        for i, facts in videos.items():
            if facts.options.explicit:
                limit = min(left - len(sampled), self.budgets.frames_by_pixels)
                frames[i] = self._named(facts, limit, f"media[{i}]")
                left -= frames[i]
        shares = share_frames([videos[i].seconds for i in sampled], left)
        for i, share in zip(sampled, shares, strict=True):
            frames[i] = self._sampled(videos[i], share, f"media[{i}]")
        return frames

    def _named(self, facts: MediumFacts, limit: int, item: str) -> int:
        if facts.frames > limit:
            limit = max(limit, 0)
            raise InvalidRequest(
                "TOO_MANY_ITEMS",
                f"{facts.frames} frames are asked for, the request has {limit} left",
                item=item,
                facts={"got": facts.frames, "limit": limit},
            )
        return facts.frames

    def _sampled(self, facts: MediumFacts, share: int, item: str) -> int:
        o, b = facts.options, self.budgets
        if o.max_frames is not None and o.max_frames > b.max_frames:
            raise InvalidRequest(
                "FIELD_OUT_OF_RANGE",
                f"max_frames is {o.max_frames}, must be 1 to {b.max_frames}",
                item=item,
                facts={"field": "max_frames", "got": o.max_frames, "limit": b.max_frames},
            )
        most = min(share, b.frames_by_pixels, facts.frames, share if o.max_frames is None else o.max_frames)
        least = b.min_frames if o.min_frames is None else o.min_frames
        return frames_wanted(facts.seconds, b.fps if o.fps is None else o.fps, least=least, most=most)

    def _image(self, facts: MediumFacts, all_pixels: int) -> MediumPlan:
        b = self.budgets
        share = int(b.multi_image_max_pixels * (facts.height * facts.width / all_pixels))
        most = min(max(share, b.min_pixels), b.max_pixels)
        size = resize_image(facts.height, facts.width, self.config.vision.factor, least=b.min_pixels, most=most)
        return self._plan(facts, 1, size)

    def _video(self, facts: MediumFacts, frames: int, all_pixels: int) -> MediumPlan:
        b = self.budgets
        size = resize_video(
            frames,
            facts.height,
            facts.width,
            self.config.vision.factor,
            budget=max(int(b.video_max_pixels * frames * facts.height * facts.width / all_pixels), 1),
            least=b.frame_min_pixels,
            most=b.frame_max_pixels,
        )
        return self._plan(facts, frames, size)

    def _plan(self, facts: MediumFacts, frames: int, size: tuple[int, int]) -> MediumPlan:
        height, width = size
        grid = (height // self.config.vision.patch_size, width // self.config.vision.patch_size)
        return MediumPlan(
            kind=facts.kind,
            frames=frames,
            height=height,
            width=width,
            grid=grid,
            tokens=self.unit_layout(grid).vision_tokens,
            upscaled=height * width > facts.height * facts.width,
        )

    def pick(self, offsets: Sequence[float], options: SamplingOptions, count: int) -> list[int]:
        return pick(offsets, options, count)

    # -- places ----------------------------------------------------------------------------------------------------

    def unit_layout(self, grid: tuple[int, int]) -> UnitLayout:
        """One image pad per frame, at the far corner of the frame's positions; the counter moves one beyond it."""
        return _unit_layout(self.config.image_token_id, *self._merged(grid))

    def key_steps(self, grid: tuple[int, int]) -> npt.NDArray[np.int64]:
        """Merged tokens row by row at (0, y, x), then the separator at the far corner."""
        rows, columns = self._merged(grid)
        y, x = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
        corner = np.full((3, 1), max(rows, columns), dtype=np.int64)
        return np.concatenate([np.stack([np.zeros_like(y), y, x]), corner], axis=1)

    def _merged(self, grid: tuple[int, int]) -> tuple[int, int]:
        merge = self.config.vision.spatial_merge_size
        return grid[0] // merge, grid[1] // merge


@lru_cache(maxsize=1024)
def _unit_layout(pad: int, rows: int, columns: int) -> UnitLayout:
    """Every timeline keeps one for each of its units, and most of them are equal."""
    corner = max(rows, columns)
    return UnitLayout(
        placeholder_ids=(pad,),
        placeholder_steps=np.full((3, 1), corner, dtype=np.int32),
        advance=corner + 1,
        vision_tokens=rows * columns + 1,
    )
