"""A real server on a free port: health, reflection, errors with their details, and what is not served."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from chiasm.errors import (
    Cancelled,
    ChiasmError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unsupported,
)
from chiasm.rpc import limits
from chiasm.rpc.channel import connect, user_agent
from chiasm.rpc.server import Server
from chiasm.rpc.status import INTERNAL_MESSAGE, from_rpc_error
from chiasm.rpc.v1 import (
    common_pb2,
    decoder_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

SERVICES = ("chiasm.rpc.v1.Router", "chiasm.rpc.v1.Encoder", "chiasm.rpc.v1.Decoder")
Context = grpc.aio.ServicerContext[Any, Any]


class Router(router_pb2_grpc.RouterServicer):
    """Does what the request's model name says."""

    def __init__(self) -> None:
        self.seen: dict[str, str | bytes] = {}
        self.sent = 0
        self.left = asyncio.Event()

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        self.seen = dict(context.invocation_metadata() or ())
        return router_pb2.ListModelsResponse(models=[router_pb2.Model(name="x" * 6 * limits.MIB)])

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        try:
            if request.model == "refused":
                raise InvalidRequest(
                    "CONTEXT_LENGTH_EXCEEDED",
                    "9 tokens are needed, 8 fit",
                    item="messages[0].content[1]",
                    facts={"needed": 9, "limit": 8, "fits_with": "max_frames=3"},
                )
            if request.model == "broken":
                raise ZeroDivisionError("division of /secret by zero")
            count = 1 if request.model == "late" else 1_000_000
            for index in range(count):
                self.sent += 1
                yield router_pb2.GenerateResponse(tokens=common_pb2.Tokens(index=index, ids=[index]))
                await asyncio.sleep(0.001)
            raise Overloaded("TENANT_QUOTA", "2 run, 2 may", retry_after=0.5, facts={"running": 2})
        finally:
            self.left.set()

    async def Estimate(self, request: router_pb2.EstimateRequest, context: Context) -> router_pb2.EstimateResponse:
        if request.model == "cancelled":
            raise Cancelled("told to")
        raise DeadlineExceeded("1 s is over", stage="encode", request_id="r-7")

    async def Upload(
        self, request_iterator: AsyncIterator[router_pb2.UploadRequest], context: Context
    ) -> router_pb2.UploadResponse:
        count = 0
        async for message in request_iterator:
            count += len(message.chunk.data)
        return router_pb2.UploadResponse(byte_length=count)


class Encoder(encoder_pb2_grpc.EncoderServicer):
    """Writes into the context in place of yielding."""

    async def Encode(  # type: ignore[override]  # the stubs know generators only, gRPC knows both
        self, request_iterator: AsyncIterator[encoder_pb2.EncodeRequest], context: Context
    ) -> None:
        async for request in request_iterator:
            if request.WhichOneof("message") != "open":
                raise InvalidRequest("MESSAGE_ORDER", "the first message is not `open`")
            await context.write(encoder_pb2.EncodeResponse(sized=encoder_pb2.EncodeSized(revision=1)))


@pytest.fixture
async def router() -> Router:
    return Router()


@pytest.fixture
async def server(router: Router) -> AsyncIterator[Server]:
    built = Server()
    built.add(SERVICES[0], router_pb2_grpc.add_RouterServicer_to_server, router)
    built.add(SERVICES[1], encoder_pb2_grpc.add_EncoderServicer_to_server, Encoder())
    built.add(SERVICES[2], decoder_pb2_grpc.add_DecoderServicer_to_server, decoder_pb2_grpc.DecoderServicer())
    async with built:
        yield built


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(server.target) as opened:
        yield opened


def stub(channel: grpc.aio.Channel) -> router_pb2_grpc.RouterAsyncStub:
    return router_pb2_grpc.RouterStub(channel)


async def failure(call: Any) -> ChiasmError:
    """How an awaited call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def health(channel: grpc.aio.Channel, service: str) -> str:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def test_health_tells_alive_from_ready(server: Server, channel: grpc.aio.Channel) -> None:
    assert await health(channel, "liveness") == "SERVING"
    for name in ("", "readiness", *SERVICES):
        assert await health(channel, name) == "NOT_SERVING"
    await server.set_ready(True)
    for name in ("", "readiness", "liveness", *SERVICES):
        assert await health(channel, name) == "SERVING"
    await server.set_ready(False)
    assert await health(channel, "readiness") == "NOT_SERVING"
    assert await health(channel, "liveness") == "SERVING"


async def test_an_unknown_service_has_no_health(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(channel, "chiasm.rpc.v1.Nothing")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def reflect(channel: grpc.aio.Channel, **request: str) -> reflection_pb2.ServerReflectionResponse:
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(**request)

    async for response in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask()):
        return response
    raise AssertionError("reflection did not answer")


async def test_every_method_found_by_reflection_answers_unimplemented_until_it_is_built() -> None:
    bare = Server()
    bare.add(SERVICES[0], router_pb2_grpc.add_RouterServicer_to_server, router_pb2_grpc.RouterServicer())
    bare.add(SERVICES[1], encoder_pb2_grpc.add_EncoderServicer_to_server, encoder_pb2_grpc.EncoderServicer())
    bare.add(SERVICES[2], decoder_pb2_grpc.add_DecoderServicer_to_server, decoder_pb2_grpc.DecoderServicer())
    called = []
    async with bare, connect(bare.target) as channel:
        listed = await reflect(channel, list_services="")
        names = [service.name for service in listed.list_services_response.service]
        assert set(SERVICES) < set(names)
        for name in SERVICES:
            answer = await reflect(channel, file_containing_symbol=name)
            pool = descriptor_pool.DescriptorPool()
            files = [
                descriptor_pb2.FileDescriptorProto.FromString(data)
                for data in answer.file_descriptor_response.file_descriptor_proto
            ]
            await add_with_imports(channel, pool, files)
            for method in pool.FindServiceByName(name).methods:
                path = f"/{name}/{method.name}"
                request = message_factory.GetMessageClass(method.input_type)().SerializeToString()
                error = await failure(call(channel, path, request, method.client_streaming, method.server_streaming))
                assert isinstance(error, Unsupported), path
                assert (error.code, error.reason) == ("UNIMPLEMENTED", "UNIMPLEMENTED")
                assert error.facts == {"method": method.name}
                called.append(path)
    assert len(called) == 11


async def add_with_imports(
    channel: grpc.aio.Channel,
    pool: descriptor_pool.DescriptorPool,
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    """Adds files to the pool after everything they import, as a client without our stubs would."""
    known = {file.name: file for file in files}
    added: set[str] = set()

    async def add(name: str) -> None:
        if name in added:
            return
        if name not in known:
            answer = await reflect(channel, file_by_filename=name)
            for data in answer.file_descriptor_response.file_descriptor_proto:
                file = descriptor_pb2.FileDescriptorProto.FromString(data)
                known[file.name] = file
        for imported in known[name].dependency:
            await add(imported)
        pool.Add(known[name])
        added.add(name)

    for file in files:
        await add(file.name)


async def call(channel: grpc.aio.Channel, path: str, request: bytes, streams: bool, streamed: bool) -> None:
    """Calls a method by its path with one serialized request, and reads to the end."""

    async def requests() -> AsyncIterator[bytes]:
        yield request

    anything: Any = channel  # the stubs give a call without serializers no type
    if streams and streamed:
        async for _ in anything.stream_stream(path)(requests()):
            pass
    elif streams:
        await anything.stream_unary(path)(requests())
    elif streamed:
        async for _ in anything.unary_stream(path)(request):
            pass
    else:
        await anything.unary_unary(path)(request)


async def test_a_method_that_does_not_exist_is_unimplemented(channel: grpc.aio.Channel) -> None:
    error = await failure(call(channel, "/chiasm.rpc.v1.Router/Nothing", b"", False, False))
    assert isinstance(error, Unsupported)


async def test_a_refusal_arrives_with_its_facts(channel: grpc.aio.Channel) -> None:
    answers = stub(channel).Generate(router_pb2.GenerateRequest(model="refused"))
    error = await failure(anext(aiter(answers)))
    assert isinstance(error, InvalidRequest)
    assert (error.reason, error.item) == ("CONTEXT_LENGTH_EXCEEDED", "messages[0].content[1]")
    assert error.facts == {"needed": 9, "limit": 8, "fits_with": "max_frames=3"}
    assert not error.retryable


async def test_a_refusal_sends_no_header_first(channel: grpc.aio.Channel) -> None:
    answers = stub(channel).Generate(router_pb2.GenerateRequest(model="refused"))
    assert await answers.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not list(await answers.initial_metadata() or ())


async def test_a_failure_after_messages_arrives_behind_them(channel: grpc.aio.Channel) -> None:
    received = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for answer in stub(channel).Generate(router_pb2.GenerateRequest(model="late")):
            received.append(answer.tokens.index)
    error = from_rpc_error(caught.value, answered=True)
    assert received == [0]
    assert isinstance(error, Overloaded)
    assert (error.retry_after, error.facts) == (0.5, {"running": 2})


async def test_an_unforeseen_error_is_logged_here_and_constant_there(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="chiasm.rpc.server"):
        error = await failure(anext(aiter(stub(channel).Generate(router_pb2.GenerateRequest(model="broken")))))
    assert isinstance(error, ServerError)
    assert error.message == INTERNAL_MESSAGE
    assert "division of /secret by zero" in caplog.text


async def test_unary_errors_keep_stage_and_class(channel: grpc.aio.Channel) -> None:
    error = await failure(stub(channel).Estimate(router_pb2.EstimateRequest(model="slow")))
    assert isinstance(error, DeadlineExceeded)
    assert (error.stage, error.request_id) == ("encode", "r-7")
    assert isinstance(await failure(stub(channel).Estimate(router_pb2.EstimateRequest(model="cancelled"))), Cancelled)


async def test_a_synchronous_client_learns_the_same(server: Server) -> None:
    def ask() -> ChiasmError:
        with grpc.insecure_channel(server.target) as blocking:
            calls = router_pb2_grpc.RouterStub(blocking)
            with pytest.raises(grpc.RpcError) as caught:
                next(calls.Generate(router_pb2.GenerateRequest(model="refused")))
        error: Any = caught.value  # a call as well, which the stubs hold to be impossible
        return from_rpc_error(error)

    error = await asyncio.to_thread(ask)
    assert isinstance(error, InvalidRequest)
    assert error.facts == {"needed": 9, "limit": 8, "fits_with": "max_frames=3"}


async def test_streams_of_requests_pass(channel: grpc.aio.Channel) -> None:
    async def pieces() -> AsyncIterator[router_pb2.UploadRequest]:
        yield router_pb2.UploadRequest(header=router_pb2.UploadHeader(upload_id=bytes(16)))
        for _ in range(3):
            yield router_pb2.UploadRequest(chunk=common_pb2.MediaChunk(data=bytes(limits.CHUNK_BYTES)))

    assert (await stub(channel).Upload(pieces())).byte_length == 3 * limits.CHUNK_BYTES


class Holding(router_pb2_grpc.RouterServicer):
    """Says who else holds a request while the next one is awaited."""

    async def Upload(
        self, request_iterator: AsyncIterator[router_pb2.UploadRequest], context: Context
    ) -> router_pb2.UploadResponse:
        first = await anext(request_iterator)
        following = asyncio.ensure_future(anext(request_iterator))
        await asyncio.sleep(0)
        assert not following.done(), "it comes when this one was counted"
        holders = sys.getrefcount(first) - len(["this frame", "the argument of that call"])
        await context.send_initial_metadata(())
        await following
        return router_pb2.UploadResponse(byte_length=holders)


async def test_no_request_of_a_stream_is_kept_until_the_next_one_comes() -> None:
    server = Server().add(SERVICES[0], router_pb2_grpc.add_RouterServicer_to_server, Holding())
    async with server, connect(server.target) as channel:
        call = stub(channel).Upload()
        await call.write(router_pb2.UploadRequest(chunk=common_pb2.MediaChunk(data=bytes(limits.CHUNK_BYTES))))
        await call.initial_metadata()
        await call.write(router_pb2.UploadRequest())
        await call.done_writing()
        assert (await call).byte_length == 0


async def test_a_handler_that_writes_into_the_context_is_served_too(channel: grpc.aio.Channel) -> None:
    async def messages() -> AsyncIterator[encoder_pb2.EncodeRequest]:
        yield encoder_pb2.EncodeRequest(open=encoder_pb2.EncodeOpen(slot=1))
        yield encoder_pb2.EncodeRequest(go=encoder_pb2.EncodeGo())

    encoder: encoder_pb2_grpc.EncoderAsyncStub = encoder_pb2_grpc.EncoderStub(channel)
    received = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for answer in encoder.Encode(messages()):
            received.append(answer.sized.revision)
    error = from_rpc_error(caught.value, answered=True)
    assert received == [1]
    assert isinstance(error, InvalidRequest)
    assert error.reason == "MESSAGE_ORDER"


async def test_a_caller_who_leaves_ends_the_handler(router: Router, channel: grpc.aio.Channel) -> None:
    answers = stub(channel).Generate(router_pb2.GenerateRequest(model="endless"))
    await anext(aiter(answers))
    answers.cancel()
    await asyncio.wait_for(router.left.wait(), 30)
    assert router.sent < 1_000_000


async def test_a_message_beyond_the_limit_is_refused_and_within_it_passes(server: Server, router: Router) -> None:
    async with connect(server.target) as channel:
        assert len((await stub(channel).ListModels(router_pb2.ListModelsRequest())).models[0].name) == 6 * limits.MIB
        assert str(router.seen["user-agent"]).startswith(user_agent())
    async with connect(server.target, message_bytes=4 * limits.MIB) as channel:
        error = await failure(stub(channel).ListModels(router_pb2.ListModelsRequest()))
        assert isinstance(error, Overloaded)
        assert (error.reason, error.retryable) == ("MESSAGE_TOO_LARGE", False)


async def test_options_of_the_user_win(server: Server) -> None:
    options = {"grpc.max_receive_message_length": 1024}
    async with connect(server.target, options=options) as channel:
        error = await failure(stub(channel).ListModels(router_pb2.ListModelsRequest()))
    assert isinstance(error, Overloaded)


async def test_nobody_there_is_a_failed_connection(server: Server) -> None:
    target = server.target
    await server.stop()
    async with connect(target) as channel:
        error = await failure(stub(channel).ListModels(router_pb2.ListModelsRequest()))
    assert isinstance(error, ConnectionFailed)


async def test_stopping_waits_for_a_running_call_and_takes_no_new_one() -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    class Slow(router_pb2_grpc.RouterServicer):
        async def ListModels(
            self, request: router_pb2.ListModelsRequest, context: Context
        ) -> router_pb2.ListModelsResponse:
            entered.set()
            await release.wait()
            return router_pb2.ListModelsResponse()

    server = Server().add(SERVICES[0], router_pb2_grpc.add_RouterServicer_to_server, Slow())
    await server.start()
    async with connect(server.target) as channel, connect(server.target) as other:
        running = asyncio.ensure_future(stub(channel).ListModels(router_pb2.ListModelsRequest()))
        await entered.wait()
        stopping = asyncio.create_task(server.stop(grace=60))
        async with asyncio.timeout(60):
            found = await quick_failure(other)
            while not isinstance(found, ConnectionFailed):
                found = await quick_failure(other)
        assert not running.done()
        release.set()
        assert await running == router_pb2.ListModelsResponse()
        await stopping
        await server.wait()


async def quick_failure(channel: grpc.aio.Channel) -> ChiasmError | None:
    """How a short call fails now; None if it would wait."""
    try:
        await stub(channel).Estimate(router_pb2.EstimateRequest(), timeout=1)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def test_a_port_in_use_is_an_error() -> None:
    async with Server() as first:
        second = Server(first.target)
        with pytest.raises(OSError, match="cannot listen: Address already in use") as caught:
            await second.start()
        assert (caught.value.errno, caught.value.filename) == (errno.EADDRINUSE, first.target)
        await second.stop()


@pytest.mark.parametrize("address", ["203.0.113.7:0", "no-such-host.invalid:0", "127.0.0.1:words", "nothing"])
async def test_an_address_that_is_none_of_this_machine_is_an_error(address: str) -> None:
    with pytest.raises(OSError, match="cannot listen: "):
        Server(address).bind()


async def test_a_socket_file_is_served_and_only_its_owner_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = Server(f"unix:{path}").add(SERVICES[0], router_pb2_grpc.add_RouterServicer_to_server, Router())
    async with server, connect(server.target) as channel:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        error = await failure(stub(channel).Estimate(router_pb2.EstimateRequest()))
        assert isinstance(error, DeadlineExceeded)
    assert not path.exists(), "a server that stopped leaves no file"


async def test_a_socket_file_that_is_in_use_is_refused_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    async with Server(f"unix:{path}") as first:
        with pytest.raises(OSError, match="another process listens") as caught:
            Server(f"unix:{path}").bind()
        assert (caught.value.errno, caught.value.filename) == (errno.EADDRINUSE, str(path))
        async with connect(first.target) as channel:
            assert await health(channel, "liveness") == "SERVING", "the first still has it"


async def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        Server(f"unix:{path}").bind()
    assert path.read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        Server(f"unix:{tmp_path}/none/s").bind()
    with pytest.raises(OSError, match="at most 107 bytes"):
        Server(f"unix:{tmp_path}/{'s' * 108}").bind()


async def test_an_address_is_taken_before_the_services_are_there() -> None:
    server = Server()
    port = server.bind()
    assert port and server.target == f"127.0.0.1:{port}"
    other = Server(server.target)
    with pytest.raises(OSError, match="cannot listen"):
        other.bind()
    server.add(SERVICES[0], router_pb2_grpc.add_RouterServicer_to_server, Router())
    async with server, connect(server.target) as channel:
        assert server.port == port
        assert isinstance(await failure(stub(channel).Estimate(router_pb2.EstimateRequest())), DeadlineExceeded)


async def test_who_watches_health_is_told_and_not_waited_for() -> None:
    server = Server()
    await server.start()
    await server.set_ready(True)
    async with connect(server.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        words = aiter(watch)
        assert (await anext(words)).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.stop(grace=3600))
        assert (await anext(words)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await anext(words, None) is None
        await stopping


async def test_a_second_stop_cuts_the_wait_short() -> None:
    entered = asyncio.Event()

    class Slow(router_pb2_grpc.RouterServicer):
        async def ListModels(
            self, request: router_pb2.ListModelsRequest, context: Context
        ) -> router_pb2.ListModelsResponse:
            entered.set()
            await asyncio.sleep(3600)
            return router_pb2.ListModelsResponse()

    server = Server().add(SERVICES[0], router_pb2_grpc.add_RouterServicer_to_server, Slow())
    await server.start()
    async with connect(server.target) as channel:
        running = asyncio.ensure_future(failure(stub(channel).ListModels(router_pb2.ListModelsRequest())))
        await entered.wait()
        cancelled, stopping = (asyncio.create_task(server.stop(grace=3600)) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()  # whoever gives up waiting for a stop takes nothing from the others
        await asyncio.gather(cancelled, return_exceptions=True)
        await server.stop()
        await stopping
        assert (await running).code in ("UNAVAILABLE", "CANCELLED")
