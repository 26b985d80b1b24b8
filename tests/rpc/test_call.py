"""Calls against a real server: what they raise, and that nothing of them is left, whoever ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio
import pytest

from chiasm.errors import Cancelled, ConnectionFailed, DeadlineExceeded, InvalidRequest, Unavailable, Unsupported
from chiasm.rpc.call import answered, streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc, router_pb2, router_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class Encoder(encoder_pb2_grpc.EncoderServicer):
    """Answers each request with its number, until one names what should happen."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def Encode(
        self, request_iterator: AsyncIterator[encoder_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        count = 0
        try:
            async for request in request_iterator:
                if request.open.item == "refuse":
                    raise InvalidRequest("FIELD_MISSING", "seed is missing", item="x", facts={"field": "seed"})
                if request.open.item == "end":
                    return
                if request.open.item == "break":
                    await context.abort(grpc.StatusCode.UNAVAILABLE)
                count += 1
                yield encoder_pb2.EncodeResponse(sized=encoder_pb2.EncodeSized(revision=count))
        finally:
            self.left.set()

    async def Info(self, request: encoder_pb2.EncoderInfoRequest, context: Context) -> encoder_pb2.EncoderInfoResponse:
        try:
            await asyncio.sleep(3600)
        finally:
            self.left.set()
        return encoder_pb2.EncoderInfoResponse()


class Router(router_pb2_grpc.RouterServicer):
    async def Upload(
        self, request_iterator: AsyncIterator[router_pb2.UploadRequest], context: Context
    ) -> router_pb2.UploadResponse:
        count = 0
        async for request in request_iterator:
            if request.chunk.last:
                raise InvalidRequest("UPLOAD_PROTOCOL", "too much")
            count += len(request.chunk.data)
        return router_pb2.UploadResponse(byte_length=count)


class Requests:
    """Requests that name `items`, and then wait for ever unless told otherwise."""

    def __init__(self, *items: str, ends: bool = False, fails: Exception | None = None) -> None:
        self.items = items
        self.ends = ends
        self.fails = fails
        self.closed = False

    async def __aiter__(self) -> AsyncGenerator[encoder_pb2.EncodeRequest, None]:
        try:
            for item in self.items:
                yield encoder_pb2.EncodeRequest(open=encoder_pb2.EncodeOpen(item=item))
            if self.fails is not None:
                raise self.fails
            if not self.ends:
                await asyncio.sleep(3600)
        finally:
            self.closed = True


async def chunks(*data: bytes, last: bool = False) -> AsyncGenerator[router_pb2.UploadRequest, None]:
    for piece in data:
        yield router_pb2.UploadRequest(chunk=common_pb2.MediaChunk(data=piece, last=last))
    if last:
        await asyncio.sleep(3600)


@pytest.fixture
async def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
async def server(encoder: Encoder) -> AsyncIterator[Server]:
    built = Server()
    built.add("chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, encoder)
    built.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, Router())
    async with built:
        yield built


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(server.target) as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> encoder_pb2_grpc.EncoderAsyncStub:
    return encoder_pb2_grpc.EncoderStub(channel)


def sending() -> list[str]:
    """Tasks that still send requests, gRPC's own among them."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return [name for name in names if name == "_write" or name.endswith("_consume_request_iterator")]


async def revisions(responses: AsyncGenerator[encoder_pb2.EncodeResponse, None]) -> list[int]:
    async with aclosing(responses):
        return [response.sized.revision async for response in responses]


async def test_responses_come_in_order_and_the_requests_are_closed(stub: encoder_pb2_grpc.EncoderAsyncStub) -> None:
    requests = Requests("a", "b", "c", ends=True)
    assert await revisions(streamed(stub.Encode(), requests)) == [1, 2, 3]
    assert requests.closed
    assert not sending()


async def test_a_call_the_server_ends_leaves_no_task_behind(stub: encoder_pb2_grpc.EncoderAsyncStub) -> None:
    requests = Requests("a", "end")
    assert await revisions(streamed(stub.Encode(), requests)) == [1]
    assert requests.closed, "they would have waited for ever"
    assert not sending()


async def test_a_refusal_is_raised_as_its_class(stub: encoder_pb2_grpc.EncoderAsyncStub) -> None:
    requests = Requests("a", "refuse")
    with pytest.raises(InvalidRequest) as caught:
        await revisions(streamed(stub.Encode(), requests))
    assert (caught.value.reason, caught.value.item, caught.value.facts) == ("FIELD_MISSING", "x", {"field": "seed"})
    assert requests.closed


@pytest.mark.parametrize("bytes_each", [0, 200_000])
async def test_a_refusal_is_heard_by_who_is_still_sending(
    stub: encoder_pb2_grpc.EncoderAsyncStub, bytes_each: int
) -> None:
    async def many() -> AsyncGenerator[encoder_pb2.EncodeRequest, None]:
        yield encoder_pb2.EncodeRequest(open=encoder_pb2.EncodeOpen(item="refuse"))
        while True:
            yield encoder_pb2.EncodeRequest(chunk=common_pb2.MediaChunk(data=bytes(bytes_each)))

    for _ in range(20):
        with pytest.raises(InvalidRequest):
            await revisions(streamed(stub.Encode(), many()))


async def test_closing_cancels_the_call(encoder: Encoder, stub: encoder_pb2_grpc.EncoderAsyncStub) -> None:
    requests = Requests("a")
    responses = streamed(stub.Encode(), requests)
    assert (await anext(responses)).sized.revision == 1
    assert sending() == ["_write"]
    await responses.aclose()
    assert requests.closed and not sending()
    await asyncio.wait_for(encoder.left.wait(), 10)


async def test_a_reader_that_is_cancelled_cancels_the_call(
    encoder: Encoder, stub: encoder_pb2_grpc.EncoderAsyncStub
) -> None:
    requests = Requests("a")
    reading = asyncio.create_task(revisions(streamed(stub.Encode(), requests)))
    waiting = asyncio.create_task(encoder.left.wait())
    await asyncio.wait([waiting], timeout=0.2)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert requests.closed
    await asyncio.wait_for(waiting, 10)


async def test_what_goes_wrong_in_the_requests_is_raised_and_the_server_sees_no_end(
    encoder: Encoder, stub: encoder_pb2_grpc.EncoderAsyncStub
) -> None:
    fault = OSError("the file is gone")
    with pytest.raises(OSError, match="the file is gone") as caught:
        await revisions(streamed(stub.Encode(), Requests("a", fails=fault)))
    assert caught.value is fault
    await asyncio.wait_for(encoder.left.wait(), 10)


async def test_a_call_that_somebody_else_cancels_is_not_a_cancelled_reader(
    stub: encoder_pb2_grpc.EncoderAsyncStub,
) -> None:
    call = stub.Encode()
    responses = streamed(call, Requests("a"))
    await anext(responses)
    call.cancel()
    with pytest.raises(Cancelled):
        await anext(responses)


async def test_a_connection_that_breaks_is_told_from_one_that_was_never_there(
    stub: encoder_pb2_grpc.EncoderAsyncStub,
) -> None:
    with pytest.raises(Unavailable) as caught:
        await revisions(streamed(stub.Encode(), Requests("a", "break")))
    assert caught.value.reason == "CONNECTION_LOST"
    async with Server() as gone:
        target = gone.target
    async with connect(target) as nowhere:
        with pytest.raises(ConnectionFailed):
            await revisions(streamed(encoder_pb2_grpc.EncoderStub(nowhere).Encode(), Requests("a")))
        with pytest.raises(ConnectionFailed):
            await answered(encoder_pb2_grpc.EncoderStub(nowhere).Info(encoder_pb2.EncoderInfoRequest()))


async def test_one_answer_and_its_deadline(encoder: Encoder, stub: encoder_pb2_grpc.EncoderAsyncStub) -> None:
    with pytest.raises(DeadlineExceeded):
        await answered(stub.Info(encoder_pb2.EncoderInfoRequest(), timeout=0.05))
    await asyncio.wait_for(encoder.left.wait(), 10)


async def test_requests_pass_interceptors(server: Server) -> None:
    class Passing(grpc.aio.StreamUnaryClientInterceptor):
        async def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
            return await continuation(details, requests)

    async with connect(server.target, interceptors=[Passing()]) as channel:
        router: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
        assert (await answered(router.Upload(), chunks(b"abc", b"de"))).byte_length == 5


async def test_requests_of_one_answer(channel: grpc.aio.Channel) -> None:
    router: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
    assert (await answered(router.Upload(), chunks(b"abc", b"de"))).byte_length == 5
    with pytest.raises(InvalidRequest):
        await answered(router.Upload(), chunks(b"abc", last=True))
    assert not sending()


async def test_a_call_with_its_own_request_needs_none(channel: grpc.aio.Channel) -> None:
    router: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
    with pytest.raises(Unsupported) as caught:
        async for _ in streamed(router.Generate(router_pb2.GenerateRequest())):
            pass
    assert caught.value.code == "UNIMPLEMENTED"


async def test_a_server_that_has_heard_enough_ends_well_while_requests_are_still_sent() -> None:
    async def many() -> AsyncGenerator[encoder_pb2.EncodeRequest, None]:
        yield encoder_pb2.EncodeRequest(open=encoder_pb2.EncodeOpen(item="once"))
        yield encoder_pb2.EncodeRequest(open=encoder_pb2.EncodeOpen(item="end"))
        for _ in range(20):
            yield encoder_pb2.EncodeRequest(chunk=common_pb2.MediaChunk(data=bytes(1 << 20)))

    server = Server("127.0.0.1:0")
    server.add("chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, Encoder())
    async with server, connect(server.target) as channel:
        for _ in range(30):
            told = [response async for response in streamed(encoder_pb2_grpc.EncoderStub(channel).Encode(), many())]
            assert len(told) == 1
