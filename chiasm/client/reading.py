"""The server's words to the client's: events, usage, vectors, models, estimates, handles.

`Reader` turns the responses of one answer into events, in order. Knows no transport and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC
from importlib import import_module
from typing import Any, Literal

import numpy as np
from google.protobuf.duration_pb2 import Duration

from chiasm.client.events import (
    Conditioning,
    Embedding,
    Estimate,
    Event,
    Finished,
    FinishReason,
    FramesVisible,
    MediaEstimate,
    MediaKind,
    MediaUsage,
    ModelInfo,
    Operation,
    StageTimes,
    Started,
    StatesDtype,
    TimelineFrame,
    Token,
    TokenLogprobs,
    Usage,
)
from chiasm.client.media import Frames, Handle, Image, Video
from chiasm.errors import ServerError, Unsupported
from chiasm.rpc.tensor import Gathered, GatheredAll
from chiasm.rpc.times import to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb

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


class Reader:
    """Reads the responses of one answer, in order.

    Args:
        index: of the first token that is due.

    Attributes:
        attempt: the newest, from 1; 0 before the start.
        point: how to go on, as the server said it last.
    """

    def __init__(self, index: int = 0) -> None:
        self.attempt = 0
        self.point: rpb.ResumePoint | None = None
        self._index = index
        self._units: list[tuple[int, int]] = []  # of each frame of the timeline
        self._visible = 0

    def read(self, response: rpb.GenerateResponse) -> list[Event]:
        """The events of a response; none for what is not the caller's.

        Raises ServerError INTERNAL if tokens are missing or repeated.
        """
        kind = response.WhichOneof("event")
        if kind == "started":
            return self._started(response.started)
        if kind == "tokens" and response.tokens.attempt >= self.attempt:
            return [self._tokens(response.tokens)]
        if kind == "visible" and response.visible.attempt >= self.attempt:
            return [self._see(response.visible)]
        if kind == "finished":
            return self._finished(response.finished)
        if kind == "resume_point":
            self.point = response.resume_point
        return []

    def _started(self, started: pb.Started) -> list[Event]:
        first = self.attempt == 0
        self.attempt = max(started.attempt, 1)
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
        logprobs = tuple(map(_logprobs, tokens.logprobs))
        return Token(tokens.text.decode(), tuple(tokens.ids), tokens.index, self._visible, logprobs)

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
        reason = _REASONS.get(finished.reason, "other")
        end = Finished(reason, _usage(finished.usage), _stage_times(finished.times), finished.stop or None)
        if not finished.text:
            return [end]
        return [Token(finished.text.decode(), (), self._index, self._visible), end]


def _logprobs(logprobs: pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple((other.token_id, other.logprob) for other in logprobs.top)
    return TokenLogprobs(logprobs.drawn.token_id, logprobs.drawn.logprob, top)


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


def to_embedding(responses: Iterable[rpb.EmbedResponse], request_id: str) -> Embedding:
    """The vector of a call. Raises ServerError INTERNAL for one that is not whole, or not what was asked for."""
    vector, finished = Gathered(), None
    for response in responses:
        kind = response.WhichOneof("event")
        if kind == "embedding":
            try:
                vector.add(response.embedding)
            except ValueError as error:
                raise ServerError("INTERNAL", str(error)) from error
        elif kind == "finished":
            finished = response.finished
    said = vector.descriptor
    if finished is None or not vector.whole or said.dtype != pb.DTYPE_FLOAT32 or len(said.shape) != 1:
        raise ServerError("INTERNAL", "the embedding that came is no whole vector of 32-bit floats")
    numbers = np.frombuffer(vector.data, dtype="<f4").astype(np.float32, copy=False)
    return Embedding(numbers, _usage(finished.usage), _stage_times(finished.times), request_id)


class StatesReader:
    """Reads the responses of one conditioning, in order.

    Args:
        layers: that were asked for.
        dtype: in which their states were.
        alone: one layer was asked for by itself.
    """

    def __init__(self, layers: Sequence[int], dtype: StatesDtype, *, alone: bool) -> None:
        self._layers = tuple(layers)
        self._dtype = dtype
        self._alone = alone
        self._tensors = GatheredAll(len(self._layers))
        self._finished: pb.Finished | None = None

    def read(self, response: rpb.ConditionResponse) -> None:
        """Raises ServerError INTERNAL for a piece that cannot come next."""
        kind = response.WhichOneof("event")
        if kind == "states":
            try:
                self._tensors.add(response.states)
            except ValueError as error:
                raise ServerError("INTERNAL", str(error)) from error
        elif kind == "finished":
            self._finished = response.finished

    def whole(self, request_id: str, into: Literal["numpy", "torch"]) -> Conditioning:
        """Raises ServerError INTERNAL for states that are not whole, or not what was asked for."""
        said = [tensor.descriptor for tensor in self._tensors.tensors]
        code, number = _NUMBERS[self._dtype]
        right = [
            (one.layer, one.dtype, len(one.shape), [*one.shape]) == (layer, code, 2, [*said[0].shape])
            for one, layer in zip(said, self._layers, strict=False)
        ]
        if self._finished is None or not self._tensors.whole or not all(right):
            raise ServerError("INTERNAL", "the states that came are not those of the layers that were asked for")
        made = [
            np.frombuffer(tensor.buffer, dtype=number).reshape(tensor.descriptor.shape)
            for tensor in self._tensors.tensors
        ]
        states: Any = made[0] if self._alone else np.stack(made)
        if into == "torch":
            states = _tensor(states, self._dtype)
        usage, times = _usage(self._finished.usage), _stage_times(self._finished.times)
        return Conditioning(states, self._layers, self._dtype, usage, times, request_id)


_NUMBERS: dict[StatesDtype, tuple[pb.Dtype.ValueType, str]] = {
    "float32": (pb.DTYPE_FLOAT32, "<f4"),
    "bfloat16": (pb.DTYPE_BFLOAT16, "<u2"),
    "float16": (pb.DTYPE_FLOAT16, "<f2"),
}
"""By type: how the wire calls it, and as what its bytes are read. NumPy has no bfloat16."""


def torch_there() -> Any:
    """torch, which is loaded only by whoever asks for its tensors. Raises Unsupported where it is not installed."""
    try:
        return import_module("torch")
    except ImportError:
        raise Unsupported("FEATURE_DISABLED", "into='torch' needs torch, which is not installed") from None


def _tensor(states: Any, dtype: StatesDtype) -> Any:
    torch = torch_there()
    # As bits, which every release of torch takes; they are in memory of their own already.
    wide = states.view(np.int32 if dtype == "float32" else np.int16)
    return torch.from_numpy(wide).view(getattr(torch, dtype))


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


def to_estimate(response: rpb.EstimateResponse) -> Estimate:
    return Estimate(
        prompt_tokens=response.prompt_tokens,
        visual_tokens=response.visual_tokens,
        context_limit=response.context_limit,
        room=response.room,
        fits_with=response.fits_with,
        media=tuple(MediaEstimate(_media_usage(medium.usage), medium.entry_bytes) for medium in response.media),
    )


def to_handle(response: rpb.UploadResponse, header: pb.MediaHeader, medium: Image | Video | Frames) -> Handle:
    """The handle of an upload of `medium` whose header was `header`."""
    return Handle(
        response.handle,
        "video" if header.kind == pb.MEDIA_KIND_VIDEO else "image",
        byte_length=response.byte_length,
        expires_at=response.expire_time.ToDatetime(UTC) if response.HasField("expire_time") else None,
        listed=header.kind == pb.MEDIA_KIND_VIDEO and header.HasField("frames"),
        medium=medium,
    )
