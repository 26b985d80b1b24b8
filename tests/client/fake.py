"""A transport that replays responses and records what was asked, sent and cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import numpy as np
from blake3 import blake3

from chiasm.client import Opener
from chiasm.client.transport import Metadata
from chiasm.rpc.tensor import parts_of
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb

TEXT = "3 7 1 4"

MODELS = rpb.ListModelsResponse(
    models=[
        rpb.Model(
            name="fake",
            family="moss_vl",
            context_limit=64,
            operations=[rpb.OPERATION_GENERATE],
            media_kinds=[pb.MEDIA_KIND_IMAGE],
            layers=6,
            ready=True,
        )
    ]
)


def started(frames: int = 3, *, attempt: int = 1) -> rpb.GenerateResponse:
    """Frames of slot 0, a second apart, one to a unit."""
    placed = [
        pb.TimelineFrame(
            slot=0, index=i, unit=i, frame_offset=to_duration(i), grid=pb.Grid(t=1, h=4, w=4), tokens=5, at_index=7 * i
        )
        for i in range(frames)
    ]
    return rpb.GenerateResponse(started=pb.Started(attempt=attempt, frames=placed, prompt_tokens=30))


def visible(count: int, *, index: int = 0) -> rpb.GenerateResponse:
    seen = pb.Visible(attempt=1, index=index, count=count)
    if count:
        seen.visible_until_offset.CopyFrom(to_duration(count - 1))
    return rpb.GenerateResponse(visible=seen)


def tokens(index: int, text: str, *, attempt: int = 1) -> rpb.GenerateResponse:
    return rpb.GenerateResponse(tokens=pb.Tokens(attempt=attempt, index=index, ids=[100 + index], text=text.encode()))


def finished(*, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP, text: str = "") -> rpb.GenerateResponse:
    medium = pb.MediaUsage(
        kind=pb.MEDIA_KIND_VIDEO,
        format="mov,mp4",
        frames_in_file=3,
        frames_decoded=3,
        frames_used=3,
        grid=pb.Grid(t=3, h=4, w=4),
        tokens=15,
        source_size=pb.Size(height=60, width=80),
        resized_size=pb.Size(height=64, width=96),
        frame_offsets=[to_duration(i) for i in range(3)],
        flags=["thinned"],
        units=3,
        units_cached=2,
    )
    usage = pb.Usage(prompt_tokens=30, visual_tokens=15, output_tokens=len(TEXT), media=[medium])
    times = pb.StageTimes(encode=to_duration(0.25))
    return rpb.GenerateResponse(
        finished=pb.Finished(reason=reason, usage=usage, times=times, text=text.encode(), attempt=1)
    )


def answer(text: str = TEXT) -> list[rpb.GenerateResponse]:
    """A whole answer, a token for each character."""
    return [started(), visible(3), *(tokens(i, c) for i, c in enumerate(text)), finished()]


ESTIMATE = rpb.EstimateResponse(
    prompt_tokens=30,
    visual_tokens=15,
    context_limit=64,
    room=34,
    media=[rpb.MediaEstimate(usage=finished().finished.usage.media[0], entry_bytes=1 << 20)],
)

VECTOR = np.arange(6, dtype=np.float32) / 8


def embedding(data: bytes = VECTOR.tobytes(), dtype: pb.Dtype.ValueType = pb.DTYPE_FLOAT32) -> list[rpb.EmbedResponse]:
    """A whole one, of six numbers."""
    parts = parts_of(pb.TensorDescriptor(name="embedding", dtype=dtype, shape=[6]), data)
    end = rpb.EmbedResponse(finished=finished().finished)
    return [*(rpb.EmbedResponse(embedding=part) for part in parts), end]


class FakeTransport:
    """Replays `responses`; an exception among them is raised, `WAIT` waits until the call is cancelled.

    Attributes:
        sent: responses that were taken from it.
        cancelled: set when a call was closed before its last response. Read it from any thread.
        waiting: set when a call has come to `WAIT`.
        tasks: the tasks that ran the calls; a call must not change hands.
    """

    WAIT = "wait"

    def __init__(self, responses: Sequence[rpb.GenerateResponse | Exception | str] | None = None) -> None:
        self.responses = answer() if responses is None else list(responses)
        self.requests: list[rpb.GenerateRequest] = []
        self.timeouts: list[float | None] = []
        self.sent = 0
        self.cancelled = threading.Event()
        self.waiting = threading.Event()
        self.closed = False
        self.tasks: list[asyncio.Task[object] | None] = []

    @property
    def opener(self) -> Opener:
        async def opened() -> FakeTransport:
            return self

        return opened

    async def generate(
        self,
        request: rpb.GenerateRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - the signature of a transport
        metadata: Metadata = (),
    ) -> AsyncGenerator[rpb.GenerateResponse, None]:
        self.requests.append(request)
        self.timeouts.append(timeout)
        self.tasks.append(asyncio.current_task())
        complete = False
        try:
            for response in self.responses:
                if isinstance(response, Exception):
                    complete = True
                    raise response
                if isinstance(response, str):
                    self.waiting.set()
                    await asyncio.Event().wait()
                    continue
                await asyncio.sleep(0)
                self.sent += 1
                yield response
            complete = True
        finally:
            self.tasks.append(asyncio.current_task())
            if not complete:
                self.cancelled.set()

    async def embed(
        self,
        request: rpb.EmbedRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - the signature of a transport
        metadata: Metadata = (),
    ) -> AsyncGenerator[rpb.EmbedResponse, None]:
        self.timeouts.append(timeout)
        for response in embedding():
            yield response

    async def condition(
        self,
        request: rpb.ConditionRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - the signature of a transport
        metadata: Metadata = (),
    ) -> AsyncGenerator[rpb.ConditionResponse, None]:
        self.timeouts.append(timeout)
        for number, layer in enumerate(request.layers):
            described = pb.TensorDescriptor(name="states", layer=layer, dtype=pb.DTYPE_FLOAT32, shape=[2, 3])
            for part in parts_of(described, VECTOR.tobytes(), tensor=number):
                yield rpb.ConditionResponse(states=part)
        yield rpb.ConditionResponse(finished=finished().finished)

    async def estimate(
        self,
        request: rpb.EstimateRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - the signature of a transport
        metadata: Metadata = (),
    ) -> rpb.EstimateResponse:
        self.timeouts.append(timeout)
        return ESTIMATE

    async def upload(
        self,
        requests: AsyncIterator[rpb.UploadRequest],
        *,
        timeout: float | None,  # noqa: ASYNC109 - the signature of a transport
        metadata: Metadata = (),
    ) -> rpb.UploadResponse:
        taken = [request async for request in requests]
        data = b"".join(request.chunk.data for request in taken[1:])
        return rpb.UploadResponse(
            handle=taken[0].header.upload_id.hex(), byte_length=len(data), digest=blake3(data).digest()
        )

    async def list_models(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature of a transport
        metadata: Metadata = (),
    ) -> rpb.ListModelsResponse:
        return MODELS

    async def wait_ready(
        self,
        timeout: float,  # noqa: ASYNC109 - the signature of a transport
        *,
        metadata: Metadata = (),
    ) -> None:
        self.timeouts.append(timeout)

    async def close(self) -> None:
        self.closed = True
