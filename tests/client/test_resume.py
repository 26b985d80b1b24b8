"""Answers that break after they have begun go on by themselves: at the next router, or at the same when it is back."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
import sys
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chiasm.client import (
    AsyncClient,
    Client,
    Event,
    Generation,
    GenerationStream,
    ResumePoint,
    Token,
)
from chiasm.client.attempts import Attempts
from chiasm.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServerError,
    Unavailable,
    Unsupported,
)
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.client import fake
from tests.client.fake import FakeTransport
from tests.client.resumable import END, GAP, REPEAT, TEXT, ResumableRouter, killed_when_held, point, token
from tests.client.router import serving
from tests.client.test_remote import nobody

SECONDS = 30
LOST = Unavailable("DECODER_LOST", "the decoder is gone")
INDICES = range(len(TEXT) + 1)


async def told(client: AsyncClient, **options: Any) -> tuple[list[Event], Generation]:
    """Every event of an answer, and the answer, told as if nothing had broken."""
    async with client.stream("fake", "Read.", **options) as stream:
        events = [event async for event in stream]
    return events, replace(stream.generation(), request_id="", attempts=1, resumes=0)


async def unbroken() -> tuple[list[Event], Generation]:
    async with serving(ResumableRouter()) as server, AsyncClient(server.target) as client:
        return await told(client)


# -- another router takes over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", INDICES)
async def test_the_next_router_goes_on_at_the_very_token(index: int) -> None:
    dying, other = ResumableRouter(index), ResumableRouter()
    async with (
        killed_when_held(dying) as first,
        serving(other) as second,
        AsyncClient([first.target, second.target]) as client,
    ):
        assert await told(client) == await unbroken()
        done = await client.generate("fake", "Read.")
    assert [100 + i for i in range(index)][: len(other.resumed[0])] == other.resumed[0]
    assert (len(dying.requests), len(other.requests)) == (1, 2), "who is gone is not asked first again"
    assert (done.text, done.resumes, done.attempts) == (TEXT, 0, 1)


async def test_a_resumed_answer_says_so_and_asks_for_the_same_with_what_is_left_of_the_time() -> None:
    dying, other = ResumableRouter(2), ResumableRouter()
    async with (
        killed_when_held(dying) as first,
        serving(other) as second,
        AsyncClient(f"{first.target}, {second.target}", api_key=iter_keys()) as client,
    ):
        done = await client.generate("fake", "Read.", timeout=20, request_id="mine")
    assert (done.text, done.resumes, done.attempts, done.request_id) == (TEXT, 1, 2, "mine")
    (before,), (after,) = dying.requests, other.requests
    after.ClearField("resume")
    assert after == before
    assert other.headers[0]["authorization"] == "Bearer key 2", "a key is asked for each call"
    first_left, second_left = dying.remaining[0], other.remaining[0]
    assert first_left is not None and second_left is not None and second_left < 21


def iter_keys() -> Any:
    keys = iter(["key 1", "key 2"])
    return lambda: next(keys)


@pytest.mark.parametrize("index", [0, 3, len(TEXT)])
async def test_the_synchronous_client_does_the_same(index: int) -> None:
    def ask(targets: list[str]) -> tuple[list[Event], GenerationStream]:
        with Client(targets) as client, client.stream("fake", "Read.") as stream:
            return list(stream), stream

    async with killed_when_held(ResumableRouter(index)) as first, serving(ResumableRouter()) as second:
        events, stream = await asyncio.to_thread(ask, [first.target, second.target])
    assert events == (await unbroken())[0]
    assert (stream.resumes, stream.resume_point) == (1, None)


async def test_an_answer_outlives_one_router_after_the_other() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(killed_when_held(ResumableRouter(i))) for i in (1, 1, 4)]
        servers.append(await stack.enter_async_context(serving(ResumableRouter())))
        client = await stack.enter_async_context(AsyncClient([server.target for server in servers]))
        done = await client.generate("fake", "Read.")
    assert (done.text, done.resumes) == (TEXT, 3)


async def test_it_is_resumed_as_often_as_was_said_and_no_more() -> None:
    router = ResumableRouter((END, 1), (END, 2), (END, 3), None)
    async with (
        serving(router) as server,
        AsyncClient(server.target, max_resumes=2) as client,
    ):
        with pytest.raises(Unavailable) as caught:
            await client.generate("fake", "Read.")
        assert (caught.value.reason, len(router.requests)) == ("CONNECTION_LOST", 3)
        router.plans = [(END, 1)]
        with pytest.raises(Unavailable):
            await client.with_options(max_resumes=0).generate("fake", "Read.")
        assert len(router.requests) == 4


async def test_a_router_that_stands_still_with_its_connection_alive_is_left_for_another() -> None:
    still, other = ResumableRouter(3), ResumableRouter()
    async with (
        serving(still) as first,
        serving(other) as second,
        AsyncClient([first.target, second.target], idle_timeout=0.5) as client,
    ):
        assert await told(client) == await unbroken()
        await asyncio.wait_for(still.left.wait(), SECONDS)
    assert other.resumed == [[100, 101, 102]]


# -- one router --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 4, len(TEXT)])
async def test_a_router_that_is_started_again_goes_on(index: int, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/router.sock"
    dying, again = ResumableRouter(index), ResumableRouter()
    async with AsyncClient(address) as client:
        async with killed_when_held(dying, address):
            asking = asyncio.create_task(told(client))
            await asyncio.wait_for(dying.left.wait(), SECONDS)
        await asyncio.sleep(0.3)  # long enough for a refused connection or two
        assert not asking.done()
        async with serving(again, address=address):
            assert await asyncio.wait_for(asking, SECONDS) == await unbroken()
    assert len(again.requests) == 1


async def test_a_router_process_that_is_killed_and_started_again_goes_on(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/router.sock"

    def start(index: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.client.resumable", address, str(index)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    processes = [await asyncio.to_thread(start, 3)]
    try:
        async with AsyncClient(address) as client, client.stream("fake", "Read.") as stream:
            while len(stream.ids) < 3:
                await anext(stream)
            processes[0].kill()
            processes[0].wait()
            processes.append(await asyncio.to_thread(start, 999))
            async for _ in stream:
                pass
        assert (stream.text, stream.resumes) == (TEXT, 1)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# -- what a stream may say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(TEXT)))
async def test_what_is_said_twice_is_told_once_and_what_is_missing_is_asked_for(index: int) -> None:
    for plan, resumes in (((REPEAT, index), 0), ((GAP, index), 1)):
        router = ResumableRouter(plan)
        async with serving(router) as server, AsyncClient(server.target) as client:
            assert await told(client) == await unbroken()
        assert len(router.resumed) == resumes


async def test_an_answer_that_is_whole_is_whole_whatever_becomes_of_its_call() -> None:
    whole: list[Any] = [fake.started(), point(1, rpb.GenerateRequest()), token(0, 1), fake.finished(), LOST]
    async with AsyncClient(transport=FakeTransport(whole).opener) as client:
        assert (await client.generate("fake", "Read.")).text == TEXT[0]


async def test_an_answer_to_another_prompt_is_not_sewn_to_this_one() -> None:
    first = FakeTransport([fake.started(), point(1, rpb.GenerateRequest()), token(0, 1), LOST])
    async with AsyncClient(transport=first.opener) as client, client.stream("fake", "Read.") as stream:
        while not stream.text:
            await anext(stream)
        first.responses = [fake.started(2, attempt=2), token(1, 2), fake.finished()]
        with pytest.raises(Unavailable, match="the decoder is gone") as caught:
            await anext(stream)
    assert isinstance(caught.value.__cause__, ServerError) and caught.value.__cause__.reason == "RESUME_DIFFERS"
    assert stream.text == TEXT[0]


async def test_an_answer_that_broke_before_its_first_token_begins_once_more_and_is_told_once() -> None:
    transport = FakeTransport([fake.started(), fake.visible(3), LOST])
    async with AsyncClient(transport=transport.opener) as client, client.stream("fake", "Read.") as stream:
        events = [await anext(stream), await anext(stream)]
        transport.responses = fake.answer()
        events += [event async for event in stream]
    async with AsyncClient(transport=FakeTransport().opener) as client:
        assert events == (await told(client))[0]
    assert not transport.requests[-1].HasField("resume")


async def test_nothing_is_resumed_without_a_token() -> None:
    transport = FakeTransport([fake.started(), token(0, 1), LOST])
    async with AsyncClient(transport=transport.opener) as client:
        with pytest.raises(Unavailable, match="the decoder is gone"):
            await client.generate("fake", "Read.")
    assert len(transport.requests) == 1


# -- what stands against it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest("RESUME_TOKEN_INVALID", "the resume token does not fit this request"),
        Unsupported("RESUME_MODEL_CHANGED", "the model that began this answer is not served any more"),
        ServerError("NOT_RESUMABLE", "this answer cannot go on", code="ABORTED"),
        NotFound("MEDIA_EXPIRED", "no medium is kept under this handle"),
        Overloaded("QUOTA", "there is no more for this tenant"),
    ],
    ids=lambda refusal: refusal.reason,
)
async def test_a_refused_token_is_the_cause_of_the_failure_that_was_before_it(refusal: Any) -> None:
    router = ResumableRouter((END, 2), refusal, None)
    async with (
        serving(router) as server,
        AsyncClient(server.target) as client,
        client.stream("fake", "Read.", request_id="mine") as stream,
    ):
        with pytest.raises(Unavailable) as caught:
            async for _ in stream:
                pass
        assert (caught.value.reason, caught.value.request_id) == ("CONNECTION_LOST", "mine")
        assert getattr(caught.value.__cause__, "reason", None) == refusal.reason
        assert (stream.text, len(router.requests)) == (TEXT[:2], 2)


async def test_routers_that_cannot_take_it_now_are_asked_again_when_they_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    pause_after = Attempts._pause_after

    def noted(self: Attempts, error: Exception) -> float:
        pauses.append(pause_after(self, error))
        return pauses[-1]

    monkeypatch.setattr(Attempts, "_pause_after", noted)
    refusals = [
        Unavailable("DRAINING", "the server is ending", retry_after=0.1),
        Overloaded("QUEUE_FULL", "the queue is full", retry_after=0.2),
        Unavailable("NO_READY_DECODER", "no decoder is ready"),
    ]
    router = ResumableRouter((END, 2), *refusals, None)
    async with serving(router) as server, AsyncClient(server.target, max_retries=0) as client:
        done = await client.generate("fake", "Read.")
    assert (done.text, done.resumes, len(router.requests)) == (TEXT, 1, 5)
    for pause, hint, chance in zip(pauses, (0, 0.1, 0.2, 0), (0.1, 0.2, 0.4, 0.8), strict=True):
        assert hint <= pause <= hint + chance


async def test_a_slow_reader_is_told_and_has_the_token_at_hand() -> None:
    slow = ServerError("SLOW_CONSUMER", "the client does not read", code="ABORTED")
    transport = FakeTransport([fake.started(), point(1, rpb.GenerateRequest()), token(0, 1), slow])
    async with AsyncClient(transport=transport.opener) as client, client.stream("fake", "Read.") as stream:
        with pytest.raises(ServerError, match="does not read"):
            async for _ in stream:
                pass
        assert stream.resume_point is not None and stream.resume_point.ids == (100,)
    assert len(transport.requests) == 1


async def test_it_is_given_up_after_the_time_that_was_said_and_what_broke_it_is_told() -> None:
    async with (
        killed_when_held(ResumableRouter(2)) as server,
        AsyncClient(server.target, resume_timeout=0.5, max_retries=0) as client,
    ):
        with pytest.raises(Unavailable) as caught:
            await client.generate("fake", "Read.")
    assert caught.value.reason == "CONNECTION_LOST"
    assert isinstance(caught.value.__cause__, ConnectionFailed)


async def test_a_router_that_takes_it_up_and_says_nothing_is_given_up() -> None:
    first = FakeTransport([fake.started(), point(1, rpb.GenerateRequest()), token(0, 1), LOST])
    async with (
        AsyncClient(transport=first.opener, resume_timeout=0.3) as client,
        client.stream("fake", "Read.") as stream,
    ):
        while not stream.text:
            await anext(stream)
        first.responses[:] = [FakeTransport.WAIT]  # type: ignore[list-item]
        with pytest.raises(Unavailable, match="the decoder is gone"):
            await anext(stream)
        assert first.cancelled.is_set()


async def test_a_deadline_that_passes_meanwhile_is_told_as_that_with_what_broke_it() -> None:
    async with killed_when_held(ResumableRouter(2)) as server, AsyncClient(server.target) as client:
        with pytest.raises(DeadlineExceeded, match=r"1 s \(timeout\)") as caught:
            await client.generate("fake", "Read.", timeout=1)
    assert getattr(caught.value.__cause__, "reason", None) == "CONNECTION_LOST"


@pytest.mark.parametrize("leave", ["cancel", "close", "close the client"])
async def test_a_reader_who_leaves_between_two_routers_leaves_nothing(leave: str) -> None:
    dying = ResumableRouter(2)
    tasks = asyncio.all_tasks()
    async with killed_when_held(dying) as server, AsyncClient(server.target) as client:
        stream = client.stream("fake", "Read.")
        reading = asyncio.create_task(read(stream))
        await asyncio.wait_for(dying.left.wait(), SECONDS)
        await asyncio.sleep(0.2)  # to the first refused connections
        assert not reading.done()
        if leave == "cancel":
            reading.cancel()
        elif leave == "close":
            await stream.aclose()
        else:
            await client.close()
        with pytest.raises((asyncio.CancelledError, Cancelled)):
            await reading
        with pytest.raises(Cancelled):
            await anext(stream)
    for _ in range(500):
        if asyncio.all_tasks() <= tasks:
            break
        await asyncio.sleep(0.01)  # gRPC's own task of a call ends a moment after the call
    assert asyncio.all_tasks() <= tasks


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


# -- by hand -----------------------------------------------------------------------------------------------------------


async def test_whoever_keeps_the_point_goes_on_elsewhere_with_the_rest_alone() -> None:
    router = ResumableRouter((END, 3), (END, 5), None)
    async with serving(router) as server:
        async with AsyncClient(server.target, max_resumes=0) as client:
            async with client.stream("fake", "Read.", request_id="mine") as stream:
                with pytest.raises(Unavailable):
                    async for _ in stream:
                        pass
            kept = copy.deepcopy(stream.resume_point)
            assert kept is not None and kept.expires_at is not None
            assert kept.ids == (100, 101, 102) and kept.expires_at.year == 2030
        async with AsyncClient(server.target) as client, client.stream("fake", "Read.", resume=kept) as rest:
            events = [event async for event in rest]
    assert (rest.text, rest.request_id, rest.resumes) == (TEXT[3:], "mine", 1)
    first = next(event for event in events if isinstance(event, Token))
    assert (first.index, first.visible) == (3, 3)
    assert router.resumed == [[100, 101, 102], [100, 101, 102, 103, 104]]


def test_a_point_is_checked_where_it_is_made() -> None:
    for wrong in ({"token": b"", "ids": ()}, {"token": b"x", "ids": (-1,)}):
        with pytest.raises(InvalidRequest):
            ResumePoint(request_id="mine", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="token"):
        ResumePoint(resume_token=b"x", ids=(), request_id="mine")  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{"max_resumes": -1}, {"resume_timeout": 0}])
def test_patience_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Client("localhost:1", **options)
    assert caught.value.facts["field"] == next(iter(options))


# -- nothing is left ---------------------------------------------------------------------------------------------------


async def test_fifty_broken_streams_leave_no_thread_no_file_and_no_task() -> None:
    dying, other = ResumableRouter(), ResumableRouter()
    async with serving(dying) as first, serving(other) as second:
        targets = [first.target, nobody(), second.target]
        async with AsyncClient(targets, max_retries=0) as client:

            async def break_again(times: int) -> None:
                for _ in range(times):
                    dying.plans, other.plans = [(END, 1), None], [(END, 2), None]
                    done = await client.generate("fake", "Read.")
                    assert (done.text, done.resumes > 0) == (TEXT, True)

            await break_again(5)
            before = await settled()
            await break_again(50)
            after = await settled()
            assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


async def settled() -> tuple[int, int, int]:
    """Threads, files and tasks, when no call ends any longer: the least of a while."""
    counts = []
    for _ in range(20):
        await asyncio.sleep(0.01)
        counts.append(counted())
    return min(threads for threads, _, _ in counts), min(f for _, f, _ in counts), min(t for _, _, t in counts)


def counted() -> tuple[int, int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
