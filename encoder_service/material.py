"""The bytes of one medium and what the sandbox makes of them: what it is, and its frames.

It waits for the bytes itself, so that whoever needs none of them never does. A file is opened when all of it has come;
of a list each frame is, and nothing of it is kept behind it. It knows no model and no entry.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from typing import ParamSpec, TypeAlias, TypeVar

from chiasm.errors import InvalidRequest
from chiasm.media.listed import Listed
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, Kind, MediaSource, Probed, RawFrame
from chiasm.rpc.medium import LARGE, RollingDigest, medium_digest
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service import convert
from encoder_service.inbox import Inbox
from encoder_service.quarantine import POISON, Quarantine

P = ParamSpec("P")
R = TypeVar("R")

Aside: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
"""Entered while bytes are waited for, which may take as long as their sender likes."""


class Material(ABC):
    """One medium of one call.

    Whatever ends the processes that open it is remembered as poison of its tenant, and is not opened again for a while.

    Attributes:
        fetching: seconds for which bytes were waited for.
        decoding: seconds that frames took once their bytes were there.
    """

    def __init__(self, opened: epb.EncodeOpen, inbox: Inbox, sandbox: Sandbox, quarantine: Quarantine) -> None:
        self.fetching = 0.0
        self.decoding = 0.0
        self._tenant = opened.tenant_root
        self._told = opened.file_digest
        self._item = opened.item
        self._inbox = inbox
        self._sandbox = sandbox
        self._quarantine = quarantine

    @staticmethod
    def of(opened: epb.EncodeOpen, inbox: Inbox, sandbox: Sandbox, quarantine: Quarantine) -> Material:
        """The medium that a call describes. Raises InvalidRequest for what it cannot be."""
        kind = convert.kind_of(opened.media.kind)
        if opened.media.HasField("frames"):
            return _List(kind, opened, inbox, sandbox, quarantine)
        return _File(kind, opened, inbox, sandbox, quarantine)

    def check(self) -> None:
        """Raises InvalidRequest POISON_INPUT for a medium that is remembered as such, where its digest is told."""
        if self._told:
            self._quarantine.check(self._tenant, self._told)

    @abstractmethod
    async def digest(self) -> bytes:
        """Of all that it is (`chiasm.rpc.medium`), from its bytes. Of a list it is known once all of it is decoded, of
        a file once it has come, which is waited for."""

    @abstractmethod
    async def probe(self) -> Probed:
        """What the medium is, once enough of it has come to tell. Raises as `Sandbox.probe`, and POISON_INPUT."""

    @property
    @abstractmethod
    def probed(self) -> Probed:
        """As `probe`, with what became known since."""

    @abstractmethod
    def decode(self, indices: Sequence[int], aside: Aside = nullcontext) -> AsyncGenerator[Frame | Decoded, None]:
        """Its frames at `indices`, then one `Decoded`. As `Sandbox.decode`, and as `probe` on poison. Once."""

    async def _next(self, aside: Aside = nullcontext) -> bytes:
        """The next frame of a list, or the file."""
        if self._inbox.frame_there:
            return await self._inbox.frame()
        began = time.monotonic()
        try:
            async with aside():
                return await self._inbox.frame()
        finally:
            self.fetching += time.monotonic() - began

    @contextmanager
    def _opening(self, digest: bytes) -> Iterator[None]:
        """Around whatever opens a file, or a picture of a list, which is judged as the image that it is."""
        self._quarantine.check(self._tenant, digest)
        try:
            yield
        except InvalidRequest as error:
            if error.reason == POISON:
                self._quarantine.remember(self._tenant, digest)
                if self._told:
                    self._quarantine.remember(self._tenant, self._told)
            raise


class _File(Material):
    def __init__(
        self, kind: Kind, opened: epb.EncodeOpen, inbox: Inbox, sandbox: Sandbox, quarantine: Quarantine
    ) -> None:
        super().__init__(opened, inbox, sandbox, quarantine)
        self._kind = kind
        self._header = opened.media
        self._source: MediaSource | None = None
        self._digest = b""
        self._probed: Probed | None = None

    async def digest(self) -> bytes:
        await self._come()
        return self._digest

    async def probe(self) -> Probed:
        source = await self._come()
        with self._opening(self._digest):
            self._probed = await self._sandbox.probe(source, item=self._item)
        return self._probed

    @property
    def probed(self) -> Probed:
        assert self._probed is not None, "it is probed first"
        return self._probed

    async def decode(self, indices: Sequence[int], aside: Aside = nullcontext) -> AsyncGenerator[Frame | Decoded, None]:
        source = await self._come(aside)
        with self._opening(self._digest):
            async with aclosing(self._sandbox.decode(source, indices, item=self._item)) as frames:
                began = time.monotonic()
                async for frame in frames:
                    self.decoding += time.monotonic() - began
                    yield frame
                    began = time.monotonic()

    async def _come(self, aside: Aside = nullcontext) -> MediaSource:
        if self._source is None:
            data = await self._next(aside)
            self._digest = await _digest_of(self._header, data)
            self._source = MediaSource(self._kind, data, self._header.mime_type or None)
        return self._source


class _List(Material):
    def __init__(
        self, kind: Kind, opened: epb.EncodeOpen, inbox: Inbox, sandbox: Sandbox, quarantine: Quarantine
    ) -> None:
        super().__init__(opened, inbox, sandbox, quarantine)
        self._headers = opened.media.frames.frames
        offsets = convert.offsets_of(opened.media.frames)
        self._listed = Listed(sandbox, kind, len(self._headers), offsets, item=self._item)
        self._first: bytes | RawFrame | None = None
        self._rolling = RollingDigest(opened.media)
        self._taken = 0

    async def digest(self) -> bytes:
        assert self._taken == len(self._headers), "the digest of a list is known when all of it is decoded"
        return self._rolling.digest()

    async def probe(self) -> Probed:
        first = self._first = await self._take()
        async with self._opening_frame(first):
            return await self._listed.probe(first)

    @property
    def probed(self) -> Probed:
        return self._listed.probed

    async def decode(self, indices: Sequence[int], aside: Aside = nullcontext) -> AsyncGenerator[Frame | Decoded, None]:
        wanted = frozenset(indices)
        if self._first is None:
            await self.probe()
        for number in range(len(self._headers)):
            frame = self._first if number == 0 else await self._take(aside)
            assert frame is not None, "the first frame was probed, and a list is decoded once"
            self._first = None
            began = time.monotonic()
            async with self._opening_frame(frame):
                opened = await self._listed.open(frame)
            del frame
            self.decoding += time.monotonic() - began
            if number in wanted:
                yield opened
        yield self._listed.decoded

    async def _take(self, aside: Aside = nullcontext) -> bytes | RawFrame:
        data = await self._next(aside)
        await _beside(len(data), self._rolling.update, self._taken, data)
        self._taken += 1
        return convert.frame_of(self._headers[self._taken - 1], data)

    @asynccontextmanager
    async def _opening_frame(self, frame: bytes | RawFrame) -> AsyncIterator[None]:
        if isinstance(frame, RawFrame):
            yield  # raw pixels kill no decoder
        else:
            with self._opening(await _digest_of(_PICTURE, frame)):
                yield


_PICTURE = pb.MediaHeader(kind=pb.MEDIA_KIND_IMAGE)


async def _digest_of(header: pb.MediaHeader, data: bytes) -> bytes:
    return await _beside(len(data), medium_digest, header, [data])


async def _beside(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Work on so many bytes, in a thread if they are worth one."""
    return await asyncio.to_thread(work, *args, **kwargs) if size > LARGE else work(*args, **kwargs)
