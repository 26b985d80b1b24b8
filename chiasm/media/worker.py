"""The process in which media are parsed: `python -m chiasm.media.worker <socket> <memory> <files>`.

It assumes that the next file takes it over. So it gives up what it can before it reads one: address space, new files,
child processes, core dumps, new privileges, the network where the kernel lets it; it dies with its parent, and a job
may use so much processor time and no more. It holds one job at a time and remembers nothing between two jobs.
Knows the formats through `image`, `animation` and `video`; never who asked, nor what for.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from chiasm.errors import Fact, InvalidRequest
from chiasm.media import framing
from chiasm.media.confine import arm, confine, disarm
from chiasm.media.open import check, check_frames, check_same_size, check_seconds
from chiasm.media.types import Decoded, Frame, Limits, MediaSource, Picture, Probed


def main(arguments: Sequence[str]) -> int:
    """Serves jobs from the socket until its other end is closed. Returns the exit status.

    That is `framing.UNCONFINED`, and nothing is read, where the kernel does not take what `confine` gives up.
    """
    descriptor, memory_bytes, open_files = (int(argument) for argument in arguments)
    try:
        confine(memory_bytes, open_files)
    except (OSError, ValueError):
        return framing.UNCONFINED
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as reader:
        while (job := _receive(reader)) is not None:
            _serve(connection, *job)
    return 0


def _receive(reader: BinaryIO) -> tuple[dict[str, Any], list[bytes]] | None:
    prefix = reader.read(framing.PREFIX.size)
    if len(prefix) < framing.PREFIX.size:
        return None
    header, sizes = framing.unpack(reader.read(framing.header_size(prefix)))
    parts = [reader.read(size) for size in sizes]
    return None if any(len(part) < size for part, size in zip(parts, sizes, strict=True)) else (header, parts)


def _serve(connection: socket.socket, job: dict[str, Any], parts: list[bytes]) -> None:
    limits = Limits(**{**job["limits"], "formats": frozenset(job["limits"]["formats"])})
    data, packed = parts
    source = MediaSource(job["kind"], data)
    arm(limits.cpu_seconds)
    try:
        if job["do"] == "probe":
            _send_probed(connection, probe(source, limits))
        elif job["do"] == "picture":
            first = job["first"] and (job["first"][0], job["first"][1])
            _send_picture(connection, picture(source, job["index"], first, limits))
        else:
            for event in decode(source, array("q", packed).tolist(), limits):
                _send(connection, event)
    except InvalidRequest as error:
        _send_error(connection, error.reason, error.message, error.facts)
    except MemoryError:
        _send_error(connection, *_OUT_OF_MEMORY)
    except OSError as error:
        if isinstance(error, (BrokenPipeError, ConnectionError)):
            raise
        _send_error(connection, *_UNREADABLE)
    except Exception:  # Pillow and PyAV raise whatever their parsers trip over; none of their words leave this process
        _send_error(connection, *_UNREADABLE)
    finally:
        disarm()


_OUT_OF_MEMORY: tuple[str, str, dict[str, Fact]] = (
    "MEDIA_DECODE_FAILED",
    "decoding took more memory than one medium may use",
    {"cause": "memory_limit"},
)
_UNREADABLE: tuple[str, str, dict[str, Fact]] = ("MEDIA_DECODE_FAILED", "the medium is damaged", {"cause": "damaged"})


def probe(source: MediaSource, limits: Limits) -> Probed:
    """What the headers say. Raises InvalidRequest, MemoryError, or whatever a parser raises."""
    found = check(source, limits)
    if source.kind == "image":
        from chiasm.media import image

        return image.probe(source.data, found.name, limits)
    if found.group == "image":
        return _probe_animation(source.data, found.name, limits)
    from chiasm.media import video

    return video.probe(source.data, found.name, limits)


def _probe_animation(data: bytes, found: str, limits: Limits) -> Probed:
    from chiasm.media import animation, image

    picture = image.open_picture(data, found, limits)
    timing = animation.track(found, data, limits)
    assert timing is not None
    check_frames(len(timing.seconds), limits)
    if not timing.seconds:
        raise InvalidRequest("NO_FRAMES", "the animation holds no frames", facts={"found": found})
    duration = sum(timing.seconds)
    check_seconds(duration, limits)
    flags = ("untimed_frames",) if timing.untimed else ()
    offsets = timing.offsets()
    return Probed("video", picture.height, picture.width, offsets, duration, found, True, len(offsets), flags)


def picture(source: MediaSource, index: int, first: tuple[int, int] | None, limits: Limits) -> Picture:
    """Frame `index` of a list, whose first is as large (height, width) as `first` says. Raises as `decode`."""
    from chiasm.media import image

    began = time.process_time()
    found = check(source, limits).name
    probed = image.probe(source.data, found, limits)
    size = (probed.height, probed.width)
    check_same_size(index, first or size, size)
    rgb, altered = image.decode(source.data, found, limits)
    return Picture(rgb, found, tuple(sorted({*probed.flags, *altered})), time.process_time() - began)


def decode(source: MediaSource, indices: Sequence[int], limits: Limits) -> Iterator[Frame | Decoded]:
    """The wanted frames one by one, then how it ended. Raises InvalidRequest, MemoryError, or what a parser raises."""
    found = check(source, limits)
    if source.kind == "image":
        from chiasm.media import image

        rgb, flags = image.decode(source.data, found.name, limits)
        yield Frame(0, 0.0, rgb)
        yield Decoded(1, False, flags)
    elif found.group == "image":
        yield from _decode_animation(source.data, found.name, indices, limits)
    else:
        yield from _decode_video(source.data, found.name, indices, limits)


def _decode_animation(data: bytes, found: str, indices: Sequence[int], limits: Limits) -> Iterator[Frame | Decoded]:
    from chiasm.media import animation

    timing = animation.track(found, data, limits)
    assert timing is not None
    offsets = timing.offsets()
    got = 0
    scaled_any = False
    wanted = [index for index in indices if index < len(offsets)]
    for index, rgb, scaled in animation.play(data, found, timing, wanted, limits):
        got += 1
        scaled_any |= scaled
        yield Frame(index, offsets[index], rgb)
    flags = ("size_changed",) if scaled_any else ()
    yield _ended(got, len(indices), found, limits, False, flags)


def _decode_video(data: bytes, found: str, indices: Sequence[int], limits: Limits) -> Iterator[Frame | Decoded]:
    from chiasm.media import video

    ending = video.Ending()
    for index, offset, rgb in video.decode(data, found, indices, limits, ending):
        yield Frame(index, offset, rgb)
    flags = ("size_changed",) if ending.size_changed else ()
    yield _ended(ending.got, len(indices), ending.codec, limits, ending.truncated, flags)


def _ended(got: int, planned: int, codec: str, limits: Limits, truncated: bool, flags: tuple[str, ...]) -> Decoded:
    """Enough of the planned frames came, or the whole medium is refused: what is missing is never filled in."""
    if got == 0 or got < limits.min_decoded_share * planned:
        raise InvalidRequest(
            "MEDIA_DECODE_FAILED",
            f"the video is damaged: {got} of {planned} planned frames decoded",
            facts={"codec": codec, "frames_got": got, "frames_claimed": planned},
        )
    return Decoded(got, truncated or got < planned, flags)


def _send_probed(connection: socket.socket, probed: Probed) -> None:
    offsets = array("d", probed.frame_offsets).tobytes()
    header = {
        "is": "probed",
        "kind": probed.kind,
        "height": probed.height,
        "width": probed.width,
        "duration": probed.duration,
        "found": probed.found,
        "animated": probed.animated,
        "frames_in_file": probed.frames_in_file,
        "flags": probed.flags,
    }
    connection.sendall(framing.pack(header, [len(offsets)]) + offsets)


def _send(connection: socket.socket, event: Frame | Decoded) -> None:
    if isinstance(event, Decoded):
        header = {"is": "decoded", "frames": event.frames, "truncated": event.truncated, "flags": event.flags}
        connection.sendall(framing.pack(header))
        return
    height, width, _ = event.rgb.shape
    header = {"is": "frame", "index": event.index, "offset": event.offset, "height": height, "width": width}
    connection.sendall(framing.pack(header, [event.rgb.nbytes]))
    connection.sendall(event.rgb.data.cast("B"))


def _send_picture(connection: socket.socket, picture: Picture) -> None:
    height, width, _ = picture.rgb.shape
    header = {
        "is": "picture",
        "height": height,
        "width": width,
        "found": picture.found,
        "flags": picture.flags,
        "seconds": picture.seconds,
    }
    connection.sendall(framing.pack(header, [picture.rgb.nbytes]))
    connection.sendall(picture.rgb.data.cast("B"))


def _send_error(connection: socket.socket, reason: str, message: str, facts: dict[str, Fact]) -> None:
    connection.sendall(framing.pack({"is": "error", "reason": reason, "message": message, "facts": facts}))


if __name__ == "__main__":
    # Only frees memory by ending: interpreter shutdown with half-read media is nobody's business.
    os._exit(main(sys.argv[1:]))
