"""Sending a medium to an encoder: one `Encode` call, written as its requests come due and read as its responses do.

It knows the order of one call's messages. Whether a call is made again, and where, is decided above.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

from google.rpc.status_pb2 import Status

from chiasm.rpc.status import from_status
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.fleet import EncoderWorker
from router.media import Source

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages of one call in the order in which they are put, until it is ended."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | Exception | None] = asyncio.Queue()

    def put(self, message: T) -> None:
        self._queue.put_nowait(message)

    async def sent(self, message: T) -> None:
        """Puts a message and returns when it is on its way: what is put meanwhile goes before the next."""
        self.put(message)
        await self._queue.join()

    def end(self, error: Exception | None = None) -> None:
        """No more messages come; with an error, because of it."""
        self._queue.put_nowait(error)

    async def messages(self) -> AsyncGenerator[T, None]:
        """Raises the error it was ended with."""
        while (message := await self._queue.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message
            self._queue.task_done()


class Dispatch:
    """One call.

    Args:
        opened: what it begins with.
        source: the bytes that follow: at once, or where `opened` names their digest when the encoder wants them, as it
            may do late or never. Those of a list are sent while they are of use: until it is known what it is, and
            again when entries may be made and there is credit for them.

    Attributes:
        pinned: bytes of each entry that this call announced and that is not attached yet.
        begun: the encoder has answered.
        ended: the encoder has announced everything.
        units: how many the medium becomes, as the encoder said last.
        sending: the bytes are sent, or will be.
    """

    def __init__(self, opened: epb.EncodeOpen, source: Source) -> None:
        self._opened = opened
        self._source = source
        self._outbox: Outbox[epb.EncodeRequest] = Outbox()
        self._outbox.put(epb.EncodeRequest(open=opened))
        self._wanted = asyncio.Event()
        self._known = False  # what the medium is, as far as its bytes tell
        self._gone = False
        self._of_use = asyncio.Event()
        self._of_use.set()
        self.pinned: dict[int, int] = {}
        self.begun = False
        self.ended = False
        self.units = 0
        self.sending = False
        if not opened.HasField("file_digest"):
            self._send()

    @property
    def form(self) -> pb.EntryForm.ValueType:
        """In which it asks for entries."""
        return self._opened.form

    def siblings(self, siblings: epb.EncodeSiblings) -> None:
        self._outbox.put(epb.EncodeRequest(siblings=siblings))

    def go(self, go: epb.EncodeGo) -> None:
        self._outbox.put(epb.EncodeRequest(go=go))
        self._gone = True
        self._pace()

    def attached(self, unit: int) -> None:
        """An entry of this call was attached, or is wanted no more: its bytes are credit again.

        The call's own side ends when all is announced and attached. One that is left earlier takes its pins back.
        """
        size = self.pinned.pop(unit, None)
        if self.ended:
            self._settle()
        elif size is not None:
            self._outbox.put(epb.EncodeRequest(credit=epb.EncodeCredit(bytes=size)))
        self._pace()

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
            feeding = asyncio.create_task(self._feed())
            calls = worker.calls.encode(self._outbox.messages(), timeout=timeout)
            try:
                async with aclosing(calls), aclosing(worker.attended(calls)) as responses:
                    async for response in responses:
                        self.begun = True
                        which = response.WhichOneof("message")
                        if response.HasField("load"):
                            worker.hear(response.load)
                        if which == "probed" and response.probed.bytes_wanted and not self.sending:
                            self._send()
                        elif which in ("probed", "sized"):
                            self._known = True
                        elif which == "ready":
                            self.pinned[response.ready.unit] = response.ready.entry.byte_length
                        elif which == "failed":
                            raise from_status(Status.FromString(response.failed.status))
                        self._pace()
                        yield response
                        if which == "end":
                            self.ended = True
                            self._settle()
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    def _send(self) -> None:
        self.sending = True
        self._known = self._gone  # of one that is asked for after go, sizes and all else were told from memory
        self._wanted.set()

    def _settle(self) -> None:
        if not self.pinned:
            self._outbox.end()

    def _pace(self) -> None:
        """An encoder that waits for something else than bytes would only have to hold them."""
        can_encode = self._gone and sum(self.pinned.values()) < self._opened.initial_credit
        if can_encode or not self._known:
            self._of_use.set()
        else:
            self._of_use.clear()

    async def _feed(self) -> None:
        listed = self._source.header.HasField("frames")
        await self._wanted.wait()
        try:
            async for chunk in self._source.chunks():
                if listed:
                    await self._of_use.wait()
                await self._outbox.sent(epb.EncodeRequest(chunk=chunk))
        except Exception as error:
            self._outbox.end(error)
