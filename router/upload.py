"""One medium that came by itself: its pieces, readable while they come, as often as one likes.

It knows whether it is whole or has failed. Who may read it, and for how long it is kept, is for its keeper to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from chiasm.errors import ChiasmError, InvalidRequest
from chiasm.rpc.v1 import common_pb2 as pb
from router.media import first_piece

PIECE_BYTES: Final = 512
"""What keeping a piece costs beside its bytes. Pieces may be small; keeping millions of them is not free."""


class Upload:
    """`Source` of one upload.

    Attributes:
        size: bytes so far.
        kept: bytes that keeping it takes.
        readers: requests that hold it.
        bytes_digest: BLAKE3 of all bytes, once it is whole.
        medium_digest: of all that it is, as `digest`.
    """

    def __init__(self, header: pb.MediaHeader, ttl: float) -> None:
        self.header = header
        self.ttl = ttl
        self.size = 0
        self.kept = PIECE_BYTES + header.ByteSize()
        self.whole = False
        self.readers = 0
        self.until = 0.0  # when it is forgotten, by the clock of its keeper, unless it is read
        self.bytes_digest = b""
        self.medium_digest = b""
        self._hint: bytes | None = None
        self._pieces: list[pb.MediaChunk] = []
        self._error: ChiasmError | None = None
        self._grown = asyncio.Condition()

    async def add(self, chunk: pb.MediaChunk, *, keep: bool = True) -> None:
        if keep:
            self._pieces.append(chunk)
            self.kept += len(chunk.data) + PIECE_BYTES
        self.size += len(chunk.data)
        self.whole = chunk.last
        async with self._grown:
            self._grown.notify_all()

    async def fail(self, error: ChiasmError) -> None:
        """Whoever reads it is told that the rest will never come."""
        self._error = error
        self._pieces = []
        async with self._grown:
            self._grown.notify_all()

    async def chunks(self) -> AsyncIterator[pb.MediaChunk]:
        at = 0
        while True:
            async with self._grown:
                await self._grown.wait_for(partial(self._has, at))
            if self._error is not None:
                cause = self._error.facts.get("cause", self._error.reason)
                raise InvalidRequest("UPLOAD_PROTOCOL", "the upload of this medium broke off", facts={"cause": cause})
            chunk = self._pieces[at]
            yield chunk
            if chunk.last:
                return
            at += 1

    def _has(self, piece: int) -> bool:
        return self._error is not None or piece < len(self._pieces)

    async def digest(self) -> bytes | None:
        return self.medium_digest if self.whole and self._error is None else None

    async def hint(self) -> bytes:
        if self._hint is None:
            self._hint = await first_piece(self)
        return self._hint
