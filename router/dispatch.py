"""Sending a medium to an encoder: one `Encode` call, written as its requests come due and read as its responses do.

It knows the order of one call's messages. Whether a call is made again, and where, is decided above.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Generic, TypeVar

from google.rpc.status_pb2 import Status

from chiasm.rpc.status import from_status
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.fleet import EncoderWorker
from router.media import Source

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages of one call in the order in which they are put, until it is ended."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()

    def put(self, message: T) -> None:
        self._queue.put_nowait(message)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def messages(self) -> AsyncGenerator[T, None]:
        while (message := await self._queue.get()) is not None:
            yield message


class Dispatch:
    """One call.

    Args:
        opened: what it begins with.
        source: the bytes that follow: at once, or where `opened` names their digest when the encoder wants them, as it
            may do late or never. Nothing else need be sent while they come: who waits for them can tell nothing new.

    Attributes:
        pinned: bytes of each entry that this call announced and that is not attached yet.
        ended: the encoder has announced everything.
        units: how many the medium becomes, as the encoder said last.
        sending: the bytes are sent, or will be.
    """

    def __init__(self, opened: epb.EncodeOpen, source: Source) -> None:
        self._opened = opened
        self._source = source
        self._outbox: Outbox[epb.EncodeRequest | Source] = Outbox()
        self.pinned: dict[int, int] = {}
        self.ended = False
        self.units = 0
        self.sending = False
        if not opened.HasField("file_digest"):
            self._send()

    def siblings(self, siblings: epb.EncodeSiblings) -> None:
        self._outbox.put(epb.EncodeRequest(siblings=siblings))

    def go(self, go: epb.EncodeGo) -> None:
        self._outbox.put(epb.EncodeRequest(go=go))

    def attached(self, unit: int) -> None:
        """An entry of this call was attached, or is wanted no more: its bytes are credit again.

        The call's own side ends when all is announced and attached. One that is left earlier takes its pins back.
        """
        size = self.pinned.pop(unit, None)
        if self.ended:
            self._settle()
        elif size is not None:
            self._outbox.put(epb.EncodeRequest(credit=epb.EncodeCredit(bytes=size)))

    async def run(
        self,
        worker: EncoderWorker,
        *,
        timeout: float | None,  # noqa: ASYNC109 - it is the call's deadline
    ) -> AsyncGenerator[epb.EncodeResponse, None]:
        """The responses, announcements noted. Closing the generator ends the call.

        Raises ChiasmError: the medium's fault as the encoder found it, or how the call broke.
        """
        with worker.busy():
            calls = worker.calls.encode(self._requests(), timeout=timeout)
            async with aclosing(calls), aclosing(worker.attended(calls)) as responses:
                async for response in responses:
                    which = response.WhichOneof("message")
                    if which == "probed" and response.probed.bytes_wanted and not self.sending:
                        self._send()
                    elif which == "ready":
                        self.pinned[response.ready.unit] = response.ready.entry.byte_length
                    elif which == "failed":
                        raise from_status(Status.FromString(response.failed.status))
                    yield response
                    if which == "end":
                        self.ended = True
                        self._settle()

    def _send(self) -> None:
        self.sending = True
        self._outbox.put(self._source)

    def _settle(self) -> None:
        if not self.pinned:
            self._outbox.end()

    async def _requests(self) -> AsyncIterator[epb.EncodeRequest]:
        yield epb.EncodeRequest(open=self._opened)
        async for message in self._outbox.messages():
            if isinstance(message, epb.EncodeRequest):
                yield message
            else:
                async for chunk in message.chunks():
                    yield epb.EncodeRequest(chunk=chunk)
