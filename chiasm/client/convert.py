"""The client's words to protobuf and back. No other module of the client builds or reads a message.

`to_request` turns messages and media into a request; a fault names its place as `messages[0].content[2]`. `Reader`
turns the responses of one answer into events. Knows no transport and no clock.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from chiasm.client.events import (
    Event,
    Finished,
    FinishReason,
    FramesVisible,
    MediaKind,
    MediaUsage,
    ModelInfo,
    Operation,
    StageTimes,
    Started,
    TimelineFrame,
    Token,
    Usage,
)
from chiasm.client.pixels import Raw, check_bytes, encoded
from chiasm.client.types import (
    Frames,
    Image,
    Message,
    Role,
    SamplingParams,
    Video,
    check_max_tokens,
    parts_of,
)
from chiasm.errors import InvalidRequest, ServerError
from chiasm.rpc.limits import CLIENT_MESSAGE_BYTES
from chiasm.rpc.times import to_duration, to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb

_ROLES: dict[Role, pb.Role.ValueType] = {
    "system": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
}
_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CLOSED: "closed",
}
_KINDS: dict[int, MediaKind] = {
    pb.MEDIA_KIND_IMAGE: "image",
    pb.MEDIA_KIND_VIDEO: "video",
    pb.MEDIA_KIND_FRAME: "frame",
}
_OPERATIONS: dict[int, Operation] = {
    rpb.OPERATION_GENERATE: "generate",
    rpb.OPERATION_CONDITION: "condition",
    rpb.OPERATION_EMBED: "embed",
    rpb.OPERATION_SESSION: "session",
}
_REQUEST_ID = re.compile(r"[ -~]{1,128}")


# -- requests ----------------------------------------------------------------------------------------------------------


def to_request(
    model: str,
    messages: Sequence[Message],
    *,
    request_id: str,
    sampling: SamplingParams | None = None,
    max_tokens: int | None = None,
) -> rpb.GenerateRequest:
    """A request, with the bytes of all its media: files are read here.

    Args:
        request_id: 1 to 128 printable ASCII characters.
        max_tokens: takes the place of the one in `sampling`.

    Raises:
        InvalidRequest: EMPTY_PROMPT, MESSAGE_ORDER, MALFORMED_REQUEST (a lone surrogate), FIELD_OUT_OF_RANGE,
            MEDIA_EMPTY, MEDIA_TOO_LARGE, TEXT_TOO_LARGE, and what the media raise.
        OSError: for a path that cannot be read.
    """
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest.out_of_range("request_id", request_id, "1 to 128 printable ASCII characters")
    _check_text(model, "model")
    _check_order(messages)
    request = rpb.GenerateRequest(request_id=request_id, model=model)
    turns = request.prompt.conversation.turns
    for i, message in enumerate(messages):
        turn = turns.add(role=_ROLES[message.role])
        for j, part in enumerate(parts_of(message.content)):
            item = f"messages[{i}].content[{j}]"
            if isinstance(part, str):
                _check_text(part, item)
                turn.parts.add(text=part)
                continue
            try:
                request.media.append(_medium(part))
            except InvalidRequest as error:
                raise error.at(item) from error.__cause__
            turn.parts.add(slot=len(request.media) - 1)
    _sampling(request.sampling, sampling or SamplingParams(), max_tokens)
    size = request.ByteSize()
    if size > CLIENT_MESSAGE_BYTES:
        raise InvalidRequest(
            "MEDIA_TOO_LARGE" if request.media else "TEXT_TOO_LARGE",
            f"the request has {size} bytes, {CLIENT_MESSAGE_BYTES} are taken",
            facts={"bytes": size, "limit": CLIENT_MESSAGE_BYTES},
        )
    return request


def _check_order(messages: Sequence[Message]) -> None:
    if all(part == "" for message in messages for part in parts_of(message.content)):
        raise InvalidRequest("EMPTY_PROMPT", "the request has neither text nor media")
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


def _medium(part: Image | Video | Frames) -> pb.Media:
    if isinstance(part, Video):
        data = encoded(part.source, limit=CLIENT_MESSAGE_BYTES)
        assert isinstance(data, bytes), "a Video takes files only"
        return pb.Media(kind=pb.MEDIA_KIND_VIDEO, data=data, sampling=_media_sampling(part))
    if isinstance(part, Frames):
        return pb.Media(kind=pb.MEDIA_KIND_VIDEO, frames=_frames(part))
    picture = encoded(part.source, part.layout, limit=CLIENT_MESSAGE_BYTES)
    if isinstance(picture, Raw):
        return pb.Media(kind=pb.MEDIA_KIND_IMAGE, frames=pb.FrameSequence(frames=[_frame(picture)]))
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
    first: Raw | None = None
    size = 0
    for i, image in enumerate(part.images):
        assert isinstance(image, Image), "Frames makes an Image of each"
        try:
            picture = encoded(image.source, image.layout, limit=CLIENT_MESSAGE_BYTES)
            if isinstance(picture, Raw):
                first = first or picture
                _check_same_size(i, first, picture)
            size += len(picture.data if isinstance(picture, Raw) else picture)
            check_bytes(size, CLIENT_MESSAGE_BYTES)
        except InvalidRequest as error:
            error.facts.setdefault("index", i)
            raise
        frame = sequence.frames.add()
        frame.CopyFrom(_frame(picture))
        if part.timestamps is not None:
            frame.header.frame_offset.CopyFrom(to_duration(part.timestamps[i]))
    return sequence


def _frame(picture: Raw | bytes) -> pb.Frame:
    if not isinstance(picture, Raw):
        return pb.Frame(data=picture)
    size = pb.Size(height=picture.height, width=picture.width)
    header = pb.FrameHeader(raw=pb.RawLayout(size=size, channels=picture.channels))
    return pb.Frame(header=header, data=picture.data)


def _check_same_size(index: int, first: Raw, picture: Raw) -> None:
    if (picture.height, picture.width) != (first.height, first.width):
        raise InvalidRequest(
            "FRAME_LAYOUT",
            f"frame {index} is {picture.width} x {picture.height} pixels, the first is {first.width} x {first.height}",
            facts={"index": index, "height": picture.height, "width": picture.width},
        )


def _sampling(message: pb.SamplingParams, params: SamplingParams, max_tokens: int | None) -> None:
    most = check_max_tokens(max_tokens)
    if params.temperature is not None:
        message.temperature = params.temperature
    if params.seed is not None:
        message.seed = params.seed
    most = params.max_tokens if most is None else most
    if most is not None:
        message.max_tokens = most


# -- responses ---------------------------------------------------------------------------------------------------------


class Reader:
    """Reads the responses of one answer, in order."""

    def __init__(self) -> None:
        self._attempt = 0
        self._index = 0
        self._units: list[tuple[int, int]] = []  # of each frame of the timeline
        self._visible = 0

    def read(self, response: rpb.GenerateResponse) -> list[Event]:
        """The events of a response; none for what is not the caller's.

        Raises ServerError INTERNAL if tokens are missing or repeated.
        """
        kind = response.WhichOneof("event")
        if kind == "started":
            return self._started(response.started)
        if kind == "tokens" and response.tokens.attempt >= self._attempt:
            return [self._tokens(response.tokens)]
        if kind == "visible" and response.visible.attempt >= self._attempt:
            return [self._see(response.visible)]
        if kind == "finished":
            return self._finished(response.finished)
        return []

    def _started(self, started: pb.Started) -> list[Event]:
        first = self._attempt == 0
        self._attempt = max(started.attempt, 1)
        if not first:
            return []  # another attempt goes on with the same timeline
        self._units = [(frame.slot, frame.unit) for frame in started.frames]
        return [Started(tuple(map(_timeline_frame, started.frames)), started.prompt_tokens)]

    def _tokens(self, tokens: pb.Tokens) -> Token:
        if tokens.index != self._index:
            raise ServerError(
                "INTERNAL",
                f"token {self._index} was due and token {tokens.index} came",
                facts={"due": self._index, "came": tokens.index},
            )
        self._index += len(tokens.ids)
        return Token(tokens.text.decode(), tuple(tokens.ids), tokens.index, self._visible)

    def _see(self, visible: pb.Visible) -> FramesVisible:
        dropped, seen = self._frames_of(visible.first), self._frames_of(visible.count)
        self._visible = seen - dropped
        until = visible.visible_until_offset if visible.HasField("visible_until_offset") else None
        return FramesVisible(self._visible, None if until is None else to_seconds(until), visible.index, dropped)

    def _frames_of(self, units: int) -> int:
        """How many frames the first `units` units of the timeline hold: one each, or as many as the family pairs."""
        order = list(dict.fromkeys(self._units))
        held = set(order[:units])
        return sum(unit in held for unit in self._units)

    def _finished(self, finished: pb.Finished) -> list[Event]:
        end = Finished(_REASONS.get(finished.reason, "other"), _usage(finished.usage), _stage_times(finished.times))
        if not finished.text:
            return [end]
        return [Token(finished.text.decode(), (), self._index, self._visible), end]


def _timeline_frame(frame: pb.TimelineFrame) -> TimelineFrame:
    return TimelineFrame(
        slot=frame.slot,
        index=frame.index,
        unit=frame.unit,
        offset=to_seconds(frame.frame_offset) if frame.HasField("frame_offset") else None,
        grid=(frame.grid.t, frame.grid.h, frame.grid.w),
        tokens=frame.tokens,
        at_index=frame.at_index,
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        visual_tokens=usage.visual_tokens,
        output_tokens=usage.output_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens if usage.HasField("cached_prompt_tokens") else None,
        media=tuple(map(_media_usage, usage.media)),
    )


def _media_usage(medium: pb.MediaUsage) -> MediaUsage:
    return MediaUsage(
        kind=_KINDS.get(medium.kind, "other"),
        format=medium.format,
        frames_in_file=medium.frames_in_file,
        frames_decoded=medium.frames_decoded,
        frames_used=medium.frames_used,
        grid=(medium.grid.t, medium.grid.h, medium.grid.w),
        tokens=medium.tokens,
        source_size=(medium.source_size.height, medium.source_size.width),
        resized_size=(medium.resized_size.height, medium.resized_size.width),
        offsets=tuple(map(to_seconds, medium.frame_offsets)),
        flags=tuple(medium.flags),
        units=medium.units,
        units_cached=medium.units_cached if medium.HasField("units_cached") else None,
    )


def _stage_times(times: pb.StageTimes) -> StageTimes:
    said: dict[str, float] = {}
    for field, value in times.ListFields():
        assert isinstance(value, Duration), f"{field.name} is no duration"
        said[field.name] = to_seconds(value)
    return StageTimes(**said)


def to_models(response: rpb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(
        ModelInfo(
            name=model.name,
            family=model.family,
            context_limit=model.context_limit,
            operations=tuple(_OPERATIONS[operation] for operation in model.operations if operation in _OPERATIONS),
            media=tuple(_KINDS.get(kind, "other") for kind in model.media_kinds),
            layers=model.layers,
            ready=model.ready,
        )
        for model in response.models
    )
