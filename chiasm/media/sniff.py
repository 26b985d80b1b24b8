"""What is this? Formats are named by their first bytes, never by what the client or a file name says.

Arithmetic on bytes: no decoder, no Pillow, no PyAV. Nothing here refuses anything; that is `chiasm.media.open`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Group: TypeAlias = Literal["image", "video", "audio", "other"]

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


def may_move(name: str, data: bytes) -> bool:
    """Whether a picture file of format `name` says it is an animation. A GIF always may be: it is one by nature."""
    if name == "PNG":
        return 0 <= data.find(b"acTL") < data.find(b"IDAT")
    if name == "WEBP":
        return data[12:16] == b"VP8X" and len(data) > 20 and bool(data[20] & 0x02)
    return name == "GIF"


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
