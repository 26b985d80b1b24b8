"""Media that came by themselves, kept in memory for the requests that name them.

A handle lives inside its tenant and is usable from the header on: readers are fed as bytes come. It knows bytes,
handles and clocks, no model. What an upload gets wrong is told to whoever sends it, and ends the requests that read it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from blake3 import blake3

from chiasm.errors import ChiasmError, DeadlineExceeded, InvalidRequest, NotFound, Overloaded
from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.times import to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.media import first_piece


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Bounds on what is kept.

    Attributes:
        max_bytes: of one upload.
        total_bytes: of all of them together.
        max_uploads: how many are kept at a time.
        ttl, max_ttl: seconds after its last use that a medium is kept, and what a client may ask for.
        stall_seconds: an upload from which nothing comes for so long is given up.
        header_seconds: a request that overtakes the header of its upload waits for it so long.
    """

    max_bytes: int = 256 << 20
    total_bytes: int = 1 << 30
    max_uploads: int = 1024
    ttl: float = 600.0
    max_ttl: float = 3600.0
    stall_seconds: float = 30.0
    header_seconds: float = 2.0


class Upload:
    """`Source` of one upload.

    Attributes:
        size: bytes so far.
        readers: requests that hold it.
    """

    def __init__(self, header: pb.MediaHeader, ttl: float) -> None:
        self.header = header
        self.ttl = ttl
        self.size = 0
        self.whole = False
        self.readers = 0
        self.until = 0.0  # when it is forgotten, by the clock of its keeper, unless it is read
        self.digest = b""
        self._pieces: list[pb.MediaChunk] = []
        self._error: ChiasmError | None = None
        self._grown = asyncio.Condition()

    async def add(self, chunk: pb.MediaChunk, *, keep: bool = True) -> None:
        if keep:
            self._pieces.append(chunk)
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
                raise InvalidRequest(
                    "UPLOAD_PROTOCOL", "the upload of this medium broke off", facts={"cause": self._error.reason}
                )
            chunk = self._pieces[at]
            yield chunk
            if chunk.last:
                return
            at += 1

    def _has(self, piece: int) -> bool:
        return self._error is not None or piece < len(self._pieces)

    async def hint(self) -> bytes:
        return await first_piece(self)


class Uploads:
    """The uploads of a router.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, limits: UploadLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: dict[tuple[bytes, str], Upload] = {}
        self._came = asyncio.Condition()

    @property
    def size(self) -> int:
        """Bytes that are kept now."""
        return sum(upload.size for upload in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    async def find(self, tenant: bytes, handle: str) -> Upload:
        """The upload of a handle. One whose header has not come yet is waited for a moment.

        Raises NotFound MEDIA_EXPIRED: for another tenant's, an expired and an unknown handle alike.
        """

        def there() -> bool:
            self._forget()
            return (tenant, handle) in self._kept

        try:
            async with asyncio.timeout(self._limits.header_seconds), self._came:
                await self._came.wait_for(there)
        except TimeoutError:
            raise NotFound("MEDIA_EXPIRED", "no medium is kept under this handle; upload it again") from None
        return self._kept[tenant, handle]

    @contextmanager
    def held(self, upload: Upload) -> Iterator[None]:
        """Keeps an upload while the block runs; its time begins again afterwards."""
        upload.readers += 1
        try:
            yield
        finally:
            upload.readers -= 1
            upload.until = self._clock() + upload.ttl

    async def receive(self, tenant: bytes, requests: AsyncIterator[rpb.UploadRequest]) -> rpb.UploadResponse:
        """Takes one upload to its end.

        Raises InvalidRequest UPLOAD_PROTOCOL with the cause in the facts, UPLOAD_IN_USE (ALREADY_EXISTS),
        MEDIA_TOO_LARGE; Overloaded UPLOADS_FULL; DeadlineExceeded with the stage `upload` for a sender that stalls.
        """
        header = await self._header(requests)
        handle = header.upload_id.hex()
        before = self._kept.get((tenant, handle))
        if before is not None and not before.whole:
            raise _in_use(handle)
        wanted = to_seconds(header.ttl) if header.HasField("ttl") else self._limits.ttl
        upload = Upload(header.media, min(wanted, self._limits.max_ttl))
        if before is None:
            await self._keep((tenant, handle), upload)
        try:
            await self._fill(upload, header, requests, keep=before is None)
        except BaseException as error:
            if before is None:
                del self._kept[tenant, handle]
            await upload.fail(error if isinstance(error, ChiasmError) else _protocol("broken", "the sender left"))
            raise
        if before is not None and before.digest != upload.digest:
            raise _in_use(handle)
        kept = before or upload
        kept.until = self._clock() + kept.ttl
        response = rpb.UploadResponse(handle=handle, byte_length=upload.size, digest=upload.digest)
        response.expire_time.FromNanoseconds(int((time.time() + kept.ttl) * 1e9))
        return response

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _next(self, requests: AsyncIterator[rpb.UploadRequest]) -> rpb.UploadRequest | None:
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                return await anext(requests, None)
        except TimeoutError:
            seconds = self._limits.stall_seconds
            raise DeadlineExceeded(f"the upload stood still for {seconds:g} s", stage="upload") from None

    async def _header(self, requests: AsyncIterator[rpb.UploadRequest]) -> rpb.UploadHeader:
        first = await self._next(requests)
        if first is None or first.WhichOneof("message") != "header":
            raise _protocol("header", "an upload begins with its header")
        header = first.header
        if len(header.upload_id) != 16:
            raise _protocol("handle", f"upload_id has {len(header.upload_id)} bytes, 16 are needed")
        if header.media.kind not in (pb.MEDIA_KIND_IMAGE, pb.MEDIA_KIND_VIDEO):
            raise InvalidRequest.out_of_range("kind", header.media.kind, "an image or a video", "header.media")
        if header.HasField("ttl") and not 0 < to_seconds(header.ttl) < 1e9:
            raise InvalidRequest.out_of_range("ttl", to_seconds(header.ttl), "more than 0 seconds", "header")
        if header.media.byte_length > self._limits.max_bytes:
            raise self._too_large(header.media.byte_length)
        return header

    async def _keep(self, key: tuple[bytes, str], upload: Upload) -> None:
        self._make_room(uploads=1)
        upload.until = float("inf")  # while it comes
        self._kept[key] = upload
        async with self._came:
            self._came.notify_all()

    async def _fill(
        self, upload: Upload, header: rpb.UploadHeader, requests: AsyncIterator[rpb.UploadRequest], *, keep: bool
    ) -> None:
        """Takes every piece. `keep` is False for bytes that are here already and are only compared."""
        frames = max(1, len(header.media.frames.frames))
        digest = blake3()
        frame = 0
        while (request := await self._next(requests)) is not None:
            if request.WhichOneof("message") != "chunk":
                raise _protocol("header", "an upload has one header, and pieces after it")
            chunk = request.chunk
            if upload.whole:
                raise _protocol("length", "a piece came after the last")
            if len(chunk.data) > CHUNK_BYTES:
                raise _protocol("chunk", f"a piece has {len(chunk.data)} bytes, {CHUNK_BYTES} are taken")
            if not frame <= chunk.frame < frames:
                raise _protocol("frame", f"a piece is of frame {chunk.frame}, after frame {frame} of {frames}")
            frame = chunk.frame
            size = upload.size + len(chunk.data)
            if size > self._limits.max_bytes:
                raise self._too_large(size)
            if header.media.HasField("byte_length") and size > header.media.byte_length:
                raise _length(header.media.byte_length, size)
            if keep:
                self._make_room(size=len(chunk.data))
            digest.update(chunk.data)
            if chunk.last:  # what was promised is checked before anybody takes it for whole
                upload.digest = digest.digest()
                _check_end(header, size, upload.digest)
            await upload.add(chunk, keep=keep)
        if not upload.whole:
            raise _protocol("length", f"the upload ended after {upload.size} bytes without its last piece")

    def _make_room(self, *, size: int = 0, uploads: int = 0) -> None:
        """Forgets what has waited longest, nothing that is read or still coming."""
        self._forget()
        limits = self._limits
        idle = sorted((u.until, key) for key, u in self._kept.items() if u.whole and not u.readers)
        while self.size + size > limits.total_bytes or len(self._kept) + uploads > limits.max_uploads:
            if not idle:
                raise Overloaded(
                    "UPLOADS_FULL",
                    f"{len(self._kept)} uploads of {self.size} bytes are kept, {limits.max_uploads} of "
                    f"{limits.total_bytes} may be",
                    retry_after=5.0,
                    facts={"bytes": self.size, "limit": limits.total_bytes, "uploads": len(self._kept)},
                )
            del self._kept[idle.pop(0)[1]]

    def _forget(self) -> None:
        now = self._clock()
        for key in [key for key, u in self._kept.items() if u.until <= now and not u.readers]:
            del self._kept[key]

    def _too_large(self, size: int) -> InvalidRequest:
        limit = self._limits.max_bytes
        return InvalidRequest(
            "MEDIA_TOO_LARGE", f"the medium has {size} bytes, {limit} are taken", facts={"bytes": size, "limit": limit}
        )


def _check_end(header: rpb.UploadHeader, size: int, digest: bytes) -> None:
    if header.media.HasField("byte_length") and size != header.media.byte_length:
        raise _length(header.media.byte_length, size)
    if header.HasField("digest") and header.digest != digest:
        raise _protocol("digest", "the bytes that came are not those that the header names")


def _length(promised: int, came: int) -> InvalidRequest:
    error = _protocol("length", f"{promised} bytes were promised and {came} came")
    error.facts.update(promised=promised, came=came)
    return error


def _in_use(handle: str) -> InvalidRequest:
    return InvalidRequest(
        "UPLOAD_IN_USE", "other bytes are kept under this handle", code="ALREADY_EXISTS", facts={"handle": handle}
    )


def _protocol(cause: str, message: str) -> InvalidRequest:
    return InvalidRequest("UPLOAD_PROTOCOL", message, facts={"cause": cause})
