"""Videos to RGB frames with PyAV. Runs in the sandbox's worker only.

Times come from presentation time stamps, never from a frame rate; counts come from packets and decoded frames, never
from what a container claims. Only the default video stream is decoded, audio never. Colours become 8-bit RGB with the
matrix and range the stream names; nothing is tone-mapped or deinterlaced. Which frames are wanted is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from chiasm.errors import InvalidRequest
from chiasm.media.clip import codec_name, failed, frames, moving, open_clip, packets, unordered_clock
from chiasm.media.open import check_frames, check_seconds
from chiasm.media.types import Limits, Probed, Rgb

_QUARTER_TURNS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): 270, (-1, 0, 0, -1): 180, (0, -1, 1, 0): 90}


@dataclass(frozen=True, slots=True)
class Table:
    """The shown frames of a stream, from its packets.

    Attributes:
        stamps: strictly increasing presentation time stamps, in units of the stream's time base.
        tail: how long the last frame is shown, in the same units.
        counted: frame `i` is the `i`-th that the decoder gives out, because packets do not name it: either the stamps
            come from decoding, or the container has a clock but no order of presentation.
        dropped: frames whose stamp was not greater than the one before.
        cut: frames that the container's index places beyond the end of the file.
        damaged: packets that the container itself calls corrupt; they are not decoded.
    """

    stamps: tuple[int, ...]
    tail: int
    counted: bool = False
    dropped: int = 0
    cut: int = 0
    damaged: int = 0


def read_table(data: bytes, found: str, limits: Limits) -> Table:
    """Stamps of all shown frames, from packets; by decoding everything where packets carry none.

    Raises:
        InvalidRequest: as `open_clip`; NO_FRAMES, MEDIA_TOO_LARGE (frames, seconds), MEDIA_DECODE_FAILED.
    """
    with open_clip(data, found, limits) as (container, stream):
        stamps: dict[int, int] = {}
        seen = damaged = 0
        counted = False
        hidden_vp8 = codec_name(stream) == "vp8"
        unordered = unordered_clock(found, stream)
        for packet in packets(container, stream):
            if packet.is_discard:  # outside the edit list: decoded, never shown
                continue
            if packet.is_corrupt:
                damaged += 1
                continue
            if hidden_vp8 and not bytes(packet)[0] & 0x10:  # RFC 6386, 9.1: show_frame; a reference nobody sees
                continue
            seen += 1
            check_frames(seen, limits)
            stamp = packet.dts if unordered else packet.pts
            if stamp is None:
                counted = True
                break
            stamps[stamp] = packet.duration or 0
        if not counted:
            cut = 0
            if found == "mov,mp4":
                entries = stream.index_entries
                check_frames(len(entries), limits)
                cut = sum(entry.pos + entry.size > len(data) for entry in entries)
                if cut and len(entries) - cut < limits.min_decoded_share * len(entries):
                    raise failed(codec_name(stream), len(entries) - cut, len(entries))
            if not stamps:
                if damaged or cut:
                    raise failed(codec_name(stream), 0)
                raise InvalidRequest("NO_FRAMES", "the video stream holds no frames", facts={"found": found})
            ordered = sorted(stamps)
            table = Table(tuple(ordered), stamps[ordered[-1]], unordered, seen - len(ordered), cut, damaged)
            check_seconds(_seconds(stream, table), limits)
            return _with_tail(table)
    return _count(data, found, limits)


def _count(data: bytes, found: str, limits: Limits) -> Table:
    stamps: list[int] = []
    dropped = [0]
    with open_clip(data, found, limits) as (container, stream):
        for stamp, _ in frames(container, stream, limits, dropped=dropped):
            stamps.append(stamp)
            check_frames(len(stamps), limits)
            check_seconds((stamp - stamps[0]) * float(stream.time_base or 0), limits)
        if not stamps:
            raise failed(codec_name(stream), 0)
    return _with_tail(Table(tuple(stamps), 0, True, dropped[0]))


def _with_tail(table: Table) -> Table:
    """The last frame lasts as long as its packet says, or as long as the one before it."""
    stamps = table.stamps
    if table.tail > 0 or len(stamps) < 2:
        return table
    return Table(stamps, stamps[-1] - stamps[-2], table.counted, table.dropped, table.cut, table.damaged)


def _seconds(stream: VideoStream, table: Table) -> float:
    return (table.stamps[-1] - table.stamps[0] + table.tail) * float(stream.time_base or 0)


def _offsets(stream: VideoStream, table: Table) -> tuple[float, ...]:
    base = stream.time_base
    if base is None:
        raise failed(codec_name(stream), 0)
    first = table.stamps[0]
    return tuple((stamp - first) * base.numerator / base.denominator for stamp in table.stamps)


def probe(data: bytes, found: str, limits: Limits) -> Probed:
    """Size as shown, times of all frames, duration. Decodes one frame, or all where the container has no times.

    Raises:
        InvalidRequest: as `read_table`; MEDIA_UNSUPPORTED for a rotation that is not a quarter turn.
    """
    table = read_table(data, found, limits)
    with open_clip(data, found, limits) as (container, stream):
        flags = []
        if (streams := len(moving(container))) > 1:
            flags.append(f"video_streams={streams}")
        ratio = stream.sample_aspect_ratio
        if ratio and ratio != 1:
            flags.append(f"sample_aspect_ratio={ratio.numerator}:{ratio.denominator}")
        offsets = _offsets(stream, table)
        duration = _seconds(stream, table)
        first = next(frames(container, stream, limits, unordered=unordered_clock(found, stream), dropped=[0]), None)
        if first is None:
            raise failed(codec_name(stream), 0, len(offsets))
        turn = rotation(first[1])
    height, width = first[1].height, first[1].width
    if turn:
        flags.append("rotation_applied")
    if turn in (90, 270):
        height, width = width, height
    flags += [f"dropped_frames={table.dropped}"] if table.dropped else []
    flags += [f"damaged_packets={table.damaged}"] if table.damaged else []
    flags += ["truncated"] if table.cut or table.damaged else []
    return Probed("video", height, width, offsets, duration, found, True, len(offsets), tuple(flags))


def rotation(frame: VideoFrame) -> int:
    """Degrees counter-clockwise by which the display matrix turns the frame: 0, 90, 180 or 270.

    The matrix is nine 32-bit integers (ISO/IEC 14496-12, 8.2.2); of these the first two of the first two rows turn,
    mirror and scale. Scaling is ignored, as players do.

    Raises:
        InvalidRequest: MEDIA_UNSUPPORTED for any other angle and for mirrors.
    """
    side: Any = frame.side_data.get("DISPLAYMATRIX")
    if side is None:
        return 0
    a, b, _, c, d = (int(value) for value in np.frombuffer(bytes(side), "=i4", count=5))
    turn = _QUARTER_TURNS.get((_sign(a), _sign(b), _sign(c), _sign(d)))
    if turn is not None:
        return turn
    angle = round(-math.degrees(math.atan2(b, a)), 3) % 360
    mirrored = a * d - b * c < 0
    raise InvalidRequest(
        "MEDIA_UNSUPPORTED",
        f"the video is to be shown turned by {angle:g} degrees{' and mirrored' if mirrored else ''}; "
        "quarter turns are applied, others are not",
        facts={"rotation": angle, "mirrored": mirrored},
    )


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


@dataclass(slots=True)
class Ending:
    """What is known once `decode` has been read to its end."""

    got: int = 0
    size_changed: bool = False
    truncated: bool = False
    codec: str = "unknown"


def decode(
    data: bytes, found: str, indices: Sequence[int], limits: Limits, ending: Ending
) -> Iterator[tuple[int, float, Rgb]]:
    """The wanted frames in presentation order: (index, seconds from the first frame, (height, width, 3) uint8).

    Decodes forward from the start and stops as soon as the last wanted frame has come. Fewer frames than wanted may
    come; `ending.got` says how many.

    indices: strictly increasing, counted over the shown frames as `probe` lists them.

    Raises:
        InvalidRequest: as `probe`.
    """
    table = read_table(data, found, limits)
    ending.truncated = bool(table.cut or table.damaged)
    with open_clip(data, found, limits) as (container, stream):
        ending.codec = codec_name(stream)
        offsets = _offsets(stream, table)
        index_of = {stamp: index for index, stamp in enumerate(table.stamps)}
        wanted = {index for index in indices if index < len(offsets)}
        size: tuple[int, int] | None = None
        turn = 0
        decoded = frames(container, stream, limits, unordered=unordered_clock(found, stream), dropped=[0])
        for shown, (stamp, frame) in enumerate(decoded):
            check_frames(shown + 1, limits)
            if size is None:
                size = (frame.width, frame.height)
                turn = rotation(frame)
            index = shown if table.counted else index_of.get(stamp, -1)
            if index not in wanted:
                continue
            wanted.discard(index)
            ending.got += 1
            ending.size_changed |= (frame.width, frame.height) != size
            yield index, offsets[index], _to_rgb(frame, size, turn)
            if not wanted:
                return


def _to_rgb(frame: VideoFrame, size: tuple[int, int], turn: int) -> Rgb:
    rgb = frame.to_ndarray(format="rgb24", width=size[0], height=size[1], threads=1)
    return np.ascontiguousarray(np.rot90(rgb, turn // 90)) if turn else np.ascontiguousarray(rgb)
