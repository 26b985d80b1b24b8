"""What passes between media, the encoder and the coordinator. No torch, no Pillow, no PyAV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from chiasm.rpc.limits import LISTED_FRAMES

Rgb: TypeAlias = npt.NDArray[np.uint8]  # (height, width, 3)
Kind: TypeAlias = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class RawFrame:
    """Pixels a client hands over undecoded.

    Attributes:
        data: `height * width * channels` bytes, rows from the top, channels last.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA, composited on white).
    """

    data: bytes
    height: int
    width: int
    channels: int


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One encoded file, before anything is known about it. Lists of frames are `chiasm.media.listed`'s.

    Attributes:
        kind: what the request says it is; a file of the other kind is refused.
        mime_type: what the client believes; content decides.
    """

    kind: Kind
    data: bytes
    mime_type: str | None = None


@dataclass(frozen=True, slots=True)
class Probed:
    """What the header and the packet index of a medium say, before any budget is shared.

    Attributes:
        height, width: pixels as shown, that is after EXIF orientation or the display matrix.
        frame_offsets: seconds of every frame of a video in presentation order, from 0; `(0.0,)` for an image.
        duration: seconds, end of the last frame minus start of the first; 0 for an image.
        found: name of the format found, for example `PNG` or `mov,mp4`.
        animated, frames_in_file: an image file may hold several pictures; the first is used.
        flags: what will be altered or is odd, for example `orientation_applied`.
    """

    kind: Kind
    height: int
    width: int
    frame_offsets: tuple[float, ...]
    duration: float
    found: str
    animated: bool = False
    frames_in_file: int = 1
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded picture. `index` counts the frames of the file, `offset` is in seconds from its first frame."""

    index: int
    offset: float
    rgb: Rgb


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a list, opened and decoded.

    Attributes:
        found: name of its format.
        flags: what was altered or is odd, as of `Probed`.
        seconds: of processor time that it took.
    """

    rgb: Rgb
    found: str
    flags: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Decoded:
    """How the decoding of one medium ended.

    Attributes:
        frames: how many of the planned frames came.
        truncated: fewer came than were planned, but enough (`Limits.min_decoded_share`).
    """

    frames: int
    truncated: bool
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one medium may claim or contain; checked before decoding and again while decoding."""

    max_bytes: int = 512 * 2**20
    max_pixels: int = 89_478_485
    max_video_frames: int = 100_000
    max_video_seconds: float = 4 * 3600.0
    max_listed_frames: int = LISTED_FRAMES
    cpu_seconds: float = 60.0
    memory_bytes: int = 4 * 2**30
    open_files: int = 64
    min_decoded_share: float = 0.9
    formats: frozenset[str] = field(default_factory=lambda: frozenset({"JPEG", "PNG", "WEBP", "GIF", "BMP"}))
