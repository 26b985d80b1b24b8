"""The one choke point for media: what is it, and may it be this large?

Every medium of every request passes `check` before anything is parsed, whichever way it came: it counts bytes and
listed frames, looks at the layout of raw frames and at the times, names the format by its first bytes and reads the
size a picture claims out of its header. All of it is arithmetic on bytes: no decoder, no Pillow, no PyAV, no process.
What a container claims is checked here only to refuse early; the decoders count again while they decode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from chiasm.errors import InvalidRequest
from chiasm.media.types import Kind, Limits, MediaSource, RawFrame

Group: TypeAlias = Literal["image", "video", "audio", "other"]

# Times above this many seconds (about 30 years) are a unit mistaken or an attack, not a recording.
MAX_OFFSET = 1e9

# FFmpeg's demuxer for each container that is ever opened, by the name reported as `found`. Nothing is probed: a
# playlist or a reference format can only be opened by its own demuxer, and none of those is here.
DEMUXERS = {
    "mov,mp4": "mov",
    "matroska,webm": "matroska",
    "avi": "avi",
    "asf": "asf",
    "mpegts": "mpegts",
    "mpeg": "mpeg",
    "flv": "flv",
}

# Pictures that may hold an animation and so may also be asked for as a video.
ANIMATED = frozenset({"GIF", "PNG", "WEBP"})

_ISO_IMAGE_BRANDS = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"heim": "HEIC",
    b"heis": "HEIC",
    b"hevc": "HEIC",
    b"hevx": "HEIC",
    b"mif1": "HEIF",
    b"msf1": "HEIF",
    b"jxl ": "JPEG XL",
}
_ISO_BOXES = frozenset({b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"moof", b"styp", b"sidx"})
_BMP_HEADER_SIZES = frozenset({12, 16, 40, 52, 56, 64, 108, 124})

_PREFIXES: tuple[tuple[bytes, Group, str], ...] = (
    (b"\xff\xd8\xff", "image", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "image", "PNG"),
    (b"GIF87a", "image", "GIF"),
    (b"GIF89a", "image", "GIF"),
    (b"\x1a\x45\xdf\xa3", "video", "matroska,webm"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "video", "asf"),
    (b"FLV\x01", "video", "flv"),
    (b"\x00\x00\x01\xba", "video", "mpeg"),
    (b"ID3", "audio", "MP3"),
    (b"fLaC", "audio", "FLAC"),
    (b"OggS", "audio", "Ogg"),
    (b"%!PS", "other", "EPS"),
    (b"\xc5\xd0\xd3\xc6", "other", "EPS"),
    (b"%PDF", "other", "PDF"),
    (b"SIMPLE  =", "other", "FITS"),
    (b"\xd7\xcd\xc6\x9a", "other", "WMF"),
    (b"8BPS", "other", "PSD"),
    (b"II*\x00", "other", "TIFF"),
    (b"MM\x00*", "other", "TIFF"),
    (b"II+\x00", "other", "TIFF"),
    (b"MM\x00+", "other", "TIFF"),
    (b"\x00\x00\x01\x00", "other", "ICO"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "other", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "other", "JPEG 2000"),
    (b"\xff\x0a", "other", "JPEG XL"),
    (b"#EXTM3U", "other", "HLS"),
    (b"ffconcat", "other", "concat"),
    (b"v=0\r\n", "other", "SDP"),
    (b"v=0\n", "other", "SDP"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What the first bytes say: a group, and the name of the format that is reported to the client."""

    group: Group
    name: str


def sniff(data: bytes) -> Found:
    """Names the format of `data` by its first bytes. Never fails: unknown content is `Found("other", "unknown")`."""
    head = data[:64]
    for prefix, group, name in _PREFIXES:
        if head.startswith(prefix):
            return Found(group, name)
    if head[:4] == b"RIFF" and len(head) >= 12:
        riff = {b"WEBP": Found("image", "WEBP"), b"AVI ": Found("video", "avi"), b"WAVE": Found("audio", "WAV")}
        return riff.get(head[8:12], Found("other", "unknown"))
    if head[4:8] == b"ftyp":
        if (still := _ISO_IMAGE_BRANDS.get(head[8:12])) is not None:
            return Found("other", still)
        return Found("video", "mov,mp4")
    if head[4:8] in _ISO_BOXES:
        return Found("video", "mov,mp4")
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADER_SIZES:
        return Found("image", "BMP")
    # Transport streams have a sync byte every 188 bytes, or 192 with a four-byte time stamp in front of each packet.
    for first, step in ((0, 188), (4, 192)):
        if len(data) > first + 2 * step and all(data[first + k * step] == 0x47 for k in range(3)):
            return Found("video", "mpegts")
    if len(head) >= 4 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06 and head[2] & 0xF0 != 0xF0:
        return Found("audio", "MP3" if head[1] & 0x06 == 0x02 else "MPEG audio")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"<svg") or (text.startswith(b"<?xml") and b"<svg" in data[:4096].lower()):
        return Found("other", "SVG")
    return Found("other", "unknown")


def check(source: MediaSource, limits: Limits) -> tuple[Found, ...]:
    """Everything that can be refused without parsing, cheapest first.

    Returns what was found for each encoded file of `source`: one for `data`, one per entry of `frames` (raw frames are
    `Found("image", "raw")`).

    Raises:
        InvalidRequest: MEDIA_EMPTY, NO_FRAMES, TOO_MANY_ITEMS, MEDIA_TOO_LARGE, FIELD_MISSING, FIELD_OUT_OF_RANGE,
            FRAME_LAYOUT, TIMESTAMPS_INVALID, MEDIA_UNSUPPORTED, MEDIA_TYPE_MISMATCH, NO_VIDEO_STREAM,
            MEDIA_DECODE_FAILED (a picture whose header says it has no pixels).
    """
    assert (source.data is None) != (source.frames is None), "exactly one of data and frames is set"
    if source.data is not None:
        assert source.offsets is None, "offsets belong to a list of frames"
        _check_bytes(len(source.data), limits)
        found = sniff(source.data)
        _check_kind(source.kind, found, source.data, limits)
        if found.group == "image":
            _check_claimed(found.name, source.data, limits)
        return (found,)
    return _check_list(source, limits)


def _check_bytes(size: int, limits: Limits) -> None:
    if size == 0:
        raise InvalidRequest("MEDIA_EMPTY", "The medium has no bytes.")
    if size > limits.max_bytes:
        raise InvalidRequest(
            "MEDIA_TOO_LARGE",
            f"The medium has {size} bytes, at most {limits.max_bytes} are taken.",
            facts={"bytes": size, "limit": limits.max_bytes},
        )


def _check_kind(kind: Kind, found: Found, data: bytes, limits: Limits) -> None:
    if found.group == "other" or (found.group == "image" and found.name not in limits.formats):
        raise unsupported(found.name)
    if kind == "image" and found.group != "image":
        raise _mismatch(kind, found)
    if kind == "video" and found.group == "audio":
        raise InvalidRequest("NO_VIDEO_STREAM", "The file has no video stream.", facts={"found": found.name})
    if kind == "video" and found.group == "image" and not may_move(found.name, data):
        raise _mismatch(kind, found)


def may_move(name: str, data: bytes) -> bool:
    """Whether a picture file of format `name` says it is an animation. A GIF always may be: it is one by nature."""
    if name == "PNG":
        return 0 <= data.find(b"acTL") < data.find(b"IDAT")
    if name == "WEBP":
        return data[12:16] == b"VP8X" and len(data) > 20 and bool(data[20] & 0x02)
    return name == "GIF"


def unsupported(found: str) -> InvalidRequest:
    """The refusal of a format that is not on the allow-list."""
    if found in ("HEIC", "HEIF"):
        message = f"{found} pictures are not read here: no reader for them is installed. Convert to JPEG or PNG."
        return InvalidRequest("MEDIA_UNSUPPORTED", message, facts={"found": found, "extra": "heif"})
    message = "The format is unknown." if found == "unknown" else f"{found} is not among the formats that are read."
    return InvalidRequest("MEDIA_UNSUPPORTED", message, facts={"found": found})


def _mismatch(kind: Kind, found: Found) -> InvalidRequest:
    return InvalidRequest(
        "MEDIA_TYPE_MISMATCH",
        f"The request says {kind}, the content is {found.name} ({found.group}).",
        facts={"declared": kind, "found": found.name},
    )


def too_many_pixels(pixels: int, limits: Limits) -> InvalidRequest:
    """The refusal of a picture or video frame with more than `limits.max_pixels` pixels."""
    return InvalidRequest(
        "MEDIA_TOO_LARGE",
        f"A picture has {pixels} pixels, at most {limits.max_pixels} are taken.",
        facts={"pixels": pixels, "limit": limits.max_pixels},
    )


def check_frames(count: int, limits: Limits) -> None:
    """Raises MEDIA_TOO_LARGE when a video has more frames than are counted at all."""
    if count > limits.max_video_frames:
        raise InvalidRequest(
            "MEDIA_TOO_LARGE",
            f"The video has {count} frames or more, at most {limits.max_video_frames} are taken.",
            facts={"frames": count, "limit": limits.max_video_frames},
        )


def check_seconds(seconds: float, limits: Limits) -> None:
    """Raises MEDIA_TOO_LARGE when a video lasts longer than is taken."""
    if not seconds <= limits.max_video_seconds:
        raise InvalidRequest(
            "MEDIA_TOO_LARGE",
            f"The video lasts {seconds:.3f} s or more, at most {limits.max_video_seconds:g} s are taken.",
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
            f"The picture claims {width} x {height} pixels.",
            facts={"width": width, "height": height},
        )
    if width * height > limits.max_pixels:
        raise too_many_pixels(width * height, limits)


def claimed_size(name: str, data: bytes) -> tuple[int, int] | None:
    """Width and height (pixels) that the header of a picture claims; None where it cannot be read cheaply.

    Read before any library sees the file, because some readers allocate the canvas while they open it.
    """
    if name == "PNG" and data[12:16] == b"IHDR" and len(data) >= 24:
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if name == "GIF" and len(data) >= 10:
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    if name == "BMP" and len(data) >= 26:
        if int.from_bytes(data[14:18], "little") == 12:
            return int.from_bytes(data[18:20], "little"), int.from_bytes(data[20:22], "little")
        width = int.from_bytes(data[18:22], "little", signed=True)
        return abs(width), abs(int.from_bytes(data[22:26], "little", signed=True))
    if name == "WEBP" and data[12:16] == b"VP8X" and len(data) >= 30:
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if name == "JPEG":
        return _jpeg_size(data)
    return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame header
            return int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big")
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _check_list(source: MediaSource, limits: Limits) -> tuple[Found, ...]:
    frames = source.frames
    assert frames is not None
    if not frames:
        raise InvalidRequest("NO_FRAMES", "The list of frames is empty.")
    limit = 1 if source.kind == "image" else limits.max_listed_frames
    if len(frames) > limit:
        raise InvalidRequest(
            "TOO_MANY_ITEMS",
            f"{len(frames)} frames are listed, at most {limit} are taken.",
            facts={"got": len(frames), "limit": limit},
        )
    sizes = [len(frame.data if isinstance(frame, RawFrame) else frame) for frame in frames]
    if sum(sizes) > limits.max_bytes:
        _check_bytes(sum(sizes), limits)
    _check_offsets(source, limits)
    found: list[Found] = []
    first: RawFrame | None = None
    for index, frame in enumerate(frames):
        try:
            if isinstance(frame, RawFrame):
                check_raw(frame, limits)
                found.append(Found("image", "raw"))
                first = first or frame
                check_same_size(index, (first.height, first.width), (frame.height, frame.width))
            else:
                _check_bytes(len(frame), limits)
                kind = sniff(frame)
                _check_kind("image", kind, frame, limits)
                _check_claimed(kind.name, frame, limits)
                found.append(kind)
        except InvalidRequest as error:
            error.facts.setdefault("index", index)
            raise
    return tuple(found)


def check_same_size(index: int, first: tuple[int, int], size: tuple[int, int]) -> None:
    """Raises FRAME_LAYOUT when listed frame `index` is not as large (height, width) as the first."""
    if size != first:
        raise InvalidRequest(
            "FRAME_LAYOUT",
            f"Frame {index} is {size[1]} x {size[0]} pixels, the first is {first[1]} x {first[0]}.",
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
            f"A raw frame of {width} x {height} pixels; both must be at least 1.",
            facts={"height": height, "width": width, "limit": 1},
        )
    if height * width > limits.max_pixels:
        raise too_many_pixels(height * width, limits)
    if channels not in (1, 3, 4):
        raise InvalidRequest(
            "FRAME_LAYOUT",
            f"A raw frame of {channels} channels; 1 (grey), 3 (RGB) or 4 (RGBA) are taken.",
            facts={"channels": channels},
        )
    expected = height * width * channels
    if len(frame.data) != expected:
        raise InvalidRequest(
            "FRAME_LAYOUT",
            f"{height} x {width} x {channels} takes {expected} bytes, {len(frame.data)} came.",
            facts={"expected": expected, "got": len(frame.data)},
        )


def _check_offsets(source: MediaSource, limits: Limits) -> None:
    frames, offsets = source.frames, source.offsets
    assert frames is not None
    if offsets is None:
        if source.kind == "image":
            return
        # A time that nobody gave would be invented, and the model would be told it as a fact.
        raise InvalidRequest(
            "FIELD_MISSING",
            "A list of frames needs a time for each of them.",
            facts={"field": "timestamps or fps"},
        )
    if len(offsets) != len(frames):
        raise InvalidRequest(
            "TIMESTAMPS_INVALID",
            f"{len(frames)} frames came with {len(offsets)} times.",
            facts={"frames": len(frames), "timestamps": len(offsets)},
        )
    last = -math.inf
    for index, offset in enumerate(offsets):
        if not (math.isfinite(offset) and offset >= 0 and offset > last):
            raise InvalidRequest(
                "TIMESTAMPS_INVALID",
                f"The time of frame {index} is not a finite number of at least 0 that is greater than the one before.",
                facts={"index": index},
            )
        if not offset <= MAX_OFFSET:
            raise InvalidRequest(
                "FIELD_OUT_OF_RANGE",
                f"The time of frame {index} is {offset:g} s, at most {MAX_OFFSET:g} s make sense.",
                facts={"index": index, "seconds": offset, "limit": MAX_OFFSET},
            )
        last = offset
    check_seconds(offsets[-1] - offsets[0], limits)
