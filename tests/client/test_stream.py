"""Streams: what they give, that leaving them cancels, and their two clocks. Synchronous and asynchronous alike."""

from __future__ import annotations

import asyncio
import gc
import inspect
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from chiasm.client import AsyncClient, Client, Finished, FramesVisible, Image, Message, SamplingParams, Started, Token
from chiasm.client.call import AHEAD
from chiasm.errors import (
    Cancelled,
    DeadlineExceeded,
    IdleTimeout,
    InvalidRequest,
    NotFound,
    ServerError,
    Unavailable,
)
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.client.fake import TEXT, FakeTransport, answer, finished, started, tokens

SECONDS = 10.0
"""Longer than any of this takes; a test that waits so long has failed."""

Responses = Sequence[rpb.GenerateResponse | Exception | str]


def client_of(transport: FakeTransport, **options: Any) -> Client:
    return Client(transport=transport.opener, **options)


def async_client_of(transport: FakeTransport, **options: Any) -> AsyncClient:
    return AsyncClient(transport=transport.opener, **options)


# -- whole answers -----------------------------------------------------------------------------------------------------


def test_generate_returns_the_whole_answer() -> None:
    transport = FakeTransport()
    with client_of(transport) as client:
        done = client.generate("fake", "Read.", sampling=SamplingParams(seed=3), max_tokens=8, request_id="mine")
    assert (done.text, done.finish_reason, done.request_id) == (TEXT, "stop", "mine")
    assert done.ids == tuple(range(100, 100 + len(TEXT)))
    assert len(done.frames) == 3
    assert done.usage.media[0].units_cached == 2
    assert done.times.encode == 0.25
    (request,) = transport.requests
    assert (request.model, request.request_id, request.sampling.seed, request.sampling.max_tokens) == (
        "fake",
        "mine",
        3,
        8,
    )
    assert not transport.cancelled.is_set()
    assert transport.closed


async def test_the_asynchronous_client_does_the_same() -> None:
    transport = FakeTransport()
    async with async_client_of(transport) as client:
        done = await client.generate("fake", messages=[Message("system", "Be short."), Message("user", "Read.")])
        models = await client.list_models()
    assert (done.text, done.finish_reason, len(done.request_id)) == (TEXT, "stop", 32)
    assert len(transport.requests[0].prompt.conversation.turns) == 2
    assert transport.closed
    assert [(model.name, model.operations, model.media, model.ready) for model in models] == [
        ("fake", ("generate",), ("image",), True)
    ]


def test_a_stream_gives_events_in_order_and_is_complete_at_its_end() -> None:
    with client_of(FakeTransport()) as client, client.stream("fake", "Read.") as stream:
        assert (stream.text, stream.usage, stream.finish_reason) == ("", None, None)
        with pytest.raises(RuntimeError, match="not finished"):
            stream.generation()
        events = list(stream)
        kinds = [type(event) for event in events]
        assert kinds == [Started, FramesVisible, *[Token] * len(TEXT), Finished]
        assert [event.visible for event in events if isinstance(event, Token)] == [3] * len(TEXT)
        assert list(stream) == []
    assert (stream.text, stream.finish_reason) == (TEXT, "stop")
    assert stream.generation().text == TEXT
    assert stream.usage is not None
    assert stream.times is not None
    assert len(stream.frames) == 3
    assert stream.request_id == stream.generation().request_id


async def test_text_grows_with_the_tokens() -> None:
    grown = []
    async with async_client_of(FakeTransport()) as client, client.stream("fake", "Read.") as stream:
        async for event in stream:
            if isinstance(event, Token):
                grown.append(stream.text)
    assert grown == [TEXT[: i + 1] for i in range(len(TEXT))]


def test_many_threads_share_a_client() -> None:
    transport = FakeTransport()
    texts: list[str] = []
    with client_of(transport) as client:
        threads = [
            threading.Thread(target=lambda: texts.append(client.generate("fake", "Read.").text)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [TEXT] * 8


async def test_the_synchronous_client_works_beside_a_running_loop() -> None:
    with client_of(FakeTransport()) as client:
        assert client.generate("fake", "Read.").text == TEXT


# -- leaving early -----------------------------------------------------------------------------------------------------


def long_answer() -> FakeTransport:
    return FakeTransport([started(), *(tokens(i, "x") for i in range(500)), finished()])


def test_leaving_a_stream_early_cancels_the_request() -> None:
    transport = long_answer()
    with client_of(transport) as client:
        with client.stream("fake", "Read.") as stream:
            for event in stream:
                if isinstance(event, Token):
                    break
        assert transport.cancelled.is_set(), "the exit returns when everything is free"
        assert transport.sent <= 2 + AHEAD + 1
        assert stream.finish_reason is None
        with pytest.raises(Cancelled):
            next(stream)
        stream.close()


async def test_leaving_an_asynchronous_stream_early_cancels_the_request() -> None:
    transport = long_answer()
    async with async_client_of(transport) as client:
        async with client.stream("fake", "Read.") as stream:
            async for event in stream:
                if isinstance(event, Token):
                    break
        assert transport.cancelled.is_set()
        assert transport.sent <= 2 + AHEAD + 1
        with pytest.raises(Cancelled):
            await anext(stream)


def test_an_error_inside_the_block_cancels_the_request() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    with client_of(transport) as client, pytest.raises(ZeroDivisionError), client.stream("fake", "Read.") as stream:
        next(stream)
        raise ZeroDivisionError
    assert transport.cancelled.is_set()


def test_a_reader_who_pauses_slows_the_server_down() -> None:
    transport = long_answer()
    with client_of(transport) as client, client.stream("fake", "Read.") as stream:
        for _ in range(20):
            next(stream)
        assert transport.sent <= 20 + AHEAD + 1


async def test_cancelling_the_reading_task_cancels_the_request() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    async with async_client_of(transport) as client:
        task = asyncio.create_task(client.generate("fake", "Read."))
        await asyncio.to_thread(transport.waiting.wait, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transport.cancelled.is_set()


async def test_cancelling_a_reader_without_a_block_cancels_the_request() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    async with async_client_of(transport) as client:
        stream = client.stream("fake", "Read.")
        await anext(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        assert await asyncio.to_thread(transport.cancelled.wait, SECONDS)
        with pytest.raises(Cancelled):
            await anext(stream)


@contextmanager
def interrupted(seconds: float = 0.2) -> Iterator[None]:
    """Presses Ctrl-C, so to speak, while the block waits, and catches it."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    timer.join()


def test_ctrl_c_cancels_generate() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    with client_of(transport) as client:
        with interrupted():
            client.generate("fake", "Read.")
        assert transport.cancelled.is_set()


def test_ctrl_c_cancels_a_stream_also_without_a_block() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    with client_of(transport) as client:
        stream = client.stream("fake", "Read.")
        next(stream)
        with interrupted():
            next(stream)
        assert transport.cancelled.is_set()
        with pytest.raises(Cancelled):
            next(stream)


def test_an_abandoned_stream_warns_and_is_cancelled() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    with client_of(transport) as client:
        stream = client.stream("fake", "Read.", request_id="left-behind")
        next(stream)
        with pytest.warns(ResourceWarning, match="left-behind"):  # noqa: PT031 - both lines drop it
            del stream
            gc.collect()
        assert transport.cancelled.wait(SECONDS)


async def test_an_abandoned_asynchronous_stream_warns_and_is_cancelled() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    async with async_client_of(transport) as client:
        stream = client.stream("fake", "Read.")
        await anext(stream)
        with pytest.warns(ResourceWarning, match="dropped"):  # noqa: PT031 - both lines drop it
            del stream
            gc.collect()
        assert await asyncio.to_thread(transport.cancelled.wait, SECONDS)


@pytest.mark.filterwarnings("error")
def test_streams_that_were_never_begun_or_read_to_the_end_do_not_warn() -> None:
    with client_of(FakeTransport()) as client:
        client.stream("fake", "Read.")
        list(client.stream("fake", "Read."))
        gc.collect()


def test_closing_the_client_cancels_its_streams_and_ends_its_thread() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    client = client_of(transport)
    stream = client.stream("fake", "Read.")
    next(stream)
    client.close()
    client.close()
    stream.close()
    assert transport.cancelled.is_set()
    assert transport.closed
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("fake", "Read.")


def test_a_dropped_client_is_closed() -> None:
    transport = FakeTransport()
    client = client_of(transport)
    del client
    gc.collect()
    assert transport.closed


def test_a_stream_keeps_its_client() -> None:
    transport = FakeTransport()
    stream = client_of(transport).stream("fake", "Read.")
    gc.collect()
    assert not transport.closed
    assert len(list(stream)) == len(answer())
    del stream
    gc.collect()
    assert transport.closed


async def test_a_call_never_changes_hands() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    async with async_client_of(transport) as client:
        stream = client.stream("fake", "Read.")
        await asyncio.create_task(stream.start())
        await asyncio.create_task(anext(stream))
        await asyncio.create_task(stream.aclose())
    began, ended = transport.tasks
    assert began is ended


# -- errors and clocks -------------------------------------------------------------------------------------------------


def failing(*before: rpb.GenerateResponse, error: Exception) -> FakeTransport:
    return FakeTransport([*before, error])


def test_a_refusal_keeps_its_class_and_learns_the_request() -> None:
    refusal = NotFound("MODEL_NOT_FOUND", "there is no such model")
    with client_of(failing(error=refusal)) as client, pytest.raises(NotFound) as caught:
        client.generate("fake", "Read.", request_id="abc")
    assert (caught.value.reason, caught.value.request_id) == ("MODEL_NOT_FOUND", "abc")


async def test_an_error_in_mid_stream_comes_after_what_was_before_it() -> None:
    transport = failing(started(), tokens(0, "a"), error=ServerError("INTERNAL", "lost"))
    async with async_client_of(transport) as client, client.stream("fake", "Read.") as stream:
        assert isinstance(await anext(stream), Started)
        assert isinstance(await anext(stream), Token)
        with pytest.raises(ServerError):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert (stream.text, stream.finish_reason) == ("a", None)


def test_a_bug_of_a_transport_is_not_hidden() -> None:
    with (
        client_of(failing(error=ZeroDivisionError("a bug"))) as client,
        pytest.raises(ZeroDivisionError, match="a bug"),
    ):
        client.generate("fake", "Read.")


def test_a_stream_that_ends_without_an_end_is_an_error() -> None:
    with client_of(FakeTransport(answer()[:-1])) as client, pytest.raises(Unavailable) as caught:
        client.generate("fake", "Read.")
    assert caught.value.reason == "CONNECTION_LOST"


def test_idle_timeout_bounds_the_gap_between_events_and_not_the_first() -> None:
    transport = FakeTransport([started(), FakeTransport.WAIT])
    with (
        client_of(transport, idle_timeout=0.05) as client,
        pytest.raises(IdleTimeout, match=r"0\.05 s \(idle_timeout\)"),
    ):
        client.generate("fake", "Read.")
    assert transport.cancelled.is_set()


def test_timeout_bounds_the_whole_call() -> None:
    transport = FakeTransport([FakeTransport.WAIT])
    with client_of(transport, idle_timeout=0.01) as client, pytest.raises(DeadlineExceeded, match=r"0\.05 s") as caught:
        client.generate("fake", "Read.", timeout=0.05, request_id="slow")
    assert (caught.value.stage, caught.value.request_id) == (None, "slow")
    assert transport.cancelled.is_set()
    assert transport.timeouts == [0.05]


async def test_the_word_of_the_server_about_its_deadline_is_preferred() -> None:
    transport = failing(error=DeadlineExceeded("encoding took too long", stage="encode"))
    async with async_client_of(transport) as client:
        with pytest.raises(DeadlineExceeded) as caught:
            await client.generate("fake", "Read.", timeout=5)
    assert caught.value.stage == "encode"


def test_timeouts_are_the_clients_own_unless_said_otherwise() -> None:
    transport = FakeTransport()
    with client_of(transport, timeout=30) as client:
        client.generate("fake", "Read.")
        client.generate("fake", "Read.", timeout=None)
        client.generate("fake", "Read.", timeout=2)
    assert transport.timeouts == [30, None, 2]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(value: float) -> None:
    transport = FakeTransport()
    with client_of(transport) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.generate("fake", "Read.", timeout=value)
        assert caught.value.facts["field"] == "timeout"
    with pytest.raises(InvalidRequest):
        AsyncClient(transport=transport.opener, idle_timeout=value)
    assert transport.requests == []


# -- what may be asked -------------------------------------------------------------------------------------------------


def test_content_and_messages_exclude_each_other() -> None:
    with client_of(FakeTransport()) as client:
        with pytest.raises(TypeError, match="give one of content"):
            client.generate("fake", "Read.", messages=[Message("user", "Read.")])
        with pytest.raises(TypeError, match="give one of content"):
            client.stream("fake")
        with pytest.raises(TypeError, match="Message"):
            client.stream("fake", messages=[{"role": "user", "content": "Read."}])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="positional"):
            client.generate("fake", "Read.", SamplingParams())  # type: ignore[call-arg, arg-type]
        with pytest.raises(TypeError, match="goes with token_ids"):
            client.stream("fake", "Read.", media=[Image(b"x")])


@pytest.mark.parametrize(
    ("option", "said"), [("max_token", "max_tokens"), ("temperature", "sampling=SamplingParams(temperature=...)")]
)
async def test_an_unknown_option_of_a_call_is_refused_with_what_was_meant(option: str, said: str) -> None:
    options: dict[str, Any] = {option: 3}
    transport = FakeTransport()
    with client_of(transport) as client:
        asynchronous = async_client_of(transport)
        assert inspect.iscoroutinefunction(asynchronous.generate)
        for call in (client.generate, client.stream, asynchronous.generate, asynchronous.stream):
            with pytest.raises(InvalidRequest, match=re.escape(said)) as caught:
                made: Any = call("fake", "Read.", **options)
                await made
            assert (caught.value.reason, caught.value.facts["field"]) == ("UNKNOWN_FIELD", option)
    assert not transport.requests


def test_what_is_wrong_with_a_request_is_raised_before_anything_is_sent() -> None:
    transport = FakeTransport()
    with client_of(transport) as client:
        with pytest.raises(InvalidRequest, match="surrogate"):
            client.stream("fake", "\ud83d")
        with pytest.raises(InvalidRequest, match="max_tokens"):
            client.generate("fake", "Read.", max_tokens=0)
    assert transport.requests == []


async def test_an_asynchronous_stream_raises_it_when_entered() -> None:
    transport = FakeTransport()
    async with async_client_of(transport) as client:
        stream = client.stream("fake", "\ud83d")
        with pytest.raises(InvalidRequest, match="surrogate"):
            async with stream:
                pass
    assert transport.requests == []


async def test_an_asynchronous_client_opens_with_its_first_call_and_once() -> None:
    transport = FakeTransport()
    opened = 0

    async def opener() -> FakeTransport:
        nonlocal opened
        await asyncio.sleep(0)
        opened += 1
        return transport

    client = AsyncClient(transport=opener)
    assert opened == 0
    texts = await asyncio.gather(*(client.generate("fake", "Read.") for _ in range(3)))
    assert (opened, [done.text for done in texts]) == (1, [TEXT] * 3)
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.generate("fake", "Read.")


def test_a_transport_that_cannot_be_opened_leaves_no_thread() -> None:
    async def opener() -> FakeTransport:
        raise NotFound("MODEL_NOT_FOUND", "nothing here")

    before = threading.active_count()
    with pytest.raises(NotFound):
        Client(transport=opener)
    assert threading.active_count() == before
