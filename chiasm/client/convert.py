"""The client's words to the server's: prompts, media and sampling as one request, and what is uploaded beside it.

A fault names its place as `messages[0].content[2]`, or `media[2]` beside token ids. Knows no transport and no clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from chiasm.client import checks
from chiasm.client.events import StatesDtype
from chiasm.client.media import Frames, Handle, Image, Medium, Video
from chiasm.client.pixels import Raw, check_bytes, encoded, size_of
from chiasm.client.types import Message, PlainPrompt, Prompt, ResumePoint, Role, SamplingParams, TokenPrompt, parts_of
from chiasm.client.upload import Upload, frame_list, raw_layout
from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import MEDIA_BYTES, MIB, TEXT_BYTES
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb

INLINE_BYTES = 4 * MIB
"""Media of one request up to this size together travel inside it; the rest is uploaded beside it. A request below it
passes every proxy that leaves gRPC's own limit for a message (4 MiB) as it is, and is copied and parsed in no time."""

UPLOAD_TTL = 60.0
"""Seconds that a medium which was uploaded for one request is kept after it."""

_ROLES: dict[Role, pb.Role.ValueType] = {
    "system": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
}
_STATES_DTYPES: dict[StatesDtype, pb.Dtype.ValueType] = {
    "float32": pb.DTYPE_FLOAT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
}
_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "seed",
    "min_tokens",
)
"""Options that are one number each. None is not said."""

_REQUEST_ID = re.compile(r"[ -~]{1,128}")

R = TypeVar("R", rpb.GenerateRequest, rpb.EmbedRequest, rpb.ConditionRequest, rpb.EstimateRequest)


@dataclass(frozen=True, slots=True)
class Outgoing(Generic[R]):
    """A request, and the media that it names by handles and that are sent beside it.

    Attributes:
        sources: by slot, what makes the upload of a medium that it names by a handle once more, where it is at hand.
    """

    request: R
    uploads: tuple[Upload, ...] = ()
    sources: Mapping[int, Callable[[], Upload]] = field(default_factory=dict)

    def again(self) -> Outgoing[R]:
        """The same for a server that knows none of the handles: all that is at hand is sent, under new ones.

        Raises OSError for a path that is not there any longer.
        """
        request = type(self.request)()
        request.CopyFrom(self.request)
        uploads = {slot: make() for slot, make in self.sources.items()}
        for slot, upload in uploads.items():
            request.media[slot].handle = upload.handle
        return replace(self, request=request, uploads=tuple(uploads.values()))


def to_generate(
    model: str,
    prompt: Prompt,
    *,
    request_id: str,
    sampling: SamplingParams | None = None,
    max_tokens: int | None = None,
    inline: int | None = None,
    resume: ResumePoint | None = None,
) -> Outgoing[rpb.GenerateRequest]:
    """A request with the bytes of its media: files are read here.

    Args:
        request_id: 1 to 128 printable ASCII characters.
        max_tokens: takes the place of the one in `sampling`.
        inline: bytes of media that the request may carry itself; what does not fit is uploaded. None: it carries all.
        resume: where the answer goes on.

    Raises:
        InvalidRequest: EMPTY_PROMPT, MESSAGE_ORDER, MALFORMED_REQUEST (a lone surrogate), FIELD_OUT_OF_RANGE,
            MEDIA_EMPTY, MEDIA_TOO_LARGE, TEXT_TOO_LARGE, and what the media raise.
        OSError: for a path that cannot be read.
    """
    request = rpb.GenerateRequest()
    _sampling(request.sampling, sampling or SamplingParams(), max_tokens)
    if resume is not None:
        request.resume.resume_token = resume.token
        request.resume.emitted.add(sequence=0, ids=resume.ids)
    return _filled(request, model, prompt, request_id, inline)


def to_embed(
    model: str, prompt: Prompt, *, request_id: str, normalize: bool = True, inline: int | None = None
) -> Outgoing[rpb.EmbedRequest]:
    """As `to_generate`, for a vector. Raises TypeError for a `normalize` that is none."""
    if not isinstance(normalize, bool):
        raise TypeError(f"normalize must be True or False, not {normalize!r}")
    request = rpb.EmbedRequest(normalize=normalize, dtype=pb.DTYPE_FLOAT32)
    return _filled(request, model, prompt, request_id, inline)


def to_condition(
    model: str,
    prompt: Prompt,
    *,
    request_id: str,
    layers: Sequence[int],
    dtype: StatesDtype = "float32",
    inline: int | None = None,
) -> Outgoing[rpb.ConditionRequest]:
    """As `to_generate`, for states after layers. Raises InvalidRequest FIELD_OUT_OF_RANGE too for no layers, for one
    that is named twice or is none, and for a type in which states are not sent."""
    numbers = [checks.whole("layers", layer, 1, 2**32 - 1) for layer in layers]
    if not numbers or len(set(numbers)) < len(numbers):
        raise InvalidRequest.out_of_range("layers", len(numbers), "at least one, each once")
    if dtype not in _STATES_DTYPES:
        raise InvalidRequest.out_of_range("dtype", str(dtype), f"one of {', '.join(_STATES_DTYPES)}")
    request = rpb.ConditionRequest(layers=[n for n in numbers if n is not None], dtype=_STATES_DTYPES[dtype])
    return _filled(request, model, prompt, request_id, inline)


def to_estimate_request(
    model: str, prompt: Prompt, *, request_id: str, inline: int | None = None
) -> Outgoing[rpb.EstimateRequest]:
    """As `to_generate`, for what a prompt would cost."""
    return _filled(rpb.EstimateRequest(), model, prompt, request_id, inline)


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest FIELD_OUT_OF_RANGE."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest.out_of_range("request_id", request_id, "1 to 128 printable ASCII characters")


def _filled(request: R, model: str, prompt: Prompt, request_id: str, inline: int | None) -> Outgoing[R]:
    check_request_id(request_id)
    _check_text(model, "model")
    request.request_id, request.model = request_id, model
    uploads: list[Upload] = []
    sources: dict[int, Callable[[], Upload]] = {}
    left = inline
    for slot, (item, medium) in enumerate(_lay(request.prompt, prompt)):
        try:
            if (source := _source(medium)) is not None:
                sources[slot] = partial(Upload, source, item=item, ttl=UPLOAD_TTL)
            size = 0 if isinstance(medium, Handle) else _size(medium)
            if left is None or size <= left:
                request.media.append(_medium(medium))
                left = None if left is None else left - size
            else:
                assert not isinstance(medium, Handle), "a handle has no bytes"
                sources[slot] = partial(Upload, medium, item=item, ttl=UPLOAD_TTL)
                uploads.append(sources[slot]())
                request.media.append(_named(uploads[-1].handle, medium))
        except InvalidRequest as error:
            raise error.at(item) from error.__cause__
    _check_text_size(request.prompt)
    size = request.ByteSize()
    if size > MEDIA_BYTES:
        raise InvalidRequest(
            "MEDIA_TOO_LARGE",
            f"the request has {size} bytes, {MEDIA_BYTES} are taken",
            facts={"bytes": size, "limit": MEDIA_BYTES},
        )
    return Outgoing(request, tuple(uploads), sources)


def _lay(message: pb.Prompt, prompt: Prompt) -> Iterator[tuple[str, Medium]]:
    """Writes the text of a prompt and yields each medium with its place, in the order of slots."""
    if isinstance(prompt, TokenPrompt):
        if not prompt.ids and not prompt.media:
            raise _empty()
        message.plain.parts.add(tokens=pb.TokenRun(ids=prompt.ids, pads_bind_slots=bool(prompt.media)))
        yield from ((f"media[{i}]", medium) for i, medium in enumerate(prompt.media))
        return
    slot = 0
    if isinstance(prompt, PlainPrompt):
        if all(part == "" for part in prompt.parts):
            raise _empty()
        for i, part in enumerate(prompt.parts):
            if isinstance(part, str):
                _check_text(part, f"parts[{i}]")
                message.plain.parts.add(text=part)
                continue
            message.plain.parts.add(slot=slot)
            slot += 1
            yield f"parts[{i}]", part
        return
    _check_order(prompt)
    for i, said in enumerate(prompt):
        turn = message.conversation.turns.add(role=_ROLES[said.role])
        for j, part in enumerate(parts_of(said.content)):
            item = f"messages[{i}].content[{j}]"
            if isinstance(part, str):
                _check_text(part, item)
                turn.parts.add(text=part)
                continue
            turn.parts.add(slot=slot)
            slot += 1
            yield item, part


def _check_order(messages: tuple[Message, ...]) -> None:
    if all(part == "" for message in messages for part in parts_of(message.content)):
        raise _empty()
    for i, message in enumerate(messages):
        if message.role == "system" and i > 0:
            raise InvalidRequest(
                "MESSAGE_ORDER", "a system message comes first", item=f"messages[{i}]", facts={"index": i}
            )
    last = len(messages) - 1
    if messages[last].role == "assistant":
        raise InvalidRequest(
            "MESSAGE_ORDER", "the last message is the assistant's", item=f"messages[{last}]", facts={"index": last}
        )


def _empty() -> InvalidRequest:
    return InvalidRequest("EMPTY_PROMPT", "the request has neither text nor media")


def _check_text_size(prompt: pb.Prompt) -> None:
    said = [prompt.plain.parts, *(turn.parts for turn in prompt.conversation.turns)]
    size = sum(len(part.text.encode()) for parts in said for part in parts)
    if size > TEXT_BYTES:
        raise InvalidRequest(
            "TEXT_TOO_LARGE",
            f"the prompt has {size} bytes of text, {TEXT_BYTES} are allowed",
            facts={"bytes": size, "limit": TEXT_BYTES, "cause": "size"},
        )


def _check_text(text: str, item: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "MALFORMED_REQUEST",
            f"character {error.start} is half of a surrogate pair, which no encoding can carry",
            item=item,
            facts={"index": error.start},
        ) from None


# -- media -------------------------------------------------------------------------------------------------------------


def _size(medium: Image | Video | Frames) -> int:
    pictures = medium.pictures if isinstance(medium, Frames) else (medium,)
    return sum(0 if isinstance(picture.source, Handle) else size_of(picture.source) for picture in pictures)


def _source(medium: Medium) -> Image | Video | Frames | None:
    """What was uploaded under the handle that a medium is, or has, where this process did it."""
    handle = medium if isinstance(medium, Handle) else None if isinstance(medium, Frames) else medium.source
    return handle.medium if isinstance(handle, Handle) else None


def _named(handle: str, medium: Medium) -> pb.Media:
    """A medium that lies on the server, or will."""
    if isinstance(medium, Handle):
        return pb.Media(kind=pb.MEDIA_KIND_VIDEO if medium.kind == "video" else pb.MEDIA_KIND_IMAGE, handle=handle)
    if isinstance(medium, Video):
        return pb.Media(kind=pb.MEDIA_KIND_VIDEO, handle=handle, sampling=_media_sampling(medium))
    return pb.Media(kind=pb.MEDIA_KIND_VIDEO if isinstance(medium, Frames) else pb.MEDIA_KIND_IMAGE, handle=handle)


def _medium(medium: Medium) -> pb.Media:
    """A medium with its bytes, or named by its handle."""
    if isinstance(medium, Frames):
        return pb.Media(kind=pb.MEDIA_KIND_VIDEO, frames=_frames(medium))
    if isinstance(medium, Handle):
        return _named(medium.id, medium)
    if isinstance(medium.source, Handle):
        return _named(medium.source.id, medium)
    if isinstance(medium, Video):
        data = encoded(medium.source, limit=MEDIA_BYTES)
        assert isinstance(data, bytes), "a Video takes files only"
        return pb.Media(kind=pb.MEDIA_KIND_VIDEO, data=data, sampling=_media_sampling(medium))
    picture = encoded(medium.source, medium.layout, limit=MEDIA_BYTES)
    if isinstance(picture, Raw):
        header = pb.FrameHeader(raw=raw_layout((picture.height, picture.width, picture.channels)))
        frame = pb.Frame(header=header, data=picture.data)
        return pb.Media(kind=pb.MEDIA_KIND_IMAGE, frames=pb.FrameSequence(frames=[frame]))
    return pb.Media(kind=pb.MEDIA_KIND_IMAGE, data=picture)


def _media_sampling(video: Video) -> pb.MediaSampling | None:
    if video.timestamps is not None:
        return pb.MediaSampling(exact_offsets=map(to_duration, video.timestamps))
    sampling = pb.MediaSampling(fps=video.fps, min_frames=video.min_frames, max_frames=video.max_frames)
    if video.start is not None:
        sampling.start_offset.CopyFrom(to_duration(video.start))
    if video.end is not None:
        sampling.end_offset.CopyFrom(to_duration(video.end))
    return sampling if sampling.ByteSize() else None


def _frames(part: Frames) -> pb.FrameSequence:
    sequence = pb.FrameSequence(fps=part.fps)
    size = 0
    for i, header in enumerate(frame_list(part).frames):
        image = part.pictures[i]
        try:
            picture = encoded(image.source, image.layout, limit=MEDIA_BYTES)
            data = picture.data if isinstance(picture, Raw) else picture
            size += len(data)
            check_bytes(size, MEDIA_BYTES)
        except InvalidRequest as error:
            error.facts.setdefault("index", i)
            raise
        frame = sequence.frames.add(data=data)
        if header.ByteSize():
            frame.header.CopyFrom(header)
    return sequence


# -- sampling ----------------------------------------------------------------------------------------------------------


def _sampling(message: pb.SamplingParams, params: SamplingParams, max_tokens: int | None) -> None:
    most = checks.max_tokens(max_tokens)
    for name in _OPTIONS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    most = params.max_tokens if most is None else most
    if most is not None:
        message.max_tokens = most
    if most is not None and (params.min_tokens or 0) > most:
        raise InvalidRequest.out_of_range("min_tokens", params.min_tokens, f"at most max_tokens ({most})")
    for string in params.stop:
        _check_text(string, "stop")
    message.stop.extend(params.stop)
    for token, bias in dict(params.logit_bias).items():
        message.logit_bias.add(token_id=token, bias=bias)
    message.stop_token_ids.extend(params.stop_token_ids)
    message.banned_token_ids.extend(params.banned_token_ids)
    if params.ignore_eos:
        message.ignore_eos = True
    if not params.skip_special_tokens:
        message.skip_special_tokens = False
    _guide(message, params)


def _guide(message: pb.SamplingParams, params: SamplingParams) -> None:
    for name in ("json_schema", "regex", "grammar"):
        text = getattr(params, name)
        if text is not None:
            _check_text(text, name)
            setattr(message.guide, name, text)
    for string in params.choice:
        _check_text(string, "choice")
    if params.choice:
        message.guide.choice.choices.extend(params.choice)
