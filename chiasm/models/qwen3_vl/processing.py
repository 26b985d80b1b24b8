"""Qwen3-VL's rules about pixels and places: which frames, which size, where a unit sits. Numbers only, no torch.

Every medium has its budgets for itself: what else a request holds changes nothing. A unit is one temporal patch, two
frames of a video or an image. Source of the rules: what the model's own processor does, as recorded
(`tests/oracles/qwen3_vl`) and restated in `docs/models.md`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from chiasm.errors import CheckpointError, InvalidRequest
from chiasm.media.sample import SamplingOptions, eligible
from chiasm.models.family import Grid, MediumFacts, MediumPlan
from chiasm.models.processor_files import NORMALISE, RESIZE
from chiasm.models.qwen3_vl.budgets import Budgets, read_budgets
from chiasm.models.qwen3_vl.config import Config
from chiasm.models.sizing import check_ratio, enlarged, nearest, resize_image, shrunk
from chiasm.timeline import UnitLayout


def resize_video(
    frames: int, height: int, width: int, factor: int, *, span: int, least: int, most: int
) -> tuple[int, int]:
    """The size of every frame of a video, with least <= pixels of all frames <= most.

    Compared is the number of frames rounded to whole units, halves to even (of units of two, 5 frames count as 4 and 7
    as 8); scaled is by the true number. At least `span` frames count, as so many are shown.

    Raises InvalidRequest ASPECT_RATIO.
    """
    frames = max(frames, span)
    height, width = _grown(height, width, factor)
    check_ratio(height, width)
    h, w = nearest(height, width, factor)
    pixels = round(frames / span) * span * h * w
    if pixels > most:
        return shrunk(height, width, math.sqrt(frames * height * width / most), factor)
    if pixels < least:
        return enlarged(height, width, math.sqrt(least / (frames * height * width)), factor)
    return h, w


def _grown(height: int, width: int, factor: int) -> tuple[int, int]:
    """The sides, both enlarged until the shorter is one factor; fractions are cut off."""
    if min(height, width) >= factor:
        return height, width
    by = max(factor / height, factor / width)
    return int(height * by), int(width * by)


def evenly(total: int, count: int) -> list[int]:
    """`count` of `total` frames, both ends included, halves to the even one. `count` is at most `total`: none twice."""
    return [int(i) for i in np.linspace(0, total - 1, count).round()]


class Qwen3VLProcessor:
    """`Processor` of one checkpoint."""

    def __init__(self, config: Config, budgets: Budgets) -> None:
        self.config = config
        self.budgets = budgets

    @classmethod
    def read(cls, config: Config, files: Mapping[str, dict[str, object]], where: str) -> Qwen3VLProcessor:
        """Takes budgets from the checkpoint's processor files where they are given (`read_budgets`).

        Raises CheckpointError listing all that the files ask for and that this family does not do, every value that
        cannot be, and bounds that leave nothing between them.
        """
        vision = config.vision
        found, problems = read_budgets(
            files,
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
        )
        if problems:
            raise CheckpointError(where, problems)
        return cls(config, found)

    def describe(self) -> bytes:
        vision = self.config.vision
        said = {
            "resize": RESIZE,
            "normalise": NORMALISE,
            "temporal_patch_size": vision.temporal_patch_size,
            "odd": "last frame repeated",
            "align_corners": vision.align_corners,
        }
        return json.dumps(said, sort_keys=True).encode()

    # -- sizes -----------------------------------------------------------------------------------------------------

    def size(self, media: Sequence[MediumFacts]) -> list[MediumPlan]:
        plans = []
        for i, facts in enumerate(media):
            try:
                plans.append(self._image(facts) if facts.kind == "image" else self._video(facts))
            except InvalidRequest as error:
                raise error.at(f"media[{i}]") from None
        return plans

    def _image(self, facts: MediumFacts) -> MediumPlan:
        check_ratio(facts.height, facts.width)
        b, factor = self.budgets, self.config.vision.factor
        size = resize_image(facts.height, facts.width, factor, least=b.min_pixels, most=b.max_pixels)
        return self._plan(facts, 1, size, span=1)

    def _video(self, facts: MediumFacts) -> MediumPlan:
        frames, span = self._frames(facts), self.config.vision.temporal_patch_size
        size = resize_video(
            frames,
            facts.height,
            facts.width,
            self.config.vision.factor,
            span=span,
            least=self.budgets.video_min_pixels,
            most=self._most(max(frames, span)),
        )
        return self._plan(facts, frames, size, span=span)

    def _most(self, frames: int) -> int:
        """Pixels of so many frames of a video together, at most."""
        b = self.budgets
        if not b.cap_pixels_per_frame:
            return b.video_max_pixels
        share = min(b.max_video_tokens * self.config.vision.factor**2, b.video_max_pixels // frames)
        return frames * max(share, int(b.video_min_pixels * 1.05))

    def _frames(self, facts: MediumFacts) -> int:
        """How many frames of a video are used.

        Frames that the request names, in a list or by their times, are used as they are: `max_frames` bounds what is
        chosen here. A millionth of a frame is forgiven, as the seconds are those of the file's own clock.
        """
        o, b = facts.options, self.budgets
        if o.explicit:
            return facts.frames
        if o.max_frames is not None and o.max_frames > b.max_frames:
            raise InvalidRequest(
                "FIELD_OUT_OF_RANGE",
                f"max_frames is {o.max_frames}, must be 1 to {b.max_frames}",
                facts={"field": "max_frames", "got": o.max_frames, "limit": b.max_frames},
            )
        wanted = math.floor(facts.seconds * (b.fps if o.fps is None else o.fps) + 1e-6)
        least = b.min_frames if o.min_frames is None else o.min_frames
        most = b.max_frames if o.max_frames is None else o.max_frames
        return min(max(wanted, least), most, facts.frames)

    def _plan(self, facts: MediumFacts, frames: int, size: tuple[int, int], *, span: int) -> MediumPlan:
        height, width = size
        grid = (height // self.config.vision.patch_size, width // self.config.vision.patch_size)
        return MediumPlan(
            kind=facts.kind,
            frames=frames,
            height=height,
            width=width,
            grid=grid,
            tokens=math.prod(self._merged(grid)),
            upscaled=height * width > facts.height * facts.width,
            span=span,
        )

    def pick(self, offsets: Sequence[float], options: SamplingOptions, count: int) -> list[int]:
        """Frames that are named as they are; otherwise evenly over those that may be used, both ends included."""
        chosen = eligible(offsets, options)
        return [chosen[i] for i in evenly(len(chosen), count)]

    # -- places ----------------------------------------------------------------------------------------------------

    def unit_layout(self, grid: Grid) -> UnitLayout:
        """One pad for each merged token, at the place of the token; the counter moves on by the larger side.

        The pad is that of images, whatever the unit is of: a grid does not tell, and nothing looks at the id of a row
        that features are laid over.
        """
        return _unit_layout(self.config.image_token_id, *self._merged(grid))

    def key_steps(self, grid: Grid) -> npt.NDArray[np.int64]:
        """Merged tokens row by row at (0, y, x)."""
        rows, columns = self._merged(grid)
        y, x = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
        return np.stack([np.zeros_like(y), y, x])

    def _merged(self, grid: Grid) -> tuple[int, int]:
        merge = self.config.vision.spatial_merge_size
        return grid[0] // merge, grid[1] // merge


@lru_cache(maxsize=64)
def _unit_layout(pad: int, rows: int, columns: int) -> UnitLayout:
    """Every timeline keeps one for each of its units, and most of them are equal. The largest has 16,384 tokens."""
    tokens = rows * columns
    return UnitLayout(
        placeholder_ids=(pad,) * tokens,
        placeholder_steps=tuple((0, y, x) for y in range(rows) for x in range(columns)),
        advance=max(rows, columns),
        vision_tokens=tokens,
    )
