"""Media that a caller asks about, as values that are valid once they exist.

What could not be served is refused where it is made, with the reason the server would give, so that the traceback
points at the caller's own line. What can only be known from bytes (is it a picture at all?) is left to the server.
Knows no protobuf; what was passed in is turned into bytes by `chiasm.client.pixels`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

from chiasm.client import checks, pixels
from chiasm.client.checks import conflict
from chiasm.client.keywords import known_keywords
from chiasm.client.pixels import Layout
from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import MAX_FRAMES, MAX_SECONDS

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage


class Array(Protocol):
    """What numpy can read: numpy's own arrays, and tensors that lie in host memory."""

    def __array__(self, /, *args: Any, **kwargs: Any) -> Any: ...


@known_keywords()
@dataclass(frozen=True, slots=True)
class Handle:
    """A medium that lies on the server: what `client.upload(...)` returns. It may be asked about many times.

    Used like the medium itself: `["What happens?", handle]`, or with options `Video(handle, fps=2)`. It is good for the
    server and the tenant it was made with, until it expires; every use puts that off. Anywhere else, and later, it is
    NotFound MEDIA_EXPIRED. A client of several servers, and an answer that goes on at another, send the medium again.

    Attributes:
        id: 32 lower-case hexadecimal digits. With `kind` it is enough to make the same handle again elsewhere.
        kind: what it was uploaded as.
        byte_length: of the medium; None where it is not known.
        expires_at: when it is forgotten unless it is used before; None where it is not known.
        listed: whether it was uploaded as Frames, all of which are used.
        medium: what was uploaded, kept for an answer that has to go on at a server which does not have it. None for a
            handle that was made again, also for one that was copied or pickled.

    Raises InvalidRequest FIELD_OUT_OF_RANGE for an id or a kind that is none.
    """

    id: str
    kind: Literal["image", "video"]
    _: KW_ONLY
    byte_length: int | None = None
    expires_at: datetime | None = None
    listed: bool = False
    medium: Image | Video | Frames | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self.id, self.kind, self.byte_length, self.expires_at, self.listed)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", self.id):
            raise InvalidRequest.out_of_range("handle", self.id, "32 lower-case hexadecimal digits")
        if self.kind not in ("image", "video"):
            raise InvalidRequest.out_of_range("kind", self.kind, "image or video")


def _handle(
    name: str, kind: Literal["image", "video"], byte_length: int | None, expires_at: datetime | None, listed: bool
) -> Handle:
    return Handle(name, kind, byte_length=byte_length, expires_at=expires_at, listed=listed)


FileSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes]"
ImageSource: TypeAlias = "FileSource | PilImage | Array"


@known_keywords()
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Image:
    """One picture.

    Attributes:
        source: a path, bytes, a file object opened for reading bytes (read here, to its end, and not closed), a
            `data:` URI, a Pillow image, a Handle, or a uint8 array of shape (height, width), (height, width, channels)
            or (channels, height, width) with 1, 3 or 4 channels. A path is read when a request is made.
        layout: the order of an array's axes. Needed only where the shape leaves it open, as (3, 640, 3) does.

    Raises:
        InvalidRequest: FRAME_LAYOUT for an array that is not uint8 or whose layout is unclear, and for Pillow's modes I
            and F, whose range nobody knows; FIELD_OUT_OF_RANGE for an array without pixels or the handle of a video;
            MEDIA_DECODE_FAILED for broken base64.
        Unsupported: FEATURE_DISABLED for an http(s) address.
        TypeError: for anything else than the above.
    """

    source: ImageSource | Handle
    _: KW_ONLY
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, Handle):
            _check_kind(self.source, "image")
            if self.layout is not None:
                raise InvalidRequest("FRAME_LAYOUT", "layout orders the axes of an array; a handle has none")
            return
        source = pixels.take(self.source)
        pixels.check(source, self.layout)
        object.__setattr__(self, "source", source)

    def __repr__(self) -> str:
        return f"Image({pixels.describe(self.source)})"


@known_keywords({"frames": "Frames(images, timestamps=... or fps=...)", "num_frames": "max_frames"})
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Video:
    """A video file, and which of its frames to use. What is not said takes the values of the model's processor.

    Attributes:
        source: as for Image, encoded files and handles only.
        fps: frames per second of the video to use; more than 0, at most 1000.
        max_frames, min_frames: bounds on the frames used; from 1. Over `max_frames` they are thinned evenly.
        start, end: seconds from the first frame; only frames in [start, end) are used.
        timestamps: exact seconds, strictly increasing: of each the frame shown then. Excludes all of the above.

    Raises:
        InvalidRequest: FIELD_OUT_OF_RANGE, SAMPLING_CONFLICT, TIMESTAMPS_INVALID, MEDIA_DECODE_FAILED (base64).
        Unsupported: FEATURE_DISABLED for an http(s) address.
        TypeError: for anything else, arrays and lists of pictures among them: those are `Frames`.
    """

    source: FileSource | Handle
    _: KW_ONLY
    fps: float | None = None
    max_frames: int | None = None
    min_frames: int | None = None
    start: float | None = None
    end: float | None = None
    timestamps: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._take_source()
        checks.fps(self.fps)
        least, most = (checks.whole(name, getattr(self, name), 1, MAX_FRAMES) for name in ("min_frames", "max_frames"))
        object.__setattr__(self, "min_frames", least)
        object.__setattr__(self, "max_frames", most)
        if least is not None and most is not None and least > most:
            raise conflict(f"min_frames {least} is more than max_frames {most}")
        start, end = (checks.number(name, getattr(self, name), 0, MAX_SECONDS) for name in ("start", "end"))
        if start is not None and end is not None and start >= end:
            raise conflict(f"start {start:g} is not before end {end:g}")
        if self.timestamps is not None:
            if any(option is not None for option in (self.fps, least, most, start, end)):
                raise conflict("timestamps exclude every other way to choose frames")
            object.__setattr__(self, "timestamps", checks.times(self.timestamps))
            if not self.timestamps:
                raise conflict("timestamps were given and none is in them")
        if isinstance(self.source, Handle) and self.source.listed and self.chooses:
            raise conflict("the handle is of Frames, all of which are used")

    @property
    def chooses(self) -> bool:
        """Whether anything is said about which frames to use."""
        options = (self.fps, self.max_frames, self.min_frames, self.start, self.end, self.timestamps)
        return any(option is not None for option in options)

    def _take_source(self) -> None:
        if isinstance(self.source, Handle):
            _check_kind(self.source, "video")
            return
        source = pixels.take(self.source)
        if not isinstance(source, bytes | bytearray | memoryview | os.PathLike):
            raise TypeError(f"a Video is an encoded file, not a {type(source).__name__}; give pictures as Frames")
        object.__setattr__(self, "source", source)

    def __repr__(self) -> str:
        return f"Video({pixels.describe(self.source)})"


@known_keywords({"times": "timestamps"})
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Frames:
    """Pictures that make up a video, with their times. All of them are used.

    Times are never invented: a model that is told a wrong time believes it.

    Attributes:
        images: each an Image or anything an Image is made of, handles apart. At least one.
        timestamps: seconds of each, strictly increasing from 0 or later.
        fps: or the rate: picture i is shown at i / fps.

    Raises:
        InvalidRequest: NO_FRAMES, FIELD_MISSING (no times), SAMPLING_CONFLICT (both), TIMESTAMPS_INVALID,
            FIELD_OUT_OF_RANGE, and what Image raises.
        TypeError: for a handle among the pictures, and what Image raises.
    """

    images: Sequence[Image | ImageSource]
    _: KW_ONLY
    timestamps: Sequence[float] | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        images = tuple(picture if isinstance(picture, Image) else Image(picture) for picture in self.images)
        object.__setattr__(self, "images", images)
        if not images:
            raise InvalidRequest("NO_FRAMES", "a list of frames has no frame")
        if any(isinstance(image.source, Handle) for image in images):
            raise TypeError("a frame is a picture, not a handle; upload the Frames as a whole")
        if self.timestamps is None and self.fps is None:
            raise InvalidRequest(
                "FIELD_MISSING",
                "frames need their times: give timestamps=[...] in seconds, or fps=",
                facts={"field": "timestamps or fps"},
            )
        if self.timestamps is not None and self.fps is not None:
            raise conflict("frames have timestamps and fps, one of the two is needed")
        checks.fps(self.fps)
        if self.timestamps is not None:
            times = checks.times(self.timestamps)
            object.__setattr__(self, "timestamps", times)
            if len(times) != len(images):
                raise InvalidRequest(
                    "TIMESTAMPS_INVALID",
                    f"{len(images)} frames came with {len(times)} timestamps",
                    facts={"frames": len(images), "timestamps": len(times)},
                )

    @property
    def pictures(self) -> tuple[Image, ...]:
        """`images`, each as an Image."""
        return cast(tuple[Image, ...], self.images)

    def __repr__(self) -> str:
        return f"Frames({len(self.images)} pictures)"


Medium: TypeAlias = Image | Video | Frames | Handle


def _check_kind(handle: Handle, kind: str) -> None:
    if handle.kind != kind:
        raise InvalidRequest.out_of_range("handle.kind", handle.kind, f"{kind} here")
