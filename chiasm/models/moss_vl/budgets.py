"""What a MOSS-VL checkpoint's processor files say: how many pixels and frames a request may use. Numbers only, no torch.

`preprocessor_config.json` rules images, `video_preprocessor_config.json` rules videos. What they say about the pixels
themselves is fixed by the model: every value that asks for something else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chiasm.models.reading import Reader, shown

IMAGES = "preprocessor_config.json"
VIDEOS = "video_preprocessor_config.json"


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
        _refuse(reader, patch_size, merge_size)
        of_frame = "frame_" if file == VIDEOS else ""
        found |= {of_frame + name: pixels for name, pixels in _bounds(reader).items()}
        for key in ("multi_image_max_pixels", "video_max_pixels", "min_frames", "max_frames", "fps"):
            if key in reader:
                value = reader.number(key) if key == "fps" else reader.integer(key)
                if found.setdefault(key, value) != value:
                    reader.problem(key, f"is {value}, the other file says {found[key]}")
    return Budgets(**found), problems


def _refuse(reader: Reader, patch_size: int, merge_size: int) -> None:
    """Adds a problem for everything that would make other pixels than the model's."""
    reader.refuse_unless("patch_size", patch_size, why="config.json says otherwise")
    reader.refuse_unless("merge_size", merge_size, why="config.json says otherwise")
    reader.refuse_unless("temporal_patch_size", 1, why="a unit is one frame")
    for key in ("image_mean", "image_std"):
        reader.refuse_unless(key, [0.5, 0.5, 0.5], why="pixels are (x - 127.5) / 127.5")
    reader.refuse_unless("resample", 3, why="pictures are resized bicubically")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames"):
        reader.refuse_unless(key, True, why="it is always done")
    for key in ("do_center_crop", "do_pad"):
        reader.refuse_unless(key, False, why="it is never done")
    if "rescale_factor" in reader and abs(reader.number("rescale_factor") - 1 / 255) > 1e-9:
        reader.problem("rescale_factor", f"is {shown(reader.raw('rescale_factor'))}, pixels are rescaled by 1/255")


def _bounds(reader: Reader) -> dict[str, int]:
    """Pixels of one image or frame, `min_pixels` and `max_pixels`, each where it is given under either name."""
    size = reader.section("size") if "size" in reader else Reader({})
    for key in ("height", "width"):
        size.refuse_unless(key, why="sizes are multiples of a factor, within bounds")
    found = {}
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        said = [place.integer(key) for place, key in ((reader, name), (size, edge)) if key in place]
        if len(set(said)) > 1:
            reader.problem(name, f"is {said[0]}, size.{edge} is {said[1]}")
        if said:
            found[name] = said[0]
    return found
