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

from chiasm.errors import ChiasmError, DeadlineExceeded, InvalidRequest, NotFound, Overloaded
from chiasm.rpc.limits import CHUNK_BYTES, LISTED_FRAMES
from chiasm.rpc.medium import RollingDigest
from chiasm.rpc.times import to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.request import check_mime
from router.upload import PIECE_BYTES, Upload


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
        max_seconds: an upload that takes longer is given up.
    """

    max_bytes: int = 256 << 20
    total_bytes: int = 1 << 30
    max_uploads: int = 1024
    ttl: float = 600.0
    max_ttl: float = 3600.0
    stall_seconds: float = 30.0
    header_seconds: float = 2.0
    max_seconds: float = 3600.0


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
        """Bytes that keeping them takes now."""
        return sum(upload.kept for upload in self._kept.values())

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
            if upload.whole:  # one that still comes is kept as long as it does
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
            with self.held(before or upload):  # to the end of the stream: the last piece alone is not yet a handle
                await self._fill(upload, header, requests, keep=before is None)
        except BaseException as error:
            if before is None:
                self._kept.pop((tenant, handle), None)
            await upload.fail(error if isinstance(error, ChiasmError) else _protocol("broken", "the sender left"))
            raise
        if before is not None and before.medium_digest != upload.medium_digest:
            raise _in_use(handle)
        kept = before or upload
        response = rpb.UploadResponse(handle=handle, byte_length=upload.size, digest=upload.bytes_digest)
        response.expire_time.FromNanoseconds(int((time.time() + kept.ttl) * 1e9))
        return response

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _next(self, requests: AsyncIterator[rpb.UploadRequest]) -> rpb.UploadRequest | None:
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                return await anext(requests, None)
        except TimeoutError:
            raise _late(f"the upload stood still for {self._limits.stall_seconds:g} s") from None

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
        check_mime(header.media.mime_type, "header.media")
        frames = len(header.media.frames.frames)
        if frames > LISTED_FRAMES:
            raise InvalidRequest(
                "TOO_MANY_ITEMS",
                f"{frames} frames are given, {LISTED_FRAMES} are taken",
                item="header.media",
                facts={"got": frames, "limit": LISTED_FRAMES},
            )
        if header.media.byte_length > self._limits.max_bytes:
            raise self._too_large(header.media.byte_length)
        return header

    async def _keep(self, key: tuple[bytes, str], upload: Upload) -> None:
        self._make_room(size=upload.kept, uploads=1)
        upload.until = float("inf")  # while it comes
        self._kept[key] = upload
        async with self._came:
            self._came.notify_all()

    async def _fill(
        self, upload: Upload, header: rpb.UploadHeader, requests: AsyncIterator[rpb.UploadRequest], *, keep: bool
    ) -> None:
        """Takes every piece. `keep` is False for bytes that are here already and are only compared."""
        frames = max(1, len(header.media.frames.frames))
        digest = RollingDigest(header.media)
        frame, frame_ended = 0, False
        end = self._clock() + self._limits.max_seconds
        while (request := await self._next(requests)) is not None:
            if self._clock() > end:
                raise _late(f"the upload took longer than {self._limits.max_seconds:g} s")
            if request.WhichOneof("message") != "chunk":
                raise _protocol("header", "an upload has one header, and pieces after it")
            chunk = request.chunk
            if upload.whole:
                raise _protocol("length", "a piece came after the last")
            if len(chunk.data) > CHUNK_BYTES:
                raise _protocol("chunk", f"a piece has {len(chunk.data)} bytes, {CHUNK_BYTES} are taken")
            ends = chunk.last or chunk.ends_frame
            if not chunk.data and not ends and chunk.frame == frame:
                raise _protocol("chunk", "a piece that ends nothing and is not of a new frame is empty")
            more = frame_ended and chunk.frame == frame and not (chunk.last and not chunk.data)
            if more or not frame <= chunk.frame < frames:
                raise _protocol("frame", f"a piece is of frame {chunk.frame}, after frame {frame} of {frames}")
            frame, frame_ended = chunk.frame, chunk.ends_frame
            size = upload.size + len(chunk.data)
            if size > self._limits.max_bytes:
                raise self._too_large(size)
            if header.media.HasField("byte_length") and size > header.media.byte_length:
                raise _length(header.media.byte_length, size)
            if keep:
                self._make_room(size=len(chunk.data) + PIECE_BYTES)
            digest.update(frame, chunk.data)
            if chunk.last:  # what was promised is checked before anybody takes it for whole
                upload.bytes_digest, upload.medium_digest = digest.of_bytes(), digest.digest()
                _check_end(header, size, upload.bytes_digest)
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


def _late(message: str) -> DeadlineExceeded:
    return DeadlineExceeded(message, stage="upload")


def _in_use(handle: str) -> InvalidRequest:
    return InvalidRequest(
        "UPLOAD_IN_USE", "other bytes are kept under this handle", code="ALREADY_EXISTS", facts={"handle": handle}
    )


def _protocol(cause: str, message: str) -> InvalidRequest:
    return InvalidRequest("UPLOAD_PROTOCOL", message, facts={"cause": cause})
