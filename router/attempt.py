"""One decoder that works on an answer: its call, and what belongs to that call alone. Another attempt begins with
nothing of it.

It knows what a decoder may say and that it has to come to an end. Who is told, and what is done about a decoder that
was lost, is the coordinator's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

from chiasm.errors import ChiasmError, Unavailable
from chiasm.rpc.v1 import decoder_pb2 as dpb
from router.dispatch import Outbox
from router.fleet import DecoderWorker

LAST_WORDS: Final = 5.0
"""Seconds that a worker is given to end a call by itself once all was said, or to say the rest."""


class Attempt:
    """One `Decode`.

    Args:
        number: counts the attempts of the request, from 1.
        worker: who is asked.

    Attributes:
        told: what the decoder is told.
        admitted, began: it has room for the timeline; it has begun to answer.
        heard: it has said something: what it was asked for has begun.
        tokens: that it drew and the client was told.
        stale: what it said in the name of another attempt; nobody was told that.
        done: nothing more is to be told of it.
    """

    def __init__(self, number: int, worker: DecoderWorker) -> None:
        self.number = number
        self.worker = worker
        self.told: Outbox[dpb.DecodeRequest] = Outbox()
        self.admitted = False
        self.began = False
        self.heard = False
        self.tokens = 0
        self.stale = 0
        self.done = False

    async def run(
        self,
        on: Callable[[dpb.DecodeResponse], Awaitable[bool]],
        *,
        timeout: float | None,  # noqa: ASYNC109 - it is the call's deadline
    ) -> None:
        """Follows the decoder until `on`, which is given each of its responses, says that the answer is complete. The
        call is over then, as it is when this raises or is cancelled: nothing of it reaches anybody later.

        Raises ChiasmError: what the decoder answered, how the call broke, Unavailable WORKER_SILENT or STREAM_BROKEN.
        Whatever `on` raises comes out as it is.
        """
        with self.worker.busy():
            calls = self.worker.calls.decode(self.told.messages(), timeout=timeout)
            async with aclosing(calls):
                async with self.worker.heard_of():
                    async for response in calls:
                        self.heard = True
                        if response.HasField("load"):
                            self.worker.hear(response.load)
                        if self._is_stale(response):
                            self.stale += 1
                        elif await on(response):
                            self.done = True
                            break
                if not self.done:
                    raise Unavailable("STREAM_BROKEN", "the decoder ended its stream before the answer was finished")
                await self._see_off(calls)

    def _is_stale(self, response: dpb.DecodeResponse) -> bool:
        """Whether it is said in the name of an earlier attempt."""
        which = response.WhichOneof("message")
        if which == "tokens":
            return response.tokens.attempt < self.number
        if which == "visible":
            return response.visible.attempt < self.number
        if which == "started":
            return response.started.attempt < self.number
        return which == "finished" and response.finished.attempt < self.number

    async def _see_off(self, responses: AsyncIterator[dpb.DecodeResponse]) -> None:
        """Lets the decoder end its stream by itself: when it has, it has given back what the timeline held."""
        try:
            async with asyncio.timeout(LAST_WORDS):
                async for _ in responses:
                    pass
        except (TimeoutError, ChiasmError):
            pass  # the answer is whole, and the call ends with this block
