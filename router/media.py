"""Where the bytes of a medium come from, as one protocol: out of the request itself, or out of an upload that may still
be running. Whoever reads them can do so again and again, as long as the request lasts."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Protocol

from chiasm.rpc.limits import CHUNK_BYTES
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
        self.header = pb.MediaHeader(kind=medium.kind, mime_type=medium.mime_type)
        if medium.WhichOneof("source") == "frames":
            self.header.frames.frames.extend(frame.header for frame in medium.frames.frames)
            if medium.frames.HasField("fps"):
                self.header.frames.fps = medium.frames.fps
        else:
            self.header.byte_length = len(medium.data)

    async def chunks(self) -> AsyncIterator[pb.MediaChunk]:
        listed = self._medium.WhichOneof("source") == "frames"
        frames = [frame.data for frame in self._medium.frames.frames] if listed else [self._medium.data]
        for number, data in enumerate(frames):
            for at in range(0, max(len(data), 1), CHUNK_BYTES):
                ends = at + CHUNK_BYTES >= len(data)
                last = ends and number == len(frames) - 1
                yield pb.MediaChunk(frame=number, data=data[at : at + CHUNK_BYTES], last=last, ends_frame=ends)

    async def hint(self) -> bytes:
        return await first_piece(self)


async def first_piece(source: Source) -> bytes:
    """A digest of the first piece of a source."""
    async for chunk in source.chunks():
        return hashlib.blake2b(chunk.data, digest_size=16).digest()
    raise AssertionError("a medium has a last piece, which may be empty")
