"""What callers hold in their hands (paths, files, Pillow images, arrays) to bytes: an encoded file, or raw pixels.

Pillow is never loaded by this module: an image of Pillow is only there when Pillow is. Pixels are copied and their axes
ordered; nothing is scaled, guessed or cast, because a server that was given wrong pixels would answer all the same.
Knows no protobuf and no request.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from chiasm.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

Layout: TypeAlias = Literal["HW", "HWC", "CHW"]

CHANNELS = (1, 3, 4)
"""Grey, RGB, RGBA."""

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA"})
_WITH_ALPHA = frozenset({"PA", "La", "RGBa"})


@dataclass(frozen=True, slots=True)
class Raw:
    """Pixels: `height * width * channels` bytes, rows from the top, channels last."""

    data: bytes
    height: int
    width: int
    channels: int


def is_pillow(source: object) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(source, pillow.Image)


def take(source: Any) -> Any:
    """`source` as it is kept: file objects read, `data:` URIs decoded, text as a path; bytes, Pillow images and arrays
    as they are.

    Raises InvalidRequest MEDIA_DECODE_FAILED for broken base64, Unsupported for an address, TypeError for the rest.
    """
    if isinstance(source, str):
        if source.startswith("data:"):
            return _from_data_uri(source)
        if source.startswith(("http://", "https://")):
            raise Unsupported(
                "FEATURE_DISABLED", "media are not fetched from addresses: download the file and give its path or bytes"
            )
        return Path(source)
    if isinstance(source, bytes | bytearray | memoryview | os.PathLike) or is_pillow(source):
        return source
    if hasattr(source, "read"):
        data = source.read()
        if not isinstance(data, bytes):
            raise TypeError("a file object must be opened for reading bytes (mode 'rb')")
        return data
    if hasattr(source, "__array__"):
        return source
    raise TypeError(
        f"a medium is a path, bytes, a file object, a Pillow image or an array, not {type(source).__name__}"
    )


def check(source: Any, layout: Layout | None) -> None:
    """Whether a picture that was taken can be sent at all. Raises InvalidRequest as `Image` says."""
    if is_pillow(source):
        _check_mode(source)
    elif hasattr(source, "__array__") and not isinstance(source, os.PathLike):
        _axes(np.asarray(source), layout)
        return
    if layout is not None:
        raise InvalidRequest("FRAME_LAYOUT", "layout orders the axes of an array; files and Pillow images have none")


def encoded(source: Any, layout: Layout | None = None, *, limit: int | None) -> bytes | Raw:
    """The bytes of a source that was taken: those of a file, a PNG of a Pillow image, the pixels of an array.

    Raises:
        InvalidRequest: MEDIA_EMPTY; MEDIA_TOO_LARGE above `limit` bytes (None: no limit), found before a file is read;
            MEDIA_DECODE_FAILED if Pillow cannot read its own image to the end.
        OSError: for a path that cannot be read.
    """
    if isinstance(source, os.PathLike):
        path = Path(source)
        check_bytes(path.stat().st_size, limit)
        data = path.read_bytes()
    elif is_pillow(source):
        data = _original(source) or _png(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    else:
        return _raw(np.asarray(source), layout)
    check_bytes(len(data), limit)
    return data


def check_bytes(size: int, limit: int | None = None) -> None:
    """Raises InvalidRequest MEDIA_EMPTY, MEDIA_TOO_LARGE."""
    if not size:
        raise InvalidRequest("MEDIA_EMPTY", "the medium has no bytes")
    if limit is not None and size > limit:
        raise InvalidRequest(
            "MEDIA_TOO_LARGE",
            f"the medium has {size} bytes, a request takes {limit}; upload it",
            facts={"bytes": size, "limit": limit},
        )


def size_of(source: Any) -> int:
    """Bytes that `encoded` will make of a source that was taken, at most, told without reading or packing it.

    Raises OSError for a path that is not there.
    """
    if isinstance(source, os.PathLike):
        return Path(source).stat().st_size
    if is_pillow(source):
        # A PNG is hardly ever larger than its pixels.
        return int(source.width * source.height * len(source.getbands()))
    return len(source) if isinstance(source, bytes | bytearray) else np.asarray(source).nbytes


def shape_of(source: Any, layout: Layout | None) -> tuple[int, int, int] | None:
    """(height, width, channels) of what `encoded` makes raw pixels of; None for what becomes a file."""
    if isinstance(source, os.PathLike | bytes | bytearray | memoryview) or is_pillow(source):
        return None
    array = np.asarray(source)
    told = _axes(array, layout)
    height, width = (array.shape[told.index(axis)] for axis in "HW")
    return height, width, array.shape[told.index("C")] if "C" in told else 1


def describe(source: Any) -> str:
    """A source in few words, never its bytes."""
    if isinstance(source, os.PathLike):
        return repr(os.fspath(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return f"{len(source)} bytes"
    if is_pillow(source):
        return f"Pillow {source.mode} {source.width}x{source.height}"
    return f"array {tuple(source.shape)}" if hasattr(source, "shape") else type(source).__name__


def _from_data_uri(uri: str) -> bytes:
    head, _, body = uri.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("a data URI that is not base64")
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            "MEDIA_DECODE_FAILED", "the data URI is not valid base64", facts={"cause": "base64"}
        ) from None


# -- arrays ------------------------------------------------------------------------------------------------------------


def _axes(array: npt.NDArray[Any], layout: Layout | None) -> Layout:
    """The order of an array's axes, given or unmistakable."""
    if array.dtype != np.uint8:
        hint = "; scale it to 0...255 and give uint8" if array.dtype.kind == "f" else ""
        raise InvalidRequest(
            "FRAME_LAYOUT", f"an array of {array.dtype}, uint8 is taken{hint}", facts={"dtype": str(array.dtype)}
        )
    shape = array.shape
    told: Layout
    if layout is not None:
        told = layout
    elif len(shape) == 2:
        told = "HW"
    elif len(shape) == 3:
        last, first = shape[2] in CHANNELS, shape[0] in CHANNELS
        if last and first:
            raise _layout_error(shape, "could be HWC or CHW: say layout='HWC' or layout='CHW'")
        told = "CHW" if first else "HWC"
    else:
        raise _layout_error(shape, "is no picture; several are given as Frames")
    if told not in ("HW", "HWC", "CHW") or len(shape) != len(told):
        raise _layout_error(shape, f"does not fit layout {told!r}")
    channels = 1 if told == "HW" else shape[told.index("C")]
    if channels not in CHANNELS:
        raise _layout_error(shape, f"has {channels} channels; 1 (grey), 3 (RGB) or 4 (RGBA) are taken")
    height, width = shape[told.index("H")], shape[told.index("W")]
    if height < 1 or width < 1:
        raise InvalidRequest(
            "FIELD_OUT_OF_RANGE",
            f"an array of {height} x {width} pixels; both must be at least 1",
            facts={"height": height, "width": width, "limit": 1},
        )
    return told


def _raw(array: npt.NDArray[Any], layout: Layout | None) -> Raw:
    told = _axes(array, layout)
    if told == "HW":
        array = array[:, :, None]
    elif told == "CHW":
        array = array.transpose(1, 2, 0)
    height, width, channels = array.shape
    return Raw(array.tobytes(order="C"), height, width, channels)


def _layout_error(shape: tuple[int, ...], what: str) -> InvalidRequest:
    text = " x ".join(map(str, shape))
    return InvalidRequest("FRAME_LAYOUT", f"an array of shape {text or '()'} {what}", facts={"shape": text})


# -- Pillow ------------------------------------------------------------------------------------------------------------


def _check_mode(image: PilImage) -> None:
    if image.mode in ("I", "F"):
        raise InvalidRequest(
            "FRAME_LAYOUT",
            f"a Pillow image of mode {image.mode}, whose range nobody knows; scale it to 0...255 and convert it to L",
            facts={"mode": image.mode},
        )


def _original(image: PilImage) -> bytes | None:
    """The file that an image was opened from, if the image still has it and is still what the file says."""
    from PIL import Image

    file = getattr(image, "fp", None)
    if image.format not in ("JPEG", "PNG", "WEBP") or file is None or not getattr(image, "tile", None):
        return None  # loaded: its pixels may have been drawn over
    if getattr(image, "is_animated", False):
        return None  # it may stand at another picture than its first
    try:
        position = file.tell()
        file.seek(0)
        data = file.read()
        file.seek(position)
        with Image.open(io.BytesIO(data)) as again:
            same = (again.format, again.mode, again.size) == (image.format, image.mode, image.size)
    except (OSError, ValueError, SyntaxError):
        return None
    return bytes(data) if same else None


def _png(image: PilImage) -> bytes:
    from PIL import Image, ImageOps

    _check_mode(image)
    try:
        shown = ImageOps.exif_transpose(image)
        if shown.mode.startswith("I;16"):
            shown = Image.fromarray(_high_byte(np.asarray(shown), shown.info.get("transparency")))
        elif shown.mode not in _PNG_MODES:
            shown = shown.convert("RGBA" if shown.mode in _WITH_ALPHA else "RGB")
        file = io.BytesIO()
        shown.save(file, format="PNG", compress_level=1, icc_profile=None)
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidRequest("MEDIA_DECODE_FAILED", "Pillow could not read the image to its end") from error
    return file.getvalue()


def _high_byte(grey: npt.NDArray[Any], key: object) -> npt.NDArray[np.uint8]:
    """16-bit grey to 8 bits as the server does it, the transparent value white. Pillow's own conversion saturates."""
    high = (grey.astype(np.uint16) >> 8).astype(np.uint8)
    if isinstance(key, int):
        high[grey == key] = 255
    return high
