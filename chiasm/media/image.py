"""Still pictures to RGB with Pillow. Runs in the sandbox's worker only.

What is altered is said in flags, what is ignored is named here: colour profiles are not applied, metadata other than
the orientation is not looked at. Knows nothing of a model's sizes; every size comes out as it went in.
"""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image, WebPImagePlugin  # noqa: F401  (Pillow looks for readers among the imported plugins)

from chiasm.errors import InvalidRequest
from chiasm.media import animation
from chiasm.media.open import too_many_pixels
from chiasm.media.types import Limits, Probed, Rgb

# The size is checked against `Limits.max_pixels` at every place where a size becomes known.
Image.MAX_IMAGE_PIXELS = None

_ORIENTATION = 0x0112
# A PNG may carry these behind its pixels, where they are seen only once all of it has been read.
_LATE_METADATA = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")


def failed(found: str) -> InvalidRequest:
    """The refusal of a picture that its reader could not read to the end."""
    return InvalidRequest("MEDIA_DECODE_FAILED", f"the {found} file is damaged or cut short", facts={"found": found})


def open_picture(data: bytes, found: str, limits: Limits) -> Image.Image:
    """The picture with its header read and its pixels not. The only `Image.open` of the library.

    Raises:
        InvalidRequest: MEDIA_DECODE_FAILED, MEDIA_TOO_LARGE.
    """
    try:
        picture = Image.open(io.BytesIO(data), formats=[found])
    except (MemoryError, InvalidRequest):
        raise
    except Exception as error:  # readers raise OSError, SyntaxError, ValueError, struct.error, IndexError and more
        raise failed(found) from error
    check_size(picture, limits)
    return picture


def check_size(picture: Image.Image, limits: Limits) -> None:
    """Raises MEDIA_TOO_LARGE. To be called before pixels are read, and again where a later frame may be larger."""
    if picture.width * picture.height > limits.max_pixels:
        raise too_many_pixels(picture.width * picture.height, limits)


def probe(data: bytes, found: str, limits: Limits) -> Probed:
    """Size as shown and number of pictures in the file, from headers alone.

    Raises:
        InvalidRequest: MEDIA_DECODE_FAILED, MEDIA_TOO_LARGE.
    """
    picture = open_picture(data, found, limits)
    turned = _orientation(picture, data, found)
    height, width = (picture.width, picture.height) if turned >= 5 else (picture.height, picture.width)
    flags = ["orientation_applied"] if turned > 1 else []
    frames_in_file = 1
    animated = False
    if picture.format == "MPO":
        # Several exposures or a depth map of one shot. Pillow calls it animated; it is a still picture.
        frames_in_file = int(getattr(picture, "n_frames", 1))
        flags.append("multi_picture")
    elif (track := animation.track(found, data, limits)) is not None:
        frames_in_file = max(1, len(track.seconds))
        animated = frames_in_file > 1
    return Probed("image", height, width, (0.0,), 0.0, found, animated, frames_in_file, tuple(flags))


def decode(data: bytes, found: str, limits: Limits) -> tuple[Rgb, tuple[str, ...]]:
    """The first picture of a file as shown: oriented, on white, 8 bits. Returns ((height, width, 3) uint8, flags).

    Raises:
        InvalidRequest: MEDIA_DECODE_FAILED, MEDIA_TOO_LARGE.
    """
    picture = open_picture(data, found, limits)
    turned = _orientation(picture, data, found)
    try:
        picture.load()
        check_size(picture, limits)
        rgb = to_rgb(picture, data)
    except (MemoryError, InvalidRequest):
        raise
    except Exception as error:
        raise failed(found) from error
    return orient(rgb, turned), (("orientation_applied",) if turned > 1 else ())


def _orientation(picture: Image.Image, data: bytes, found: str) -> int:
    """EXIF orientation 1 to 8. Whatever cannot be read or is out of range means 1, as viewers do."""
    try:
        if found == "PNG":
            pixels = data.find(b"IDAT")
            if any(data.find(mark, pixels) > 0 for mark in _LATE_METADATA):
                picture.load()
            # Not PngImageFile.getexif: that one reads all pixels when no orientation came before them.
            exif = Image.Image.getexif(picture)
        else:
            exif = picture.getexif()
        turned = exif.get(_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # damaged metadata never spoils a good picture; damaged pixels fail when they are read
        return 1
    return turned if isinstance(turned, int) and 1 <= turned <= 8 else 1


def orient(rgb: Rgb, orientation: int) -> Rgb:
    """`rgb` (height, width, 3) turned as the EXIF orientation says; 5 to 8 swap height and width. C-contiguous."""
    if orientation >= 5:
        rgb = rgb.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        rgb = rgb[::-1]
    if orientation in (2, 3, 6, 7):
        rgb = rgb[:, ::-1]
    return np.ascontiguousarray(rgb)


def to_rgb(picture: Image.Image, data: bytes) -> Rgb:
    """A loaded picture of any mode the allowed readers give, as (height, width, 3) uint8 on white.

    data: the file, whose PNG header tells how deep a transparent colour was written.
    """
    if picture.mode.startswith("I;16"):
        return _from_16_bit(np.asarray(picture), picture.info.get("transparency"))
    if picture.mode in ("I", "F"):
        raise ValueError("a picture without a known range")
    _mend_colour_key(picture, data)
    if picture.has_transparency_data:
        # Straight to RGB would show the colours hidden under alpha, which no viewer does.
        shown = picture if picture.mode == "RGBA" else picture.convert("RGBA")
        canvas = Image.new("RGB", shown.size, (255, 255, 255))
        canvas.paste(shown, mask=shown.getchannel("A"))
        return np.array(canvas)
    return np.array(picture if picture.mode == "RGB" else picture.convert("RGB"))


def _from_16_bit(grey: npt.NDArray[np.generic], key: object) -> Rgb:
    """The high byte of each value (Pillow's own conversion saturates above 255); the key colour becomes white."""
    high = (grey.astype(np.uint16) >> 8).astype(np.uint8)
    if isinstance(key, int):
        high[grey == key] = 255
    return np.repeat(high[:, :, None], 3, axis=2)


def _mend_colour_key(picture: Image.Image, data: bytes) -> None:
    """A PNG writes its transparent colour in the file's own depth; Pillow compares it with 8-bit values."""
    key = picture.info.get("transparency")
    if picture.format != "PNG" or len(data) < 26:
        return
    depth = data[24]
    if picture.mode == "L" and isinstance(key, int):
        picture.info["transparency"] = (key % 2**depth) * 255 // (2**depth - 1)
    elif picture.mode == "RGB" and isinstance(key, tuple):
        picture.info["transparency"] = tuple(value >> 8 if depth == 16 else value & 0xFF for value in key)
