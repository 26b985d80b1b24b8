"""The clients over a real socket: what is sent, what is retried, and that leaving stops the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from chiasm.client import AsyncClient, Client, Message, SamplingParams, Started, Token
from chiasm.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    IdleTimeout,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from chiasm.rpc.channel import user_agent
from chiasm.rpc.server import Server
from tests.client import fake
from tests.client.fake import TEXT, started, tokens
from tests.client.router import WAIT, ScriptedRouter, serving

DRAINING = Unavailable("DRAINING", "the server is ending", retry_after=0.1)
REFUSED = Unavailable("NO_READY_ENCODER", "no encoder is ready", retry_after=0.1)


@pytest.fixture
async def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
async def server(router: ScriptedRouter) -> AsyncIterator[Server]:
    async with serving(router) as running:
        yield running


@contextmanager
def hole() -> Iterator[str]:
    """A target that takes connections and never says a word, as a stopped process does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def nobody() -> str:
    """A target where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


# -- what is sent ------------------------------------------------------------------------------------------------------


async def test_an_answer_comes_over_the_wire(router: ScriptedRouter, server: Server) -> None:
    async with AsyncClient(
        server.target, api_key="s3cret", metadata={"x-team": "eyes", "x-raw-bin": b"\0\1"}
    ) as client:
        done = await client.generate("fake", "Read.", sampling=SamplingParams(seed=3), request_id="mine", timeout=30)
        models = await client.list_models()
    assert (done.text, done.finish_reason, done.request_id, len(done.frames)) == (TEXT, "stop", "mine", 3)
    assert [model.name for model in models] == ["fake"]
    (request,) = router.requests
    assert (request.request_id, request.sampling.seed) == ("mine", 3)
    (headers,) = router.headers
    assert headers["authorization"] == "Bearer s3cret"
    assert (headers["x-team"], headers["x-raw-bin"]) == ("eyes", b"\0\1")
    assert str(headers["user-agent"]).startswith(f"{user_agent()} grpc-python-asyncio/")
    (remaining,) = router.remaining
    assert remaining is not None and 20 < remaining <= 30
    assert router.beside[0]["authorization"] == "Bearer s3cret"
    assert len(str(router.beside[0]["x-request-id"])) == 32


async def test_the_synchronous_client_does_the_same_beside_a_running_loop(
    router: ScriptedRouter, server: Server
) -> None:
    def ask() -> tuple[str, list[str]]:
        with Client(server.target) as client:
            client.wait_ready(20)
            with client.stream("fake", messages=[Message("user", "Read.")]) as stream:
                texts = [event.text for event in stream if isinstance(event, Token)]
            assert stream.usage is not None
            return client.generate("fake", "Read.").text, texts

    assert await asyncio.to_thread(ask) == (TEXT, list(TEXT))
    assert [request.request_id != "" for request in router.requests] == [True, True]


async def test_threads_share_a_synchronous_client(router: ScriptedRouter, server: Server) -> None:
    with Client(server.target) as client:
        texts = await asyncio.gather(*(asyncio.to_thread(client.generate, "fake", f"{i}") for i in range(8)))
    assert [done.text for done in texts] == [TEXT] * 8
    assert {request.prompt.conversation.turns[0].parts[0].text for request in router.requests} == set("01234567")


async def test_many_streams_share_one_connection(router: ScriptedRouter, server: Server) -> None:
    async with AsyncClient(server.target) as client:
        done = await asyncio.gather(*(client.generate("fake", "Read.") for _ in range(16)))
    assert [answer.text for answer in done] == [TEXT] * 16


async def test_a_unix_socket_is_a_target(router: ScriptedRouter, tmp_path: Path) -> None:
    async with (
        serving(router, address=f"unix:{tmp_path}/router.sock"),
        AsyncClient(f"unix:{tmp_path}/router.sock") as client,
    ):
        assert (await client.generate("fake", "Read.")).text == TEXT


async def test_target_and_key_come_from_the_environment(
    router: ScriptedRouter, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHIASM_TARGET", server.target)
    monkeypatch.setenv("CHIASM_API_KEY", "from-outside")
    client = AsyncClient()
    monkeypatch.delenv("CHIASM_TARGET")
    monkeypatch.delenv("CHIASM_API_KEY")
    async with client:
        assert (await client.generate("fake", "Read.")).text == TEXT
    assert router.headers[0]["authorization"] == "Bearer from-outside"


async def test_a_key_is_asked_for_each_call(router: ScriptedRouter, server: Server) -> None:
    keys = iter(["first", "second"])

    async def third() -> str:
        return "third"

    async with AsyncClient(server.target, api_key=lambda: next(keys)) as client:
        await client.generate("fake", "Read.")
        await client.generate("fake", "Read.")
        await client.with_options(api_key=third).generate("fake", "Read.")
        await client.with_options(api_key=None).generate("fake", "Read.")
    assert [headers.get("authorization") for headers in router.headers] == [
        "Bearer first",
        "Bearer second",
        "Bearer third",
        None,
    ]


async def test_a_copy_shares_the_connection(router: ScriptedRouter, server: Server) -> None:
    async with AsyncClient(server.target, metadata={"x-team": "eyes"}) as client:
        copy = client.with_options(timeout=7, metadata={"x-team": "ears"})
        await client.generate("fake", "Read.")
        await copy.generate("fake", "Read.")
        await copy.close()
        with pytest.raises(RuntimeError, match="closed"):
            await client.generate("fake", "Read.")
    assert [headers["x-team"] for headers in router.headers] == ["eyes", "ears"]
    first, second = router.remaining
    assert first is not None and second is not None
    assert first > 500 > 8 > second, "gRPC rounds deadlines up"


# -- leaving early -----------------------------------------------------------------------------------------------------


async def test_the_server_stops_sending_when_the_client_leaves(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[started(), *(step for i in range(500) for step in (tokens(i, "x"), 0.02))]]
    async with AsyncClient(server.target) as client:
        async with client.stream("fake", "Read.") as stream:
            async for event in stream:
                if isinstance(event, Token):
                    break
        await asyncio.wait_for(router.left.wait(), 20)
        sent = router.sent
        assert sent < 50, "of 501"
        await asyncio.sleep(0.2)
        assert router.sent == sent


async def test_a_cancelled_task_stops_the_server(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[started(), WAIT]]
    async with AsyncClient(server.target) as client:
        task = asyncio.create_task(client.generate("fake", "Read."))
        await asyncio.wait_for(router.came.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(router.left.wait(), 20)


async def test_closing_the_client_stops_the_server(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[started(), WAIT]]
    client = AsyncClient(server.target)
    stream = client.stream("fake", "Read.")
    assert isinstance(await anext(stream), Started)
    await client.close()
    await asyncio.wait_for(router.left.wait(), 20)
    with pytest.raises(Cancelled):
        await anext(stream)


# -- retries and failures ----------------------------------------------------------------------------------------------


async def test_a_call_that_nobody_began_to_answer_is_sent_again(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[DRAINING], [DRAINING], fake.answer()]
    async with AsyncClient(server.target) as client:
        assert (await client.generate("fake", "Read.")).text == TEXT
    assert len(router.requests) == 3
    assert len({request.request_id for request in router.requests}) == 1


async def test_what_a_server_has_waited_for_already_is_not_asked_again(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[REFUSED]]
    async with AsyncClient(server.target) as client:
        with pytest.raises(Unavailable) as caught:
            await client.generate("fake", "Read.")
    assert caught.value.reason == "NO_READY_ENCODER" and caught.value.retryable
    assert len(router.requests) == 1


async def test_retries_end_with_the_servers_own_word(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[DRAINING]]
    async with AsyncClient(server.target, max_retries=1) as client:
        with pytest.raises(Unavailable) as caught:
            await client.generate("fake", "Read.", request_id="mine")
    assert len(router.requests) == 2
    error = caught.value
    assert isinstance(error.__cause__, grpc.aio.AioRpcError), "what gRPC said remains at hand"
    assert (error.reason, error.retryable, error.retry_after, error.request_id) == (
        "DRAINING",
        True,
        0.1,
        "mine",
    )


@pytest.mark.parametrize(
    ("error", "retries"),
    [(REFUSED, 0), (Overloaded("QUEUE_FULL", "the queue is full", retry_after=0.5), 2), (NotFound("X", "no"), 2)],
    ids=["no retries", "overload", "not found"],
)
async def test_what_is_not_retried(router: ScriptedRouter, server: Server, error: Any, retries: int) -> None:
    router.scripts = [[error]]
    async with AsyncClient(server.target, max_retries=retries) as client:
        with pytest.raises(type(error)) as caught:
            await client.generate("fake", "Read.")
    assert len(router.requests) == 1
    assert (caught.value.reason, caught.value.retry_after) == (error.reason, error.retry_after)


async def test_nothing_is_retried_once_an_event_has_come(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[started(), tokens(0, "3"), 0.1, Unavailable("DECODER_LOST", "the decoder is gone")]]
    async with AsyncClient(server.target) as client:
        stream = client.stream("fake", "Read.")
        with pytest.raises(Unavailable) as caught:
            async for _ in stream:
                pass
    assert (caught.value.reason, stream.text) == ("DECODER_LOST", "3")
    assert len(router.requests) == 1


async def test_a_connection_that_breaks_in_mid_stream_is_told_as_such(router: ScriptedRouter) -> None:
    router.scripts = [[started(), tokens(0, "3"), WAIT]]
    async with serving(router) as server, AsyncClient(server.target) as client:
        stream = client.stream("fake", "Read.")
        while stream.text != "3":
            await anext(stream)
        await server.stop(0)
        with pytest.raises(Unavailable) as caught:
            await anext(stream)
    assert caught.value.reason == "CONNECTION_LOST"
    assert caught.value.request_id == stream.request_id


async def test_a_client_outlives_its_server(router: ScriptedRouter, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/router.sock"
    async with AsyncClient(address) as client:
        for _ in range(2):
            async with serving(router, address=address):
                await client.wait_ready(20)
                assert (await client.generate("fake", "Read.")).text == TEXT
            with pytest.raises(ConnectionFailed):
                await client.generate("fake", "Read.")


async def test_nobody_listening_is_told_with_the_target_and_what_to_do() -> None:
    target = nobody()
    async with AsyncClient(target) as client:
        for call in (client.generate("fake", "Read."), client.list_models()):
            with pytest.raises(ConnectionFailed, match=target) as caught:
                await call
            assert "chiasm serve" in str(caught.value)


async def test_a_connection_that_never_comes_is_waited_for_no_longer_than_said() -> None:
    with hole() as target:
        async with AsyncClient(target, connect_timeout=0.3) as client:
            with pytest.raises(ConnectionFailed, match=r"within 0.3 s \(connect_timeout\)"):
                await client.list_models()
            with pytest.raises(ConnectionFailed, match=r"within 0.2 s \(timeout\)"):
                await client.list_models(timeout=0.2)


async def test_making_and_opening_a_client_touches_no_network() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.3)
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with Client(target):
            async with AsyncClient(target):
                with pytest.raises(TimeoutError):
                    await asyncio.to_thread(listener.accept)


async def test_a_message_that_is_too_large_points_to_upload(router: ScriptedRouter, server: Server) -> None:
    async with AsyncClient(server.target, channel_options={"grpc.max_send_message_length": 1000}) as client:
        with pytest.raises(Overloaded, match="upload") as caught:
            await client.generate("fake", "x" * 2000)
    assert (caught.value.reason, caught.value.retryable) == ("MESSAGE_TOO_LARGE", False)
    assert not router.requests


# -- clocks ------------------------------------------------------------------------------------------------------------


async def test_the_server_tells_of_the_deadline_and_names_the_stage(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[0.2, DeadlineExceeded("the deadline passed while media were encoded", stage="encode")]]
    async with AsyncClient(server.target) as client:
        with pytest.raises(DeadlineExceeded) as caught:
            await client.generate("fake", "Read.", timeout=1.0)
    assert caught.value.stage == "encode"


async def test_a_server_that_says_nothing_is_left_at_the_deadline(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[WAIT]]
    async with AsyncClient(server.target, timeout=0.3) as client:
        with pytest.raises(DeadlineExceeded, match=r"0.3 s \(timeout\)") as caught:
            await client.generate("fake", "Read.", request_id="mine")
        assert (caught.value.stage, caught.value.request_id) == (None, "mine")
        await asyncio.wait_for(router.left.wait(), 20)


async def test_an_idle_stream_is_left(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[started(), WAIT]]
    async with AsyncClient(server.target, idle_timeout=0.3) as client:
        with pytest.raises(IdleTimeout, match=r"0.3 s \(idle_timeout\)"):
            await client.generate("fake", "Read.")
        await asyncio.wait_for(router.left.wait(), 20)


# -- readiness ---------------------------------------------------------------------------------------------------------


async def test_wait_ready_waits_for_health_and_for_a_model(router: ScriptedRouter) -> None:
    models, router.models = router.models, type(router.models)()
    async with serving(router, ready=False) as server, AsyncClient(server.target) as client:
        with pytest.raises(Unavailable, match="not ready") as caught:
            await client.wait_ready(0.3)
        assert caught.value.reason == "NOT_READY"
        assert not router.beside, "a server that is not ready is not asked for models"
        await server.set_ready(True)
        with pytest.raises(Unavailable, match="0 models"):
            await client.wait_ready(0.3)
        waiting = asyncio.create_task(client.wait_ready(20))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        router.models = models
        await waiting


async def test_wait_ready_waits_for_a_server_that_is_not_there_yet(tmp_path: Path, router: ScriptedRouter) -> None:
    address = f"unix:{tmp_path}/router.sock"
    async with AsyncClient(address) as client:
        with pytest.raises(ConnectionFailed, match=r"within 0.3 s"):
            await client.wait_ready(0.3)
        waiting = asyncio.create_task(client.wait_ready(20))
        await asyncio.sleep(0.1)
        async with serving(router, address=address):
            await waiting


async def test_wait_ready_tells_at_once_what_waiting_would_not_change(router: ScriptedRouter) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(Exception, match="does not serve") as caught:
                await asyncio.wait_for(client.wait_ready(300), 30)
        assert getattr(caught.value, "reason", None) == "UNIMPLEMENTED"
    finally:
        await server.stop(0)


# -- what a client is made with ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["http://localhost:50051", "localhost", "", "localhost:", "a b:1", "localhost:port"])
def test_a_target_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        Client(target)


@pytest.mark.parametrize("options", [{"max_retries": 5}, {"connect_timeout": 0}, {"timeout": -1}, {"api_key": "a\nb"}])
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Client("localhost:1", **options)
    assert caught.value.reason == "FIELD_OUT_OF_RANGE"
    assert "a\nb" not in str(caught.value) and "a\\nb" not in str(caught.value), "a key is never shown"
