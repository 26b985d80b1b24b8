"""The one choke point for media: what is it, and may it be this large?

Every file of every request passes `check` before it is parsed, whichever way it came: it counts bytes, names the format
by its first bytes and reads the size a picture claims out of its header. Lists of frames pass `check_list`, which looks
at count and times, and each raw frame `check_raw`. All of it is arithmetic on bytes: no decoder, no Pillow, no PyAV, no
process. What a container claims is checked here only to refuse early; the decoders count again while they decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from chiasm.errors import InvalidRequest
from chiasm.media.sniff import Found, claimed_size, may_move, sniff
from chiasm.media.types import Kind, Limits, MediaSource, RawFrame

# Times above this many seconds (about 30 years) are a unit mistaken or an attack, not a recording.
MAX_OFFSET = 1e9


def check(source: MediaSource, limits: Limits) -> Found:
    """Everything about a file that can be refused without parsing, cheapest first. Returns what was found.

    Raises:
        InvalidRequest: MEDIA_EMPTY, MEDIA_TOO_LARGE, MEDIA_UNSUPPORTED, MEDIA_TYPE_MISMATCH, NO_VIDEO_STREAM,
            MEDIA_DECODE_FAILED (a picture whose header says it has no pixels).
    """
    check_bytes(len(source.data), limits)
    found = sniff(source.data)
    _check_kind(source.kind, found, source.data, limits)
    if found.group == "image":
        _check_claimed(found.name, source.data, limits)
    return found


def check_bytes(size: int, limits: Limits) -> None:
    """Raises MEDIA_EMPTY, or MEDIA_TOO_LARGE for more than one medium may have."""
    if size == 0:
        raise InvalidRequest("MEDIA_EMPTY", "the medium has no bytes")
    if size > limits.max_bytes:
        raise InvalidRequest(
            "MEDIA_TOO_LARGE",
            f"the medium has {size} bytes, at most {limits.max_bytes} are taken",
            facts={"bytes": size, "limit": limits.max_bytes},
        )


def _check_kind(kind: Kind, found: Found, data: bytes, limits: Limits) -> None:
    if found.group == "other" or (found.group == "image" and found.name not in limits.formats):
        raise unsupported(found.name)
    if kind == "image" and found.group != "image":
        raise _mismatch(kind, found)
    if kind == "video" and found.group == "audio":
        raise InvalidRequest("NO_VIDEO_STREAM", "the file has no video stream", facts={"found": found.name})
    if kind == "video" and found.group == "image" and not may_move(found.name, data):
        raise _mismatch(kind, found)


def unsupported(found: str) -> InvalidRequest:
    """The refusal of a format that is not on the allow-list."""
    if found in ("HEIC", "HEIF"):
        message = f"{found} pictures are not read here, no reader for them is installed; convert to JPEG or PNG"
        return InvalidRequest("MEDIA_UNSUPPORTED", message, facts={"found": found, "extra": "heif"})
    message = "the format is unknown" if found == "unknown" else f"{found} is not among the formats that are read"
    return InvalidRequest("MEDIA_UNSUPPORTED", message, facts={"found": found})


def _mismatch(kind: Kind, found: Found) -> InvalidRequest:
    return InvalidRequest(
        "MEDIA_TYPE_MISMATCH",
        f"the request says {kind}, the content is {found.name} ({found.group})",
        facts={"declared": kind, "found": found.name},
    )


def too_many_pixels(pixels: int, limits: Limits) -> InvalidRequest:
    """The refusal of a picture or video frame with more than `limits.max_pixels` pixels."""
    return InvalidRequest(
        "MEDIA_TOO_LARGE",
        f"a picture has {pixels} pixels, at most {limits.max_pixels} are taken",
        facts={"pixels": pixels, "limit": limits.max_pixels},
    )


def check_frames(count: int, limits: Limits) -> None:
    """Raises MEDIA_TOO_LARGE when a video has more frames than are counted at all."""
    if count > limits.max_video_frames:
        raise InvalidRequest(
            "MEDIA_TOO_LARGE",
            f"the video has {count} frames or more, at most {limits.max_video_frames} are taken",
            facts={"frames": count, "limit": limits.max_video_frames},
        )


def check_seconds(seconds: float, limits: Limits) -> None:
    """Raises MEDIA_TOO_LARGE when a video lasts longer than is taken."""
    if not seconds <= limits.max_video_seconds:
        raise InvalidRequest(
            "MEDIA_TOO_LARGE",
            f"the video lasts {seconds:.3f} s or more, at most {limits.max_video_seconds:g} s are taken",
            facts={"seconds": seconds, "limit": limits.max_video_seconds},
        )


def _check_claimed(name: str, data: bytes, limits: Limits) -> None:
    size = claimed_size(name, data)
    if size is None:
        return
    width, height = size
    if width == 0 or height == 0:
        raise InvalidRequest(
            "MEDIA_DECODE_FAILED",
            f"the picture claims {width} x {height} pixels",
            facts={"width": width, "height": height},
        )
    if width * height > limits.max_pixels:
        raise too_many_pixels(width * height, limits)


def check_list(kind: Kind, count: int, offsets: Sequence[float] | None, limits: Limits) -> None:
    """Everything about a list of frames that can be refused before any of them has come.

    Args:
        count: frames that are listed.
        offsets: seconds of each; not needed for the one of an image.

    Raises:
        InvalidRequest: NO_FRAMES, TOO_MANY_ITEMS, FIELD_MISSING, TIMESTAMPS_INVALID, FIELD_OUT_OF_RANGE,
            MEDIA_TOO_LARGE (seconds).
    """
    if not count:
        raise InvalidRequest("NO_FRAMES", "the list of frames is empty")
    limit = 1 if kind == "image" else limits.max_listed_frames
    if count > limit:
        raise InvalidRequest(
            "TOO_MANY_ITEMS",
            f"{count} frames are listed, at most {limit} are taken",
            facts={"got": count, "limit": limit},
        )
    _check_offsets(kind, count, offsets, limits)


def check_same_size(index: int, first: tuple[int, int], size: tuple[int, int]) -> None:
    """Raises FRAME_LAYOUT when listed frame `index` is not as large (height, width) as the first."""
    if size != first:
        raise InvalidRequest(
            "FRAME_LAYOUT",
            f"frame {index} is {size[1]} x {size[0]} pixels, the first is {first[1]} x {first[0]}",
            facts={
                "index": index,
                "height": size[0],
                "width": size[1],
                "first_height": first[0],
                "first_width": first[1],
            },
        )


def check_raw(frame: RawFrame, limits: Limits) -> None:
    """Whether the bytes of a raw frame are what its layout says. Python integers: no product overflows.

    Raises:
        InvalidRequest: FIELD_OUT_OF_RANGE, MEDIA_TOO_LARGE, FRAME_LAYOUT.
    """
    height, width, channels = frame.height, frame.width, frame.channels
    if not (height >= 1 and width >= 1):
        raise InvalidRequest(
            "FIELD_OUT_OF_RANGE",
            f"a raw frame of {width} x {height} pixels, both must be at least 1",
            facts={"height": height, "width": width, "limit": 1},
        )
    if height * width > limits.max_pixels:
        raise too_many_pixels(height * width, limits)
    if channels not in (1, 3, 4):
        raise InvalidRequest(
            "FRAME_LAYOUT",
            f"a raw frame of {channels} channels; 1 (grey), 3 (RGB) or 4 (RGBA) are taken",
            facts={"channels": channels},
        )
    expected = height * width * channels
    if len(frame.data) != expected:
        raise InvalidRequest(
            "FRAME_LAYOUT",
            f"{height} x {width} x {channels} takes {expected} bytes, {len(frame.data)} came",
            facts={"expected": expected, "got": len(frame.data)},
        )


def _check_offsets(kind: Kind, count: int, offsets: Sequence[float] | None, limits: Limits) -> None:
    if offsets is None:
        if kind == "image":
            return
        # A time that nobody gave would be invented, and the model would be told it as a fact.
        raise InvalidRequest(
            "FIELD_MISSING",
            "a list of frames needs a time for each of them",
            facts={"field": "timestamps or fps"},
        )
    if len(offsets) != count:
        raise InvalidRequest(
            "TIMESTAMPS_INVALID",
            f"{count} frames came with {len(offsets)} times",
            facts={"frames": count, "timestamps": len(offsets)},
        )
    last = -math.inf
    for index, offset in enumerate(offsets):
        if not (math.isfinite(offset) and offset >= 0 and offset > last):
            raise InvalidRequest(
                "TIMESTAMPS_INVALID",
                f"the time of frame {index} is not a finite number of at least 0 that is greater than the one before",
                facts={"index": index},
            )
        if not offset <= MAX_OFFSET:
            raise InvalidRequest(
                "FIELD_OUT_OF_RANGE",
                f"the time of frame {index} is {offset:g} s, at most {MAX_OFFSET:g} s make sense",
                facts={"index": index, "seconds": offset, "limit": MAX_OFFSET},
            )
        last = offset
    check_seconds(offsets[-1] - offsets[0], limits)
