"""The caller's side of one `Encode` call, sorted as it comes: bytes, siblings, go and credit.

Messages may come in any order that the protocol allows and long before they are wanted; whatever breaks the protocol
ends the call. It knows the order of messages and nothing of what they are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.v1 import encoder_pb2 as epb


class Inbox:
    """Reads a call's requests in a task of its own, from `start` until the caller ends or `close`.

    Args:
        max_bytes: of the whole medium.
    """

    def __init__(self, requests: AsyncIterator[epb.EncodeRequest], *, max_bytes: int) -> None:
        self._requests = requests
        self._max_bytes = max_bytes
        self._size = 0
        self._pieces: list[bytearray] = []
        self._credit = 0
        self._credited = asyncio.Condition()
        loop = asyncio.get_running_loop()
        self._media: asyncio.Future[list[bytes]] = loop.create_future()
        self._siblings: asyncio.Future[epb.EncodeSiblings] = loop.create_future()
        self._go: asyncio.Future[epb.EncodeGo] = loop.create_future()
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._error: Exception | None = None  # how the caller's side ended, if not well

    async def start(self) -> epb.EncodeOpen:
        """The opening message; from here on the rest is read. Raises InvalidRequest if there is none."""
        first = await anext(self._requests, None)
        if first is None or not first.HasField("open"):
            raise _protocol("an encoding begins with open")
        self._credit = first.open.initial_credit
        frames = len(first.open.media.frames.frames)
        self._pieces = [bytearray() for _ in range(max(1, frames))]
        self._task = asyncio.create_task(self._read())
        return first.open

    async def media(self) -> list[bytes]:
        """The bytes of each frame of a list, or of the one file."""
        return await self._media

    async def siblings(self) -> epb.EncodeSiblings:
        return await self._siblings

    async def go(self) -> epb.EncodeGo:
        return await self._go

    @property
    def in_credit(self) -> bool:
        """Whether `spend` would pass at once."""
        return self._credit > 0

    async def spend(self, count: int) -> None:
        """Waits until any credit is left, and takes `count` bytes. A unit larger than what is left passes all the same:
        it could wait for ever otherwise; what follows waits until the debt is paid."""
        async with self._credited:
            await self._credited.wait_for(lambda: self._credit > 0 or self._over.is_set())
            if self._credit <= 0:
                raise self._error or _protocol("the caller ended before it gave the credit that is needed")
            self._credit -= count

    def give_back(self, count: int) -> None:
        """Takes back a `spend`: nothing came of it."""
        self._credit += count

    async def ended(self) -> None:
        """Waits until the caller has ended its side: it needs nothing more, and every entry announced is attached.

        Raises whatever broke the caller's side instead.
        """
        await self._over.wait()
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        for future in (self._media, self._siblings, self._go):
            future.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                await self._sort(request)
            error: Exception = _protocol("the caller ended before the encoding could")
        except Exception as raised:
            error = self._error = raised
        self._over.set()
        async with self._credited:
            self._credited.notify_all()
        for future in (self._media, self._siblings, self._go):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: who waits for it later gets it all the same

    async def _sort(self, request: epb.EncodeRequest) -> None:
        which = request.WhichOneof("message")
        if which == "chunk" and not self._media.done():
            chunk = request.chunk
            self._size += len(chunk.data)
            if len(chunk.data) > CHUNK_BYTES or chunk.frame >= len(self._pieces):
                raise _protocol(f"a chunk has {len(chunk.data)} bytes for frame {chunk.frame}")
            if self._size > self._max_bytes:
                raise InvalidRequest(
                    "MEDIA_TOO_LARGE",
                    f"the medium has more than {self._max_bytes} bytes",
                    facts={"bytes": self._size, "limit": self._max_bytes},
                )
            self._pieces[chunk.frame] += chunk.data
            if chunk.last:
                self._media.set_result([bytes(piece) for piece in self._pieces])
                self._pieces = []
        elif which == "siblings" and not self._siblings.done():
            self._siblings.set_result(request.siblings)
        elif which == "go" and not self._go.done():
            self._go.set_result(request.go)
        elif which == "credit":
            async with self._credited:
                self._credit += request.credit.bytes
                self._credited.notify_all()
        else:
            raise _protocol(f"{which or 'an empty message'} is not expected here")


def _protocol(message: str) -> InvalidRequest:
    return InvalidRequest("UPLOAD_PROTOCOL", message, facts={"cause": "order"})
