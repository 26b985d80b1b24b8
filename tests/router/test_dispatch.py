"""One call to an encoder: its bytes go as they are of use, and what else is to be said does not wait behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from chiasm.errors import InvalidRequest
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.dispatch import Dispatch
from router.fleet import EncoderCalls, EncoderWorker, Worker
from router.media import Inline

COUNT = 50


class Encoder:
    """Takes whatever is sent to it at once, and says what it is told to say."""

    def __init__(self) -> None:
        self.heard: list[epb.EncodeRequest] = []
        self.says: asyncio.Queue[epb.EncodeResponse | None] = asyncio.Queue()

    async def reach(self) -> None:
        """It is here."""

    async def encode(
        self,
        requests: AsyncIterator[epb.EncodeRequest],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncGenerator[epb.EncodeResponse, None]:
        listening = asyncio.create_task(self._listen(requests))
        try:
            while True:
                saying = asyncio.create_task(self.says.get())
                await asyncio.wait({saying, listening}, return_when=asyncio.FIRST_COMPLETED)
                if listening.done():
                    listening.result()
                response = await saying
                if response is None:
                    return
                yield response
        finally:
            listening.cancel()

    async def _listen(self, requests: AsyncIterator[epb.EncodeRequest]) -> None:
        async for request in requests:
            self.heard.append(request)
        await asyncio.Event().wait()

    @property
    def frames(self) -> list[int]:
        return [request.chunk.frame for request in self.heard if request.HasField("chunk")]

    def say(self, **message: object) -> None:
        self.says.put_nowait(epb.EncodeResponse(**message))  # type: ignore[arg-type]


class Call:
    """A dispatch of so many frames, or of a file in as many pieces, that runs."""

    def __init__(self, *, listed: bool = True, credit: int = 100, digest: bytes | None = None) -> None:
        frames = [pb.Frame(header=pb.FrameHeader(), data=bytes([i])) for i in range(COUNT)]
        medium = pb.Media(kind=pb.MEDIA_KIND_VIDEO, frames=pb.FrameSequence(frames=frames, fps=1))
        if not listed:
            medium = pb.Media(kind=pb.MEDIA_KIND_VIDEO, data=bytes(COUNT << 20))
        self.encoder = Encoder()
        calls: EncoderCalls = self.encoder
        self.worker: EncoderWorker = Worker(bytes(16), calls)
        self.dispatch = Dispatch(epb.EncodeOpen(initial_credit=credit, file_digest=digest), Inline(medium))
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.dispatch.run(self.worker, lambda _: None, timeout=None)

    async def sent(self) -> int:
        """Frames or pieces that were sent when nothing moves any more."""
        for _ in range(40 * COUNT):
            await asyncio.sleep(0)
        return len(self.encoder.frames)

    async def end(self) -> None:
        self.encoder.says.put_nowait(None)
        await self.task
        assert self.worker.running == 0


async def test_frames_are_held_back_while_an_encoder_could_only_hold_them() -> None:
    call = Call()
    call.encoder.say(probed=epb.EncodeProbed())
    before = await call.sent()
    assert before <= 3
    call.dispatch.siblings(epb.EncodeSiblings())
    assert await call.sent() == before
    assert call.encoder.heard[-1].HasField("siblings"), "it does not wait behind bytes"
    call.dispatch.go(epb.EncodeGo())
    assert await call.sent() == COUNT
    assert call.encoder.frames == list(range(COUNT))
    assert [request.WhichOneof("message") for request in call.encoder.heard].index("go") <= before + 2
    await call.end()


async def test_frames_are_held_back_while_there_is_no_credit_for_their_units() -> None:
    call = Call()
    call.encoder.say(probed=epb.EncodeProbed())
    before = await call.sent()
    for unit in range(2):
        call.encoder.say(ready=epb.EncodeReady(unit=unit, entry=pb.Entry(byte_length=60)))
    await call.sent()
    call.dispatch.go(epb.EncodeGo())
    assert await call.sent() == before
    call.dispatch.attached(0)
    assert await call.sent() == COUNT
    await call.end()


async def test_frames_that_are_asked_for_after_go_are_held_back_too_while_there_is_no_credit() -> None:
    """Of a list that is remembered, and of which some entries are gone."""
    call = Call(digest=bytes(32))
    call.encoder.say(probed=epb.EncodeProbed(probe=pb.Probe()))
    call.encoder.say(sized=epb.EncodeSized())
    await call.sent()
    call.dispatch.go(epb.EncodeGo())
    for unit in range(2):
        call.encoder.say(ready=epb.EncodeReady(unit=unit, entry=pb.Entry(byte_length=60)))
    call.encoder.say(probed=epb.EncodeProbed(probe=pb.Probe(), bytes_wanted=True))
    assert await call.sent() <= 1
    call.dispatch.attached(0)
    assert await call.sent() == COUNT
    await call.end()


@pytest.mark.parametrize("gone", [False, True])
async def test_frames_that_tell_what_a_list_is_are_never_held_back(gone: bool) -> None:
    call = Call(digest=bytes(32))
    if gone:
        call.dispatch.go(epb.EncodeGo())
    call.encoder.say(probed=epb.EncodeProbed(bytes_wanted=True))
    assert await call.sent() == COUNT
    await call.end()


async def test_a_file_is_sent_whole_whatever_else_is_waited_for() -> None:
    call = Call(listed=False)
    assert await call.sent() == COUNT
    await call.end()


async def test_a_source_that_breaks_off_ends_the_call_with_its_error() -> None:
    class Broken(Inline):
        async def chunks(self) -> AsyncIterator[pb.MediaChunk]:
            yield pb.MediaChunk(frame=0, data=b"x", ends_frame=True)
            raise InvalidRequest("UPLOAD_PROTOCOL", "the upload of this medium broke off")

    call = Call()
    call.dispatch._source = Broken(pb.Media(kind=pb.MEDIA_KIND_VIDEO))
    with pytest.raises(InvalidRequest) as caught:
        await asyncio.wait_for(call.task, 5)
    assert caught.value.reason == "UPLOAD_PROTOCOL" and call.worker.running == 0
