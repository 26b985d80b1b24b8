"""Opening a container, choosing its stream, reading its packets and frames. Runs in the sandbox's worker only.

The one place that calls PyAV's `open`: from memory, with one demuxer, on one thread, and no way to name another file.
What the frames mean (times, turns, which are wanted) is `chiasm.media.video`'s.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import av.error
from av.container import InputContainer
from av.stream import Discard, Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from chiasm.errors import InvalidRequest
from chiasm.media.open import too_many_pixels
from chiasm.media.sniff import DEMUXERS
from chiasm.media.types import Limits

# Decoders are attack surface. These are what cameras, phones, screen recorders and the web produce.
CODECS = frozenset(
    {
        *("h264", "hevc", "av1", "vp8", "vp9", "theora"),
        *("mpeg4", "mpeg1video", "mpeg2video", "h263", "flv1"),
        *("mjpeg", "prores", "dnxhd", "ffv1", "rawvideo"),
        *("vc1", "wmv1", "wmv2", "wmv3", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3"),
    }
)
_ENCRYPTED_TAGS = frozenset({"encv", "drmi"})


def failed(codec: str, got: int, claimed: int | None = None) -> InvalidRequest:
    """The refusal of a video of which too little could be decoded."""
    facts: dict[str, str | int | float | bool] = {"codec": codec, "frames_got": got}
    if claimed is not None:
        facts["frames_claimed"] = claimed
    of = "" if claimed is None else f" of {claimed}"
    return InvalidRequest("MEDIA_DECODE_FAILED", f"the video is damaged: {got}{of} frames decoded", facts=facts)


def _refuse_other_files(*_: Any, **__: Any) -> Any:
    raise PermissionError("a medium may not name another file")


@contextmanager
def open_clip(data: bytes, found: str, limits: Limits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """A container opened from memory by the one demuxer that its first bytes name, and its default video stream.

    Raises:
        InvalidRequest: MEDIA_DECODE_FAILED, NO_VIDEO_STREAM, MEDIA_UNSUPPORTED, MEDIA_TOO_LARGE.
    """
    try:
        container = av.open(
            io.BytesIO(data),
            mode="r",
            format=DEMUXERS[found],
            metadata_errors="replace",
            io_open=_refuse_other_files,
        )
    except MemoryError:
        raise
    except Exception as error:  # av.error.* of many kinds, UnicodeError, ValueError
        raise failed("unknown", 0) from error
    with container:
        stream = _default_stream(container)
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        _check_codec(stream)
        context = stream.codec_context
        # Slice threads have dead-locked beside other threads; one worker is one thread.
        context.thread_count = 1
        if context.width * context.height > limits.max_pixels:
            raise too_many_pixels(context.width * context.height, limits)
        yield container, stream


def moving(container: InputContainer) -> list[VideoStream]:
    # Cover art and chapter pictures are streams of type video; they are not the video.
    still = Disposition.attached_pic | Disposition.timed_thumbnails
    return [stream for stream in container.streams.video if not stream.disposition & still]


def _default_stream(container: InputContainer) -> VideoStream:
    streams = moving(container)
    if not streams:
        raise InvalidRequest("NO_VIDEO_STREAM", "the file has no video stream")
    return next((stream for stream in streams if stream.disposition & Disposition.default), streams[0])


def codec_name(stream: VideoStream) -> str:
    """The name of the stream's codec for people and programs, `unknown` where there is no decoder."""
    context: Any = stream.codec_context
    return "unknown" if context is None else str(context.codec.canonical_name)


def _check_codec(stream: VideoStream) -> None:
    context: Any = stream.codec_context
    codec = codec_name(stream)
    if context is not None and str(context.codec_tag) in _ENCRYPTED_TAGS:
        codec = "encrypted"
    if codec not in CODECS:
        raise InvalidRequest(
            "MEDIA_UNSUPPORTED", f"the video codec ({codec}) is not among those decoded", facts={"codec": codec}
        )


def unordered_clock(found: str, stream: VideoStream) -> bool:
    # AVI has no presentation times. With reordered frames the demuxer's are those of storage, and the order in which
    # the decoder gives frames out is the only true one; the clock is constant, so the n-th shown has the n-th time.
    return found == "avi" and bool(stream.codec_context.has_b_frames)


def packets(container: InputContainer, stream: VideoStream) -> Iterator[Any]:
    """Non-empty packets of the stream. A demuxer that gives up in the middle has reached the end of what there is."""
    demuxed = container.demux(stream)
    while True:
        try:
            packet = next(demuxed)
        except (StopIteration, EOFError):
            return
        except MemoryError:
            raise
        except av.error.FFmpegError:
            return
        if packet.size:
            yield packet


def frames(
    container: InputContainer, stream: VideoStream, limits: Limits, *, unordered: bool = False, dropped: list[int]
) -> Iterator[tuple[int, VideoFrame]]:
    """Decoded frames with their stamps, strictly increasing; the others are counted in `dropped[0]`.

    unordered: stamps are not looked at; 0, 1, 2, ... takes their place.
    """
    last: float = -math.inf
    shown = 0
    for frame in _decoded(container, stream):
        if frame.width * frame.height > limits.max_pixels:
            raise too_many_pixels(frame.width * frame.height, limits)
        if frame.is_corrupt:
            continue
        stamp = shown if unordered else frame.dts if frame.pts is None else frame.pts
        shown += 1
        if stamp is None or stamp <= last:
            dropped[0] += 1
            continue
        last = stamp
        yield stamp, frame


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    context = stream.codec_context
    coming = packets(container, stream)
    ended = False
    while not ended:
        packet = next(coming, None)
        ended = packet is None
        if packet is not None and packet.is_corrupt:
            continue
        try:
            frames = context.decode(packet)
        except MemoryError:
            raise
        except (av.error.FFmpegError, EOFError):  # one broken packet; what is missing is counted at the end
            continue
        yield from frames
