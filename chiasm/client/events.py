"""What a caller is given: the events of an answer, and the answer. Times are in seconds, sizes are (height, width).

Frozen values without behaviour; they know nothing of where they came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

FinishReason: TypeAlias = Literal["stop", "length", "closed", "other"]
"""`stop`: the model ended its turn, or a stop string or stop token came. `length`: `max_tokens` or the end of the
context. `closed`: the timeline was closed while it was sampled. `other`: a reason of a newer server."""

Operation: TypeAlias = Literal["generate", "condition", "embed", "session"]
MediaKind: TypeAlias = Literal["image", "video", "frame", "other"]


@dataclass(frozen=True, slots=True)
class TimelineFrame:
    """One frame as it lies on the timeline.

    Attributes:
        slot: counts the media of the request, from 0.
        index: counts the used frames of the medium, from 0.
        unit: the unit of the medium that holds it: what is encoded and cached.
        offset: when it is shown; None for an image.
        grid: (t, h, w) of its unit, in patches.
        tokens: visual tokens of its unit.
        at_index: text tokens from this index on see it.
    """

    slot: int
    index: int
    unit: int
    offset: float | None
    grid: tuple[int, int, int]
    tokens: int
    at_index: int


@dataclass(frozen=True, slots=True)
class Started:
    """Every medium was decoded to its end and the prompt is laid.

    Attributes:
        frames: all frames, in the order of the timeline.
        prompt_tokens: text tokens of the prompt.
    """

    frames: tuple[TimelineFrame, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities at one place, natural logarithms after penalties and temperature.

    Attributes:
        id: of the token drawn, with its `logprob`.
        top: ids of the likeliest tokens and their log-probabilities, in falling order.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Token:
    """Tokens drawn, and the text that became certain with them.

    Attributes:
        text: never holds a broken character, nor what a stop string may still cut, and so may be empty.
        ids: one or more; none where only text that was held back comes.
        index: of the first of them in the answer, from 0.
        visible: frames the model saw.
        logprobs: one element for each id, if they were asked for.
    """

    text: str
    ids: tuple[int, ...]
    index: int
    visible: int
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class FramesVisible:
    """What the model sees from a token on. Comes when it changes, before the token.

    Attributes:
        count: frames seen.
        until: when the last of them is shown in its medium; None for an image and when none is seen.
        index: the first token of the answer that sees them.
        first: frames dropped from the front of the timeline; seen are the `count` after them.
    """

    count: int
    until: float | None
    index: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class MediaUsage:
    """What became of one medium.

    Attributes:
        kind: what it was asked as.
        format: the format found, for example `PNG` or `mov,mp4`.
        frames_in_file, frames_decoded, frames_used: counts of pictures.
        grid: (t, h, w) in patches, all units together.
        tokens: visual tokens.
        source_size, resized_size: pixels as shown, and as the model saw them.
        offsets: when each used frame is shown; empty for an image.
        flags: what was altered or is odd, for example `truncated`.
        units: units it has; `units_cached` of them came from the cache (None where the server does not say).
    """

    kind: MediaKind
    format: str
    frames_in_file: int
    frames_decoded: int
    frames_used: int
    grid: tuple[int, int, int]
    tokens: int
    source_size: tuple[int, int]
    resized_size: tuple[int, int]
    offsets: tuple[float, ...]
    flags: tuple[str, ...]
    units: int
    units_cached: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used: text tokens of the prompt, visual tokens, tokens drawn, and each medium in order.

    `cached_prompt_tokens` of the prompt were not computed again (None where the server does not say).
    """

    prompt_tokens: int
    visual_tokens: int
    output_tokens: int
    cached_prompt_tokens: int | None
    media: tuple[MediaUsage, ...]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that each stage took, summed over what ran side by side. None: the server does not say."""

    queue: float | None = None
    fetch: float | None = None
    decode_media: float | None = None
    encode: float | None = None
    publish: float | None = None
    attach: float | None = None
    prefill: float | None = None
    decode: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer. `stop` is the stop string that ended it, if one did."""

    reason: FinishReason
    usage: Usage
    times: StageTimes
    stop: str | None = None


Event: TypeAlias = Started | Token | FramesVisible | Finished


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer.

    Attributes:
        text: without the stop string that ended it.
        ids: of all tokens drawn, with those of the stop string.
        logprobs: one element for each id, if they were asked for.
        stop: the stop string that ended it, if one did.
        attempts: how often it was begun or taken up by a server, this client's resumes among them.
        resumes: how often the stream broke and this client took it up again.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    times: StageTimes
    frames: tuple[TimelineFrame, ...]
    request_id: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop: str | None = None
    attempts: int = 1
    resumes: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Embedding:
    """What a prompt comes to, text and media together, as one vector.

    Attributes:
        vector: (width,) of the model: the state of the prompt's last token after the final norm, of length 1 unless it
            was asked for as it is. It cannot be written to.
        usage: `output_tokens` is 0.
    """

    vector: npt.NDArray[np.float32]
    usage: Usage
    times: StageTimes
    request_id: str


StatesDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""In which type states are sent."""


@dataclass(frozen=True, eq=False, slots=True)
class Conditioning:
    """The states of a prompt's tokens after layers of the model's decoder, before any norm.

    Attributes:
        states: (tokens, width) after the one layer of `layer=`, or (layers, tokens, width) of `layers=` in their order.
            An array, or a torch.Tensor where it was asked for `into="torch"`.
        layers: after which they are.
        dtype: in which they were sent. NumPy has no bfloat16: an array of them holds their bits, as uint16.
        usage: `output_tokens` is 0. `cached_prompt_tokens` are all where the states were known from before.
    """

    states: Any
    layers: tuple[int, ...]
    dtype: StatesDtype
    usage: Usage
    times: StageTimes
    request_id: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is and takes.

    Attributes:
        context_limit: text tokens of prompt and answer together.
        media: kinds it takes; none for text only.
        layers: decoder layers.
        ready: whether a request would be taken now.
    """

    name: str
    family: str
    context_limit: int
    operations: tuple[Operation, ...]
    media: tuple[MediaKind, ...]
    layers: int
    ready: bool


@dataclass(frozen=True, slots=True)
class MediaEstimate:
    """What one medium would become (`frames_decoded` is 0), and the bytes of its entries in the cache."""

    usage: MediaUsage
    entry_bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a prompt would cost.

    Attributes:
        prompt_tokens, visual_tokens: of the text and of all media.
        context_limit: bounds prompt and answer together, in text tokens.
        room: tokens that could be drawn; 0 when the prompt does not fit.
        fits_with: what would make it fit, for example `max_frames=38`; empty when it fits.
        media: each medium in order.
    """

    prompt_tokens: int
    visual_tokens: int
    context_limit: int
    room: int
    fits_with: str
    media: tuple[MediaEstimate, ...]
