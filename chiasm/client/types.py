"""What a caller asks with: media, messages and sampling, as values that are valid once they exist.

A value that could not be served is refused where it is made, with the reason the server would give, so that the
traceback points at the caller's own line. What can only be known from bytes (is it a picture at all?) is left to the
server. Knows no protobuf; what was passed in is turned into bytes by `chiasm.client.pixels`.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from chiasm.client import pixels
from chiasm.client.pixels import Layout
from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import MAX_FRAMES, MAX_SECONDS

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

MAX_TOKENS = 2**31 - 1

Role: TypeAlias = Literal["system", "user", "assistant"]


class Array(Protocol):
    """What numpy can read: numpy's own arrays, and tensors that lie in host memory."""

    def __array__(self, /, *args: Any, **kwargs: Any) -> Any: ...


FileSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes]"
ImageSource: TypeAlias = "FileSource | PilImage | Array"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Image:
    """One picture.

    Attributes:
        source: a path, bytes, a file object opened for reading bytes (read here, to its end, and not closed), a
            `data:` URI, a Pillow image, or a uint8 array of shape (height, width), (height, width, channels) or
            (channels, height, width) with 1, 3 or 4 channels. A path is read when a request is made.
        layout: the order of an array's axes. Needed only where the shape leaves it open, as (3, 640, 3) does.

    Raises:
        InvalidRequest: FRAME_LAYOUT for an array that is not uint8 or whose layout is unclear, and for Pillow's modes I
            and F, whose range nobody knows; FIELD_OUT_OF_RANGE for an array without pixels; MEDIA_DECODE_FAILED for
            broken base64.
        Unsupported: FEATURE_DISABLED for an http(s) address.
        TypeError: for anything else than the above.
    """

    source: ImageSource
    _: KW_ONLY
    layout: Layout | None = None

    def __post_init__(self) -> None:
        source = pixels.take(self.source)
        pixels.check(source, self.layout)
        object.__setattr__(self, "source", source)

    def __repr__(self) -> str:
        return f"Image({pixels.describe(self.source)})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Video:
    """A video file, and which of its frames to use. What is not said takes the values of the model's processor.

    Attributes:
        source: as for Image, encoded files only.
        fps: frames per second of the video to use; more than 0, at most 1000.
        max_frames, min_frames: bounds on the frames used; from 1. Over `max_frames` they are thinned evenly.
        start, end: seconds from the first frame; only frames in [start, end) are used.
        timestamps: exact seconds, strictly increasing: of each the frame shown then. Excludes all of the above.

    Raises:
        InvalidRequest: FIELD_OUT_OF_RANGE, SAMPLING_CONFLICT, TIMESTAMPS_INVALID, MEDIA_DECODE_FAILED (base64).
        Unsupported: FEATURE_DISABLED for an http(s) address.
        TypeError: for anything else, arrays and lists of pictures among them: those are `Frames`.
    """

    source: FileSource
    _: KW_ONLY
    fps: float | None = None
    max_frames: int | None = None
    min_frames: int | None = None
    start: float | None = None
    end: float | None = None
    timestamps: Sequence[float] | None = None

    def __post_init__(self) -> None:
        source = pixels.take(self.source)
        if not isinstance(source, bytes | bytearray | memoryview | os.PathLike):
            raise TypeError(f"a Video is an encoded file, not a {type(source).__name__}; give pictures as Frames")
        object.__setattr__(self, "source", source)
        _check_fps(self.fps)
        least, most = (_whole(name, getattr(self, name), 1, MAX_FRAMES) for name in ("min_frames", "max_frames"))
        object.__setattr__(self, "min_frames", least)
        object.__setattr__(self, "max_frames", most)
        if least is not None and most is not None and least > most:
            raise _conflict(f"min_frames {least} is more than max_frames {most}")
        start, end = (_number(name, getattr(self, name), 0, MAX_SECONDS) for name in ("start", "end"))
        if start is not None and end is not None and start >= end:
            raise _conflict(f"start {start:g} is not before end {end:g}")
        if self.timestamps is not None:
            if any(option is not None for option in (self.fps, least, most, start, end)):
                raise _conflict("timestamps exclude every other way to choose frames")
            object.__setattr__(self, "timestamps", _times(self.timestamps))
            if not self.timestamps:
                raise _conflict("timestamps were given and none is in them")

    def __repr__(self) -> str:
        return f"Video({pixels.describe(self.source)})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Frames:
    """Pictures that make up a video, with their times. All of them are used.

    Times are never invented: a model that is told a wrong time believes it.

    Attributes:
        images: each an Image or anything an Image is made of. At least one.
        timestamps: seconds of each, strictly increasing from 0 or later.
        fps: or the rate: picture i is shown at i / fps.

    Raises:
        InvalidRequest: NO_FRAMES, FIELD_MISSING (no times), SAMPLING_CONFLICT (both), TIMESTAMPS_INVALID,
            FIELD_OUT_OF_RANGE, and what Image raises.
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
        if self.timestamps is None and self.fps is None:
            raise InvalidRequest(
                "FIELD_MISSING",
                "frames need their times: give timestamps=[...] in seconds, or fps=",
                facts={"field": "timestamps or fps"},
            )
        if self.timestamps is not None and self.fps is not None:
            raise _conflict("frames have timestamps and fps, one of the two is needed")
        _check_fps(self.fps)
        if self.timestamps is not None:
            times = _times(self.timestamps)
            object.__setattr__(self, "timestamps", times)
            if len(times) != len(images):
                raise InvalidRequest(
                    "TIMESTAMPS_INVALID",
                    f"{len(images)} frames came with {len(times)} timestamps",
                    facts={"frames": len(images), "timestamps": len(times)},
                )

    def __repr__(self) -> str:
        return f"Frames({len(self.images)} pictures)"


Part: TypeAlias = str | Image | Video | Frames
Content: TypeAlias = Part | Sequence[Part]
"""A text, a medium, or a sequence of both: what one speaker says."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one speaker says. A system message comes first or not at all.

    Raises InvalidRequest FIELD_OUT_OF_RANGE for an unknown role, TypeError for content that is none.
    """

    role: Role
    content: Content

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise InvalidRequest.out_of_range("role", self.role, f"one of {', '.join(get_args(Role))}")
        object.__setattr__(self, "content", parts_of(self.content))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. None means the server's own value.

    Attributes:
        temperature: divides the logits, from 0 to 100; 0 takes the likeliest token. The server's own value is 0.
        seed: from 0 to 2**64 - 1; equal seeds draw equal tokens. Unset, it is drawn for each request.
        max_tokens: bounds the answer, from 1. Unset: the room left in the context.

    Raises InvalidRequest FIELD_OUT_OF_RANGE, also for NaN; TypeError for what is no number.
    """

    _: KW_ONLY
    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, 100)
        object.__setattr__(self, "seed", _whole("seed", self.seed, 0, 2**64 - 1))
        object.__setattr__(self, "max_tokens", check_max_tokens(self.max_tokens))


def parts_of(content: Content) -> tuple[Part, ...]:
    """The parts of a content. Raises TypeError for anything that is neither text nor a medium."""
    if isinstance(content, str | Image | Video | Frames):
        return (content,)
    if isinstance(content, bytes | bytearray | memoryview) or not isinstance(content, Iterable):
        raise TypeError(f"content is text, Image, Video, Frames or a sequence of them, not {type(content).__name__}")
    parts = tuple(content)
    for index, part in enumerate(parts):
        if not isinstance(part, str | Image | Video | Frames):
            raise TypeError(
                f"content[{index}] is a {type(part).__name__}; text, Image(...), Video(...) and Frames(...) are taken"
            )
    return parts


def check_max_tokens(value: int | None) -> int | None:
    """`value` as a plain int. Raises InvalidRequest FIELD_OUT_OF_RANGE unless None or from 1 to 2**31 - 1, TypeError
    for what is no whole number; True and False are none."""
    return _whole("max_tokens", value, 1, MAX_TOKENS)


def _conflict(message: str) -> InvalidRequest:
    return InvalidRequest("SAMPLING_CONFLICT", message)


def _number(name: str, value: float | None, low: float, high: float) -> float | None:
    # Written so that NaN, which is in no order with anything, is out of range.
    if value is not None and not low <= (number := _float(name, value)) <= high:
        raise InvalidRequest.out_of_range(name, number, f"from {low:g} to {high:g}")
    return value


def _whole(name: str, value: int | None, low: int, high: int) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if not low <= whole <= high:
        raise InvalidRequest.out_of_range(name, whole, f"from {low} to {high}")
    return whole


def _float(name: str, value: object) -> float:
    if isinstance(value, str | bytes | bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a number, not {value!r}") from None


def _check_fps(value: float | None) -> None:
    if value is not None and not 0 < (fps := _float("fps", value)) <= 1000:
        raise InvalidRequest.out_of_range("fps", fps, "more than 0, at most 1000")


def _times(values: Iterable[float]) -> tuple[float, ...]:
    """Finite seconds from 0, each greater than the one before; else InvalidRequest names the first that is not."""
    times = tuple(_float("a timestamp", value) for value in values)
    before = -math.inf
    for index, time in enumerate(times):
        if not (0 <= time < math.inf and time > before):
            raise InvalidRequest(
                "TIMESTAMPS_INVALID",
                f"timestamp {index} is {time:g}; timestamps are finite seconds that grow from 0 or later",
                facts={"index": index},
            )
        if time > MAX_SECONDS:
            raise InvalidRequest.out_of_range(f"timestamps[{index}]", time, f"at most {MAX_SECONDS:g} seconds")
        before = time
    return times
