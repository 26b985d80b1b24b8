"""Processes that are killed in the middle of an answer: it goes on at the next token, and is the same answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from os import kill

import pytest

from chiasm.errors import ChiasmError, Unavailable
from chiasm.rpc.call import streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc
from tests import digits
from tests.asking import question, video
from tests.processes import Trio, trio
from tests.router.drawing import Heard

TOKENS = 160


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Three processes whose answers have the same bits in any company."""
    with trio(tmp_path_factory.mktemp("steady"), decoder=("--deterministic",)) as made:
        yield made


def long_question(*, n: int = 1) -> rpb.GenerateRequest:
    """About a clip, and drawn on beyond its end, with a temperature."""
    clip = digits.shipped_clips()[-1]
    request = question("Read the digits.", video(clip.path.read_bytes()), max_tokens=TOKENS)
    sampling = request.sampling
    sampling.ignore_eos, sampling.seed, sampling.temperature, sampling.n = True, 11, 0.8, n
    sampling.repetition_penalty = 1.1
    return request


@asynccontextmanager
async def asking(served: Trio) -> AsyncIterator[router_pb2_grpc.RouterAsyncStub]:
    async with connect(served.target) as channel:
        yield router_pb2_grpc.RouterStub(channel)


async def listen(
    stub: router_pb2_grpc.RouterAsyncStub,
    request: rpb.GenerateRequest,
    heard: Heard,
    *,
    meanwhile: tuple[int, asyncio.Event] | None = None,
) -> Heard:
    """Notes what is told. When so many tokens of sequence 0 were, the event is set."""
    events = streamed(stub.Generate(request, timeout=90))
    try:
        async for event in events:
            heard.note(event)
            if meanwhile is not None and len(heard.ids.get(0, [])) >= meanwhile[0]:
                meanwhile[1].set()
    finally:
        await events.aclose()
    return heard


def encoded(served: Trio) -> float:
    return sum(v for name, v in served.encoder.counted().items() if "units_total" in name and "encoded" in name)


@pytest.mark.parametrize(("n", "at"), [(1, 1), (1, TOKENS // 2), (2, TOKENS // 3)])
async def test_a_decoder_killed_in_the_middle_of_an_answer_costs_no_token_and_no_encode(
    steady: Trio, n: int, at: int
) -> None:
    request = long_question(n=n)
    async with asking(steady) as stub:
        whole = await listen(stub, request, Heard())
        before = encoded(steady)
        heard, reached = Heard(), asyncio.Event()
        listening = asyncio.create_task(listen(stub, request, heard, meanwhile=(at, reached)))
        await reached.wait()
        await asyncio.to_thread(steady.decoder.kill)
        steady.decoder.start()
        await listening
    assert heard.tokens == whole.tokens and heard.text == whole.text
    assert [point.attempt for point in heard.points] == [1, 2] and len(heard.started) == 1
    assert [(f.sequence, f.reason) for f in heard.finished] == [(f.sequence, f.reason) for f in whole.finished]
    assert heard.finished[-1].usage.output_tokens == n * TOKENS
    assert encoded(steady) == before
    await asyncio.to_thread(steady.decoder.wait_for, "ready")
    await steady.settled(seconds=45)


async def test_a_router_killed_in_the_middle_of_an_answer_is_gone_on_with_by_its_restart(steady: Trio) -> None:
    request = long_question()
    async with asking(steady) as stub:
        whole = await listen(stub, request, Heard())
        heard, reached = Heard(), asyncio.Event()
        listening = asyncio.create_task(listen(stub, request, heard, meanwhile=(TOKENS // 2, reached)))
        await reached.wait()
        await asyncio.to_thread(steady.router.kill)
        with pytest.raises(ChiasmError):
            await listening
    steady.router.start()
    await asyncio.to_thread(steady.router.wait_for, "ready")
    async with asking(steady) as stub:
        await listen(stub, heard.resume(request), heard)
    assert heard.tokens == whole.tokens and heard.text == whole.text and len(heard.finished) == 1
    await steady.settled(seconds=45)


async def test_a_router_that_is_told_to_end_tells_its_streams_and_they_go_on_after_it(steady: Trio) -> None:
    request = long_question()
    async with asking(steady) as stub:
        whole = await listen(stub, request, Heard())
        heard, reached = Heard(), asyncio.Event()
        listening = asyncio.create_task(listen(stub, request, heard, meanwhile=(1, reached)))
        await reached.wait()
        steady.decoder.pause()
        kill(steady.router.pid, signal.SIGTERM)
        with pytest.raises(Unavailable) as caught:
            await listening
        steady.decoder.go_on()
        assert caught.value.reason == "DRAINING"
    await asyncio.to_thread(steady.router.end)
    steady.router.start()
    await asyncio.to_thread(steady.router.wait_for, "ready")
    async with asking(steady) as stub:
        await listen(stub, heard.resume(request), heard)
    assert heard.tokens == whole.tokens and heard.text == whole.text
    await steady.settled(seconds=45)
