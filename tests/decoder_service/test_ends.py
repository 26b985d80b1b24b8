"""How calls end: with an account beside the very last end, or with a refusal, and never by waiting for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from chiasm.errors import InvalidRequest, Unsupported
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from tests.decoder_service.halves import CLOSE, Halves, halves, sent, wrapped
from tests.decoder_service.holders import hold
from tests.decoder_service.test_preempting import ask, say_all


async def to_its_end(system: Halves, requests: AsyncIterator[dpb.DecodeRequest]) -> None:
    async with asyncio.timeout(20), aclosing(system.servicer.Decode(requests, None)) as responses:  # type: ignore[type-var]
        async for _ in responses:
            pass


async def test_the_last_end_of_several_answers_tells_what_was_used_also_while_units_are_handed_over_again() -> None:
    async with halves() as system:
        caller = ask(system, 0, "Read the digits.", tokens=40, number=2)
        await say_all(caller)

        async def again() -> None:
            while not caller.told.ids:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
            (ready,) = await system.ready(caller.clips[0].units[0])
            while len(caller.told.ends) < 2:
                caller.send(ready)
                await asyncio.sleep(0.001)

        handing = asyncio.create_task(again())
        await caller.run()
        await handing
        assert sorted(end.HasField("usage") for end in caller.told.ends.values()) == [False, True]


@pytest.mark.parametrize("mode", [dpb.SAMPLE_MODE_WHEN_CLOSED, dpb.SAMPLE_MODE_ESTIMATE])
async def test_a_caller_that_ends_before_its_media_are_sized_is_told_so(mode: dpb.SampleMode.ValueType) -> None:
    async with halves() as system:
        opened = system.opened(0, "Read.", max_tokens=4)
        opened.sample = mode
        with pytest.raises(InvalidRequest) as caught:
            await to_its_end(system, sent([opened, CLOSE], stays=False))
    assert caught.value.reason == "UPLOAD_PROTOCOL"


async def test_several_answers_to_a_timeline_that_grows_are_refused() -> None:
    async with halves() as system:
        opened = system.opened("hello", max_tokens=3)
        opened.sample, opened.sampling.n = dpb.SAMPLE_MODE_WHILE_OPEN, 2
        with pytest.raises(Unsupported) as caught:
            await to_its_end(system, sent([opened, CLOSE]))
    assert caught.value.facts == {"field": "n"}


@pytest.mark.parametrize(("pool", "reason"), [(9000, "CONTEXT_LENGTH_EXCEEDED"), (1024, "NEVER_FITS")])
async def test_a_live_timeline_that_outgrows_its_context_or_a_pool_while_it_waits_is_refused_then_and_there(
    pool: int, reason: str
) -> None:
    async with halves(text_tokens=pool) as system:
        holder = await hold(system.decoder, text=system.decoder.text_capacity - 8)
        opened = system.opened("hello")
        opened.sample = dpb.SAMPLE_MODE_WHILE_OPEN

        async def grows() -> AsyncIterator[dpb.DecodeRequest]:
            yield wrapped(opened)
            for event in range(1, 60):
                append = dpb.DecodeAppend(event=event)
                append.turn.role = pb.ROLE_USER
                append.turn.parts.add(text="word " * 40)
                yield wrapped(append)
            await asyncio.Event().wait()

        with pytest.raises(InvalidRequest) as caught:
            await to_its_end(system, grows())
        assert caught.value.reason == reason
        await system.decoder.release(holder)
