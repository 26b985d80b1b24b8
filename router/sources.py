"""Where the bytes of a request's media come from: the request itself, or uploads, which are held while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

from chiasm.errors import DeadlineExceeded, InvalidRequest, NotFound
from chiasm.rpc.v1 import common_pb2 as pb
from router.media import Inline, Source
from router.uploads import Uploads


class Sources:
    """The bytes of a request's media; uploads among them are held while the block runs."""

    def __init__(
        self, uploads: Uploads, tenant: bytes, media: Sequence[pb.Media], items: Sequence[str], deadline: float
    ) -> None:
        self._deadline = deadline
        self._uploads = uploads
        self._tenant = tenant
        self._media = media
        self._items = items
        self._held = ExitStack()

    async def __aenter__(self) -> list[Source]:
        async with AsyncExitStack() as entered:
            entered.callback(self._held.close)
            sources = [await self._source(medium, item) for medium, item in zip(self._media, self._items, strict=True)]
            entered.pop_all()
            return sources

    async def __aexit__(self, *_: object) -> None:
        self._held.close()

    async def _source(self, medium: pb.Media, item: str) -> Source:
        if medium.WhichOneof("source") != "handle":
            return Inline(medium)
        try:
            async with until(self._deadline, "fetch"):
                upload = await self._uploads.find(self._tenant, medium.handle)
        except NotFound as error:
            raise error.at(item) from None
        if upload.header.kind != medium.kind:
            declared, found = _kind(medium.kind), _kind(upload.header.kind)
            raise InvalidRequest(
                "MEDIA_TYPE_MISMATCH",
                f"the request takes the upload for {declared}, it was sent as {found}",
                item=item,
                facts={"declared": declared, "found": found},
            )
        self._held.enter_context(self._uploads.held(upload))
        return upload


@asynccontextmanager
async def until(deadline: float, stage: str) -> AsyncIterator[None]:
    """Bounds the block by a deadline of `time.monotonic`. Raises DeadlineExceeded with the stage."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"the deadline passed while the request was at {stage}", stage=stage) from None


def _kind(kind: pb.MediaKind.ValueType) -> str:
    return pb.MediaKind.Name(kind).removeprefix("MEDIA_KIND_").lower()
