"""What a checkpoint's processor files say of pixels and frames, for Qwen3-VL. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chiasm.models.processor_files import (
    IMAGE_FILE,
    PIXEL_NAMES,
    VIDEO_FILE,
    known_value,
    pixel_bounds,
    refuse_other_pixels,
)
from chiasm.models.reading import Reader


@dataclass(frozen=True, slots=True)
class Budgets:
    """Pixels and frames of each medium by itself. The defaults are those of the classes that the files configure.

    Attributes:
        min_pixels, max_pixels: of an image.
        video_min_pixels, video_max_pixels: of all frames of a video together.
        cap_pixels_per_frame: `video_max_pixels` is a bound on each frame's share of it instead.
        max_video_tokens: of one frame, where that is so.
        fps: frames used of a second of video.
        min_frames, max_frames: of a video whose frames are chosen here.
    """

    min_pixels: int = 3_136
    max_pixels: int = 1_003_520
    video_min_pixels: int = 131_072
    video_max_pixels: int = 786_432
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    def problems(self) -> list[str]:
        """Bounds that leave nothing between them, by name."""
        pairs = (
            ("min_pixels", "max_pixels"),
            ("video_min_pixels", "video_max_pixels"),
            ("min_frames", "max_frames"),
        )
        named = [(low, getattr(self, low), high, getattr(self, high)) for low, high in pairs]
        return [f"{low} is {least}, more than {high}, {most}" for low, least, high, most in named if least > most]


def read_budgets(
    files: Mapping[str, Mapping[str, object]], *, patch_size: int, merge_size: int, temporal_patch_size: int
) -> tuple[Budgets, list[str]]:
    """Budgets out of the processor files that are there, the defaults for the rest; and all that is wrong in them.

    The names are Hugging Face's: `size.shortest_edge` and `size.longest_edge` are pixels, whatever they are called.
    Videos are ruled by their own file, and by that of images where it is the only one.
    """
    problems: list[str] = []
    found: dict[str, Any] = {}
    for file, data in files.items():
        reader = Reader(data, prefix=f"{file}: ", problems=problems)
        refuse_other_pixels(
            reader,
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=temporal_patch_size,
            unit=f"{temporal_patch_size} frames",
        )
        bounds = pixel_bounds(reader)
        if file == IMAGE_FILE:
            found |= bounds
        if file == VIDEO_FILE or VIDEO_FILE not in files:
            found |= {f"video_{name}": pixels for name, pixels in bounds.items()}
            found |= _of_videos(reader)
    read = Budgets(**found)
    return read, [*problems, *read.problems()]


def _of_videos(reader: Reader) -> dict[str, Any]:
    """What rules videos alone. Adds a problem for what their processor leaves unread or cannot go by."""
    size = reader.section("size") if "size" in reader else Reader({})
    for name, edge in PIXEL_NAMES.items():
        if name in reader and edge not in size:
            reader.problem(name, f"is given and size.{edge} is not, which is what rules videos")
    reader.refuse_unless("num_frames", why="videos are sampled by fps; a request says min_frames and max_frames")
    found: dict[str, Any] = {}
    for key in ("fps", "min_frames", "max_frames", "max_video_tokens"):
        if (value := known_value(reader, key)) is not None:
            found[key] = value
    if "cap_pixels_per_frame" in reader:
        found["cap_pixels_per_frame"] = reader.raw("cap_pixels_per_frame")
        reader.refuse_unless("cap_pixels_per_frame", True, False, why="it is either on or off")
    return found
