"""Where the bytes of a medium come from, as one protocol: out of the request itself, or out of an upload that may still
be running. Whoever reads them can do so again and again, as long as the request lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from blake3 import blake3

from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.medium import LARGE, medium_digest
from chiasm.rpc.v1 import common_pb2 as pb


class Source(Protocol):
    """The bytes of one medium."""

    @property
    def header(self) -> pb.MediaHeader:
        """What is said of them before they come."""
        ...

    @property
    def whole(self) -> bool:
        """Whether all of them are here."""
        ...

    @property
    def size(self) -> int:
        """How many are here."""
        ...

    async def digest(self) -> bytes | None:
        """Of all that the medium is (`chiasm.rpc.medium`); None while some of it is not here."""
        ...

    def chunks(self) -> AsyncIterator[pb.MediaChunk]:
        """The bytes from the beginning, in pieces of at most 1 MiB, as they come; the last is marked.

        Raises InvalidRequest UPLOAD_PROTOCOL if the rest of them will never come.
        """
        ...

    async def hint(self) -> bytes:
        """A digest of the first piece: equal media have equal hints, and it is there before the rest is."""
        ...


class Inline:
    """A medium that came with its request."""

    whole = True

    def __init__(self, medium: pb.Media) -> None:
        self._medium = medium
        self._digest: bytes | None = None
        self.size = sum(map(len, self._pieces()))
        self.header = pb.MediaHeader(kind=medium.kind, mime_type=medium.mime_type)
        if medium.WhichOneof("source") == "frames":
            self.header.frames.frames.extend(frame.header for frame in medium.frames.frames)
            if medium.frames.HasField("fps"):
                self.header.frames.fps = medium.frames.fps
        else:
            self.header.byte_length = len(medium.data)

    async def digest(self) -> bytes:
        if self._digest is None:
            pieces = self._pieces()
            if self.size > LARGE:
                self._digest = await asyncio.to_thread(medium_digest, self.header, pieces)
            else:
                self._digest = medium_digest(self.header, pieces)
        return self._digest

    async def chunks(self) -> AsyncIterator[pb.MediaChunk]:
        pieces = self._pieces()
        for number, data in enumerate(pieces):
            for at in range(0, max(len(data), 1), CHUNK_BYTES):
                ends = at + CHUNK_BYTES >= len(data)
                last = ends and number == len(pieces) - 1
                yield pb.MediaChunk(frame=number, data=data[at : at + CHUNK_BYTES], last=last, ends_frame=ends)

    async def hint(self) -> bytes:
        return await first_piece(self)

    def _pieces(self) -> list[bytes]:
        """Copies, so not to be kept."""
        return [frame.data for frame in self._medium.frames.frames] or [self._medium.data]


async def first_piece(source: Source) -> bytes:
    """A digest of the first piece of a source."""
    async for chunk in source.chunks():
        return blake3(chunk.data).digest()
    raise AssertionError("a medium has a last piece, which may be empty")
