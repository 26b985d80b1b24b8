"""GIF, WebP and PNG as a series of timed pictures.

Times come from walking the file's own blocks, without decoding; pixels come from Pillow, which composites partial
frames on the canvas. Pillow is imported where it is used, so that walking needs nothing but bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chiasm.media.types import Limits, Rgb

# What viewers do with a frame that says it is shown for no time at all.
_UNTIMED_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Track:
    """The timing of an animation.

    Attributes:
        seconds: how long each frame is shown; never 0.
        skip: pictures in the file before the first frame (a PNG may hold a still for viewers that cannot animate).
        untimed: some frame had no duration and got a tenth of a second.
    """

    seconds: tuple[float, ...]
    skip: int = 0
    untimed: bool = False

    def offsets(self) -> tuple[float, ...]:
        """Seconds from the start of the first frame to the start of each."""
        at = 0.0
        starts = []
        for seconds in self.seconds:
            starts.append(at)
            at += seconds
        return tuple(starts)


def track(found: str, data: bytes, limits: Limits) -> Track | None:
    """The timing of a GIF, WebP or PNG file; None for other formats.

    A still PNG or WebP has no frames. Counting stops one past `limits.max_video_frames`. A file that is cut is walked
    as far as it goes: whether the frames can be decoded is for the decoder to find out.
    """
    walkers = {"GIF": _gif, "WEBP": _webp, "PNG": _png}
    if found not in walkers:
        return None
    delays: list[float] = []
    skip = 0
    for delay in walkers[found](data):
        if delay is None:
            skip = 1
            continue
        delays.append(delay)
        if len(delays) > limits.max_video_frames:
            break
    seconds = tuple(delay if delay > 0 else _UNTIMED_SECONDS for delay in delays)
    return Track(seconds, skip, untimed=any(delay <= 0 for delay in delays))


def _gif(data: bytes) -> Iterator[float | None]:
    def after_table(flags: int) -> int:
        return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0

    def after_blocks(at: int) -> int:
        while at < len(data) and data[at]:
            at += data[at] + 1
        return at + 1

    if len(data) < 13:
        return
    at = 13 + after_table(data[10])
    delay = 0.0
    while at + 1 < len(data):
        if data[at] == 0x21:
            if data[at + 1] == 0xF9 and at + 6 < len(data):
                delay = int.from_bytes(data[at + 4 : at + 6], "little") / 100
            at = after_blocks(at + 2)
        elif data[at] == 0x2C and at + 9 < len(data):
            yield delay
            delay = 0.0
            at = after_blocks(at + 10 + after_table(data[at + 9]) + 1)
        elif data[at] == 0x00:  # stray terminators between blocks are common and skipped by every reader
            at += 1
        else:
            return


def _webp(data: bytes) -> Iterator[float | None]:
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"ANMF" and at + 23 <= len(data):
            yield int.from_bytes(data[at + 20 : at + 23], "little") / 1000
        at += 8 + size + (size & 1)


def _png(data: bytes) -> Iterator[float | None]:
    """Yields None first when the still picture of the file is not a frame of its animation."""
    at = 8
    frames = 0
    animated = False
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 8]
        if kind == b"acTL":
            animated = True
        elif kind == b"IDAT" and frames == 0 and animated:
            yield None
            animated = False
        elif kind == b"fcTL" and size == 26 and at + 34 <= len(data):
            frames += 1
            numerator = int.from_bytes(data[at + 28 : at + 30], "big")
            denominator = int.from_bytes(data[at + 30 : at + 32], "big") or 100
            yield numerator / denominator
        at += 12 + size


def play(
    data: bytes, found: str, timing: Track, indices: Sequence[int], limits: Limits
) -> Iterator[tuple[int, Rgb, bool]]:
    """The wanted frames, in order: (index, (height, width, 3) uint8, whether it was scaled to the first frame's size).

    Stops at the first frame that cannot be decoded, because each may build on the one before.

    Raises:
        InvalidRequest: MEDIA_DECODE_FAILED when the file cannot even be opened, MEDIA_TOO_LARGE.
    """
    from chiasm.errors import InvalidRequest
    from chiasm.media import image

    picture = image.open_picture(data, found, limits)
    size = picture.size
    for index in indices:
        try:
            picture.seek(index + timing.skip)
            image.check_size(picture, limits)
            picture.load()
            image.check_size(picture, limits)
            shown = picture if picture.size == size else picture.convert("RGBA").resize(size)
            rgb = image.to_rgb(shown, data)
        except (MemoryError, InvalidRequest):
            raise
        except Exception:  # counted by the caller as frames that did not come
            return
        yield index, rgb, shown is not picture
