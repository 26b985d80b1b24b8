"""What the processor files of a checkpoint may say, whichever family reads them. No torch.

`preprocessor_config.json` rules images and `video_preprocessor_config.json` videos. Which budgets there are is the
family's; here are the names that pixels go by, and everything that would make other pixels than Chiasm makes.
"""

from __future__ import annotations

from chiasm.models.reading import Reader, shown

IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"

RESIZE = "torch uint8 bicubic antialias"
"""The kernel that resizes. Pillow's differs by up to 9 grey levels, so the kernel is part of an entry's identity."""

PIXEL_NAMES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Names of pixels of one image or frame, and what Hugging Face calls them in `size`."""

NORMALISE = "(x-127.5)/127.5"


def refuse_other_pixels(
    reader: Reader, *, patch_size: int, merge_size: int, temporal_patch_size: int, unit: str
) -> None:
    """Adds a problem for everything that would make other pixels than the model's.

    Args:
        unit: what a unit is, for people: why no other temporal patch will do.
    """
    reader.refuse_unless("patch_size", patch_size, why="config.json says otherwise")
    reader.refuse_unless("merge_size", merge_size, why="config.json says otherwise")
    reader.refuse_unless("temporal_patch_size", temporal_patch_size, why=f"a unit is {unit}")
    for key in ("image_mean", "image_std"):
        reader.refuse_unless(key, [0.5, 0.5, 0.5], why="pixels are (x - 127.5) / 127.5")
    reader.refuse_unless("resample", 3, why="pictures are resized bicubically")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames"):
        reader.refuse_unless(key, True, why="it is always done")
    for key in ("do_center_crop", "do_pad"):
        reader.refuse_unless(key, False, why="it is never done")
    if "rescale_factor" in reader and abs(reader.number("rescale_factor") - 1 / 255) > 1e-9:
        reader.problem("rescale_factor", f"is {shown(reader.raw('rescale_factor'))}, pixels are rescaled by 1/255")


def pixel_bounds(reader: Reader) -> dict[str, int | float]:
    """Pixels of one image or frame, `min_pixels` and `max_pixels`, each where it is given under either name."""
    size = reader.section("size") if "size" in reader else Reader({})
    for key in ("height", "width"):
        size.refuse_unless(key, why="sizes are multiples of a factor, within bounds")
    found = {}
    for name, edge in PIXEL_NAMES.items():
        said = [value for value in (known_value(reader, name), known_value(size, edge)) if value is not None]
        if len(set(said)) > 1:
            reader.problem(name, f"is {said[0]}, size.{edge} is {said[1]}")
        if said:
            found[name] = said[0]
    return found


def known_value(reader: Reader, key: str) -> int | float | None:
    """A count, or the rate `fps`. None where it is absent, and where it is a problem."""
    if key not in reader:
        return None
    known = len(reader.problems)
    value = reader.number(key) if key == "fps" else reader.integer(key)
    return value if len(reader.problems) == known else None
