"""Makes the pictures and videos that the media tests open. Nothing binary lies in the tree.

Pillow and PyAV write the common files; what neither can write (a PNG of a given depth, a container that lies about
itself) is put together or patched here byte by byte.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.stream import VideoStream
from PIL import Image

Rgb = npt.NDArray[np.uint8]


def scene(height: int = 24, width: int = 32, shift: int = 0) -> Rgb:
    """A smooth picture (height, width, 3) without symmetry, so that any turn or flip shows."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x + 2 * y + shift) % 256]
    return np.stack(planes, axis=2).astype(np.uint8)


def flat(height: int, width: int, colour: Sequence[int]) -> Rgb:
    """One colour everywhere, (height, width, 3)."""
    return np.broadcast_to(np.array(colour, np.uint8), (height, width, len(colour))).copy()


def save(picture: Image.Image | Rgb, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture file."""
    buffer = io.BytesIO()
    shown = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    shown.save(buffer, form, **options)
    return buffer.getvalue()


def exif(orientation: int) -> bytes:
    """An EXIF block that holds an orientation and nothing else; any 16-bit value."""
    return b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHHI", 0x0112, 3, 1, orientation, 0, 0)


# ------------------------------------------------------------------------------------------------------------- PNG


def chunk(kind: bytes, body: bytes, *, crc: int | None = None) -> bytes:
    """One PNG chunk."""
    checksum = zlib.crc32(kind + body) if crc is None else crc
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def ihdr(
    width: int, height: int, depth: int = 8, colour: int = 2, interlace: int = 0, *, crc: int | None = None
) -> bytes:
    """The header chunk. colour: 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGBA."""
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace), crc=crc)


PNG = b"\x89PNG\r\n\x1a\n"


def png(
    samples: npt.NDArray[Any],
    depth: int,
    colour: int,
    *,
    interlace: bool = False,
    before: bytes = b"",
    after: bytes = b"",
) -> bytes:
    """A PNG of any depth and colour type. samples: (height, width, channels) of values below 2 ** depth."""
    height, width, _ = samples.shape
    if interlace:  # Adam7: first row, first column, row step, column step
        passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    else:
        passes = [(0, 0, 1, 1)]
    lines = b""
    for top, left, down, right in passes:
        for row in samples[top::down, left::right]:
            if row.size:
                lines += b"\0" + _pack_row(row.reshape(-1), depth)
    head = ihdr(width, height, depth, colour, int(interlace))
    return PNG + head + before + chunk(b"IDAT", zlib.compress(lines)) + after + chunk(b"IEND", b"")


def _pack_row(values: npt.NDArray[Any], depth: int) -> bytes:
    if depth == 16:
        return values.astype(">u2").tobytes()
    bits = (values.astype(np.uint8)[:, None] >> np.arange(depth - 1, -1, -1)) & 1
    return np.packbits(bits.reshape(-1)).tobytes()


def bomb_png(width: int, height: int) -> bytes:
    """A small 1-bit PNG that claims, and truly holds where it can be written, very many pixels."""
    line = b"\0" + bytes((width + 7) // 8)
    packer = zlib.compressobj(9)
    body = packer.compress(line * min(height, 20_000)) + packer.flush()
    return PNG + ihdr(width, height, 1, 0) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def slow_jpeg(scans: int = 40_000, side: int = 1024) -> bytes:
    """A progressive JPEG whose last scan is repeated; each repetition is decoded over the whole picture."""
    data = save(Image.fromarray(scene(side, side)).convert("L"), "JPEG", quality=5, progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


# ----------------------------------------------------------------------------------------------------------- video


def video(
    frames: Iterable[Rgb],
    container: str = "mp4",
    codec: str = "mpeg4",
    *,
    stamps: Sequence[int] | None = None,
    time_base: Fraction = Fraction(1, 10),
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    adjust: Callable[[VideoStream], None] = lambda stream: None,
    tag: Callable[[av.VideoFrame], None] = lambda frame: None,
    audio: bool = False,
    twice: bool = False,
) -> bytes:
    """A video file of RGB frames (height, width, 3).

    stamps: presentation times in units of `time_base`; 0, 1, 2, ... by default. audio: a second of silence beside it.
    twice: a second video stream with the same frames in reverse brightness.
    """
    pictures = list(frames)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        streams = []
        for _ in range(1 + twice):
            stream: Any = output.add_stream(codec, rate=Fraction(1) / time_base, options=options or {})
            stream.height, stream.width = pictures[0].shape[:2]
            stream.pix_fmt = pix_fmt
            stream.codec_context.time_base = time_base
            adjust(stream)
            streams.append(stream)
        sound: Any = output.add_stream("aac", rate=16000) if audio else None
        for number, picture in enumerate(pictures):
            for which, stream in enumerate(streams):
                frame = av.VideoFrame.from_ndarray(255 - picture if which else picture, format="rgb24")
                frame.pts = number if stamps is None else stamps[number]
                frame.time_base = time_base
                tag(frame)
                output.mux(stream.encode(frame))
        for stream in streams:
            output.mux(stream.encode(None))
        if sound is not None:
            _silence(output, sound)
    return buffer.getvalue()


def steps(count: int, height: int = 48, width: int = 64) -> list[Rgb]:
    """`count` flat frames, each brighter than the one before (grey, 8 steps apart, from 16)."""
    return [flat(height, width, (16 + 8 * number % 224,) * 3) for number in range(count)]


def level(number: int) -> int:
    """The grey of frame `number` of `steps`."""
    return 16 + 8 * number % 224


def audio(container: str = "mp4", codec: str = "aac") -> bytes:
    """A file with half a second of silence and no picture."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        sound: Any = output.add_stream(codec, rate=16000)
        _silence(output, sound)
    return buffer.getvalue()


def _silence(output: Any, sound: Any) -> None:
    for number in range(8):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        frame.pts = number * 1024
        output.mux(sound.encode(frame))
    output.mux(sound.encode(None))


def box(kind: bytes, body: bytes) -> bytes:
    """One box of an ISO base media file."""
    return struct.pack(">I", 8 + len(body)) + kind + body


def with_matrix(mp4: bytes, a: float, b: float, c: float, d: float) -> bytes:
    """The same MP4 with another display matrix in the header of its first track (16.16 fixed point)."""
    at = mp4.index(b"tkhd") + 4
    at += 40 if mp4[at] == 0 else 52
    fixed = [round(value * 65536) for value in (a, b, 0, c, d, 0, 0, 0)]
    return mp4[:at] + struct.pack(">8i", *fixed) + mp4[at + 32 :]


def index_first(mp4: bytes) -> bytes:
    """The same MP4 with its index in front of its data, as files for the web are. At most one chunk table a track."""
    at, boxes = 0, {}
    while at < len(mp4):
        size = int.from_bytes(mp4[at : at + 4], "big")
        boxes[mp4[at + 4 : at + 8]] = mp4[at : at + size]
        at += size
    moov = bytearray(boxes.pop(b"moov"))
    at = moov.find(b"stco")
    while at > 0:
        (count,) = struct.unpack(">I", moov[at + 8 : at + 12])
        table = struct.unpack(f">{count}I", moov[at + 12 : at + 12 + 4 * count])
        moov[at + 12 : at + 12 + 4 * count] = struct.pack(f">{count}I", *(entry + len(moov) for entry in table))
        at = moov.find(b"stco", at + 4)
    return boxes.pop(b"ftyp") + bytes(moov) + b"".join(boxes.values())


def jpegs(data: bytes) -> list[int]:
    """Where in a file of motion JPEG its pictures begin."""
    return [at for at in range(len(data)) if data.startswith(b"\xff\xd8\xff", at)]


def without(data: bytes, numbers: Iterable[int]) -> bytes:
    """A file of motion JPEG in which some pictures are overwritten with zeros."""
    starts = [*jpegs(data), len(data)]
    torn = bytearray(data)
    for number in numbers:
        end = data.rindex(b"\xff\xd9", starts[number], starts[number + 1])
        torn[starts[number] : end] = bytes(end - starts[number])
    return bytes(torn)
