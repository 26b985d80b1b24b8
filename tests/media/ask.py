"""What every media test asks of a sandbox, in one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from chiasm.errors import InvalidRequest
from chiasm.media.listed import Listed
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, Kind, Limits, MediaSource, Probed, RawFrame, Rgb

ITEM = "messages[0].content[2]"


async def frames(sandbox: Sandbox, source: MediaSource, indices: Sequence[int] = (0,)) -> tuple[list[Frame], Decoded]:
    """All frames, and the ending, which is one and the last."""
    events = [event async for event in sandbox.decode(source, indices, item=ITEM)]
    *shown, ending = events
    assert isinstance(ending, Decoded)
    assert all(isinstance(event, Frame) for event in shown)
    return [event for event in shown if isinstance(event, Frame)], ending


async def picture(sandbox: Sandbox, data: bytes) -> Rgb:
    """The pixels of an image, after checking that the header told the truth about their number."""
    source = MediaSource("image", data=data)
    probed = await sandbox.probe(source)
    (frame,), ending = await frames(sandbox, source)
    assert frame.rgb.shape == (probed.height, probed.width, 3)
    assert frame.rgb.dtype == "uint8"
    assert frame.rgb.flags.c_contiguous
    assert (frame.index, frame.offset, ending.frames, ending.truncated) == (0, 0.0, 1, False)
    return frame.rgb


async def refusal(sandbox: Sandbox, source: MediaSource | FrameList | bytes, kind: Kind = "image") -> InvalidRequest:
    """The error that opening ends with, whether the header shows the fault or only decoding does."""
    if isinstance(source, bytes):
        source = MediaSource(kind, data=source)
    with pytest.raises(InvalidRequest) as caught:
        if isinstance(source, FrameList):
            await opened(sandbox, source)
        else:
            probed = await sandbox.probe(source, item=ITEM)
            await frames(sandbox, source, range(len(probed.frame_offsets)))
    error = caught.value
    assert error.code == "INVALID_ARGUMENT"
    assert error.item == ITEM
    assert not error.retryable
    assert "0x" not in error.message
    assert "/" not in error.message
    # As every other error of the library: a phrase, which only the name of a format begins with a capital.
    assert not error.message.endswith(".")
    assert not error.message[0].isupper() or error.message.startswith(str(error.facts.get("found")))
    return error


@dataclass(frozen=True)
class FrameList:
    """Frames of a list that have all come."""

    parts: Sequence[bytes | RawFrame]
    offsets: Sequence[float] | None
    kind: Kind


def listed(parts: Sequence[bytes | RawFrame], offsets: Sequence[float] | None, kind: Kind = "video") -> FrameList:
    return FrameList(parts, offsets, kind)


async def opened(sandbox: Sandbox, source: FrameList) -> tuple[list[Frame], Probed]:
    """All frames of a list, and what it was found to be; what its first frame said of it was no less true."""
    listed = Listed(sandbox, source.kind, len(source.parts), source.offsets, item=ITEM)
    first = await listed.probe(source.parts[0])
    shown = [await listed.open(part) for part in source.parts]
    assert listed.decoded == Decoded(len(source.parts), False)
    probed = listed.probed
    assert (first.kind, first.height, first.width) == (probed.kind, probed.height, probed.width)
    assert (first.frame_offsets, first.duration) == (probed.frame_offsets, probed.duration)
    assert set(first.flags) <= set(probed.flags) and first.found in probed.found
    return shown, probed


def forget_peak() -> int:
    """Makes `peak_kib` start again from what is used now, and returns that. proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kib()


def peak_kib() -> int:
    """Most memory in use since `forget_peak`, in KiB."""
    status = Path("/proc/self/status").read_text().splitlines()
    (row,) = (row for row in status if row.startswith("VmHWM:"))
    return int(row.split()[1])


DEFAULT = Limits()
