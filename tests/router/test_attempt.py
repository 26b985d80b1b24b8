"""One decoder at work on an answer: what becomes of it behind its last word is nobody's concern."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from chiasm.errors import Unavailable
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from router.attempt import Attempt
from router.fleet import DecoderCalls, Worker


class OneWord:
    """`DecoderCalls` of a decoder that says that the answer has ended, and then breaks off."""

    async def reach(self) -> None:
        """It is here."""

    async def decode(
        self,
        requests: AsyncIterator[dpb.DecodeRequest],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncGenerator[dpb.DecodeResponse, None]:
        yield dpb.DecodeResponse(finished=pb.Finished(attempt=1, usage=pb.Usage()))
        raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")


async def ends(response: dpb.DecodeResponse) -> bool:
    return response.HasField("finished")


async def test_a_decoder_that_falls_silent_behind_its_last_word_takes_nothing_back() -> None:
    worker = Worker[DecoderCalls](b"1", OneWord())
    told: list[str] = []

    async def whole() -> None:
        worker.silent.set()
        for _ in range(10):
            await asyncio.sleep(0)
        told.append("the end")

    await Attempt(1, worker).run(ends, whole, timeout=None)
    assert told == ["the end"] and worker.running == 0


async def test_one_that_falls_silent_before_it_is_lost() -> None:
    worker = Worker[DecoderCalls](b"1", OneWord())

    async def waits(response: dpb.DecodeResponse) -> bool:
        worker.silent.set()
        await asyncio.Event().wait()
        return True

    async def never() -> None:
        raise AssertionError("the answer is not whole")

    with pytest.raises(Unavailable) as caught:
        await Attempt(1, worker).run(waits, never, timeout=None)
    assert caught.value.reason == "WORKER_SILENT" and worker.running == 0
