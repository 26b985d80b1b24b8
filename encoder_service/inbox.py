"""The caller's side of one `Encode` call, sorted as it comes: bytes, siblings, go and credit.

Messages may come in any order that the protocol allows and long before they are wanted; whatever breaks the protocol
ends the call. Bytes are held until they are taken, frame by frame, and while many are held no more are read: a slow
encoder slows its sender. It knows the order of messages and nothing of what they are for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.v1 import encoder_pb2 as epb

HELD_BYTES: Final = 8 << 20
"""Of whole frames that wait to be taken. One frame may be larger."""


class Inbox:
    """Reads a call's requests in a task of its own, from `start` until the caller ends or `close`.

    Args:
        max_bytes: of the whole medium.
        held_bytes: of frames that wait; beyond, nothing is read but what somebody waits for.
    """

    def __init__(
        self, requests: AsyncIterator[epb.EncodeRequest], *, max_bytes: int, held_bytes: int = HELD_BYTES
    ) -> None:
        self._requests = requests
        self._max_bytes = max_bytes
        self._held_bytes = held_bytes
        self._size = 0  # of all that came
        self._count = 1  # frames of the medium; a file is one
        self._frame = 0  # which is coming
        self._pieces: list[bytes] = []  # of that one
        self._whole: deque[bytes] = deque()  # frames that came and were not taken
        self._credit = 0
        self._siblings: epb.EncodeSiblings | None = None
        self._go: epb.EncodeGo | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._waiting = 0  # for a message that has not come
        self._over = False
        self._error: Exception | None = None  # how the caller's side ended, if not well

    async def start(self) -> epb.EncodeOpen:
        """The opening message; from here on the rest is read. Raises InvalidRequest if there is none."""
        first = await anext(self._requests, None)
        if first is None or not first.HasField("open"):
            raise _protocol("an encoding begins with open")
        self._credit = first.open.initial_credit
        self._count = max(1, len(first.open.media.frames.frames))
        self._task = asyncio.create_task(self._read())
        return first.open

    @property
    def held(self) -> int:
        """Bytes that came and were not taken."""
        return sum(map(len, self._whole)) + sum(map(len, self._pieces))

    @property
    def frame_there(self) -> bool:
        """Whether `frame` would return at once."""
        return bool(self._whole) or self._over

    async def frame(self) -> bytes:
        """The next frame of a list, or the one file, when all of it has come. From now on it is the caller's alone."""
        await self._until(lambda: bool(self._whole))
        data = self._whole.popleft()
        async with self._changed:
            self._changed.notify_all()
        return data

    async def siblings(self) -> epb.EncodeSiblings:
        await self._until(lambda: self._siblings is not None)
        assert self._siblings is not None
        return self._siblings

    async def go(self) -> epb.EncodeGo:
        await self._until(lambda: self._go is not None)
        assert self._go is not None
        return self._go

    async def spend(self, count: int) -> None:
        """Waits until any credit is left, and takes `count` bytes. A unit larger than what is left passes all the same:
        it could wait for ever otherwise; what follows waits until the debt is paid."""
        await self._until(lambda: self._credit > 0)
        self._credit -= count

    def give_back(self, count: int) -> None:
        """Takes back a `spend`: nothing came of it."""
        self._credit += count

    async def ended(self) -> None:
        """Waits until the caller has ended its side: it needs nothing more, and every entry announced is attached.

        Raises whatever broke the caller's side instead.
        """
        await self._until(lambda: self._over)
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._whole.clear()
        self._pieces.clear()

    async def _until(self, there: Callable[[], bool]) -> None:
        """Waits for what the caller sends, and lets all be read that comes before it, however much is held.

        Raises how the caller's side ended, if it ended without.
        """
        async with self._changed:
            if not there() and not self._over:
                self._waiting += 1
                self._changed.notify_all()
                try:
                    await self._changed.wait_for(lambda: there() or self._over)
                finally:
                    self._waiting -= 1
            if not there():
                raise self._error or _protocol("the caller ended before the encoding could")

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                self._sort(request)
                del request  # this frame would keep it until the next one comes
                async with self._changed:
                    self._changed.notify_all()
                    await self._changed.wait_for(self._reads_on)
        except Exception as raised:
            self._error = raised
        self._over = True
        async with self._changed:
            self._changed.notify_all()

    def _reads_on(self) -> bool:
        return bool(self._waiting) or not self._whole or self.held <= self._held_bytes

    def _sort(self, request: epb.EncodeRequest) -> None:
        which = request.WhichOneof("message")
        if which == "chunk":
            chunk = request.chunk
            self._take(chunk.frame, chunk.data, ends=chunk.ends_frame, last=chunk.last)
        elif which == "siblings" and self._siblings is None:
            self._siblings = request.siblings
        elif which == "go" and self._go is None:
            self._go = request.go
        elif which == "credit":
            self._credit += request.credit.bytes
        else:
            raise _protocol(f"{which or 'an empty message'} is not expected here")

    def _take(self, frame: int, data: bytes, *, ends: bool, last: bool) -> None:
        """A piece of a frame. Frames that it passes over have no bytes."""
        ended = frame == self._frame - 1 and last and not data  # what ends the medium may come by itself
        if self._frame > self._count or len(data) > CHUNK_BYTES or not (self._frame <= frame < self._count or ended):
            raise _protocol(f"a chunk has {len(data)} bytes for frame {frame}, after frame {self._frame}")
        self._size += len(data)
        if self._size > self._max_bytes:
            raise InvalidRequest(
                "MEDIA_TOO_LARGE",
                f"the medium has more than {self._max_bytes} bytes",
                facts={"bytes": self._size, "limit": self._max_bytes},
            )
        while self._frame < frame:
            self._end_frame()
        if data:
            self._pieces.append(data)
        if ends and self._frame == frame:
            self._end_frame()
        if last:
            while self._frame < self._count:
                self._end_frame()
            self._frame += 1  # nothing comes after it

    def _end_frame(self) -> None:
        self._whole.append(b"".join(self._pieces))
        self._pieces = []
        self._frame += 1


def _protocol(message: str) -> InvalidRequest:
    return InvalidRequest("UPLOAD_PROTOCOL", message, facts={"cause": "order"})
