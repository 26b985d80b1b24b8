"""The bytes of one medium and what the sandbox makes of them: what it is, and its frames.

It waits for the bytes itself, so that whoever needs none of them never does. A file is opened when all of it has come;
of a list each frame is, and nothing of it is kept behind it. It knows no model and no entry.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from typing import Final, TypeAlias

from chiasm.errors import InvalidRequest
from chiasm.media.listed import Listed
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, Kind, MediaSource, Probed, RawFrame
from chiasm.rpc.medium import LARGE, digest_of_parts, medium_digest, part_digest
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service import convert
from encoder_service.inbox import Inbox
from encoder_service.quarantine import POISON, Quarantine

_PICTURE: Final = pb.MediaHeader(kind=pb.MEDIA_KIND_IMAGE)

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
        self._header = opened.media
        self._told = opened.file_digest if opened.HasField("file_digest") else None
        self._tenant = opened.tenant_root
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
        if self._told is not None:
            self._quarantine.check(self._tenant, self._told)

    @property
    @abstractmethod
    def digest(self) -> bytes | None:
        """Of all that it is (`chiasm.rpc.medium`): of a file once it has come, of a list once it was decoded to its
        end. None before."""

    @property
    def mistold(self) -> bool:
        """Whether it is known not to be what its caller said."""
        return None not in (self._told, self.digest) and self.digest != self._told

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
        """Around whatever opens a file, or a picture of a list, of that digest."""
        self._quarantine.check(self._tenant, digest)
        try:
            yield
        except InvalidRequest as error:
            if error.reason == POISON:
                for poison in {digest, self._told or digest}:
                    self._quarantine.remember(self._tenant, poison)
            raise


class _File(Material):
    def __init__(
        self, kind: Kind, opened: epb.EncodeOpen, inbox: Inbox, sandbox: Sandbox, quarantine: Quarantine
    ) -> None:
        super().__init__(opened, inbox, sandbox, quarantine)
        self._kind = kind
        self._source: MediaSource | None = None
        self._digest: bytes | None = None
        self._probed: Probed | None = None

    @property
    def digest(self) -> bytes | None:
        return self._digest

    async def probe(self) -> Probed:
        source, digest = await self._come()
        with self._opening(digest):
            self._probed = await self._sandbox.probe(source, item=self._item)
        return self._probed

    @property
    def probed(self) -> Probed:
        assert self._probed is not None, "it is probed first"
        return self._probed

    async def decode(self, indices: Sequence[int], aside: Aside = nullcontext) -> AsyncGenerator[Frame | Decoded, None]:
        source, digest = await self._come(aside)
        with self._opening(digest):
            async with aclosing(self._sandbox.decode(source, indices, item=self._item)) as frames:
                began = time.monotonic()
                async for frame in frames:
                    self.decoding += time.monotonic() - began
                    yield frame
                    began = time.monotonic()

    async def _come(self, aside: Aside = nullcontext) -> tuple[MediaSource, bytes]:
        """The file and its digest."""
        if self._source is None or self._digest is None:
            data = await self._next(aside)
            if len(data) > LARGE:
                self._digest = await asyncio.to_thread(medium_digest, self._header, [data])
            else:
                self._digest = medium_digest(self._header, [data])
            self._source = MediaSource(self._kind, data, self._header.mime_type or None)
        return self._source, self._digest


class _List(Material):
    def __init__(
        self, kind: Kind, opened: epb.EncodeOpen, inbox: Inbox, sandbox: Sandbox, quarantine: Quarantine
    ) -> None:
        super().__init__(opened, inbox, sandbox, quarantine)
        self._headers = opened.media.frames.frames
        offsets = convert.offsets_of(opened.media.frames)
        self._listed = Listed(sandbox, kind, len(self._headers), offsets, item=self._item)
        self._first: bytes | RawFrame | None = None
        self._parts: list[bytes] = []  # digests of the frames that came

    @property
    def digest(self) -> bytes | None:
        return digest_of_parts(self._header, self._parts) if len(self._parts) == len(self._headers) else None

    async def probe(self, aside: Aside = nullcontext) -> Probed:
        first = self._first = await self._come(aside)
        with self._opening_frame(first):
            return await self._listed.probe(first)

    @property
    def probed(self) -> Probed:
        return self._listed.probed

    async def decode(self, indices: Sequence[int], aside: Aside = nullcontext) -> AsyncGenerator[Frame | Decoded, None]:
        wanted = frozenset(indices)
        if self._first is None:
            await self.probe(aside)
        for number in range(len(self._headers)):
            frame = self._first if number == 0 else await self._come(aside)
            assert frame is not None, "the first frame was probed, and a list is decoded once"
            self._first = None
            began = time.monotonic()
            with self._opening_frame(frame):
                opened = await self._listed.open(frame)
            del frame
            self.decoding += time.monotonic() - began
            if number in wanted:
                yield opened
        yield self._listed.decoded

    async def _come(self, aside: Aside = nullcontext) -> bytes | RawFrame:
        """The next frame."""
        data = await self._next(aside)
        header = self._headers[len(self._parts)]
        self._parts.append(part_digest(data))
        return convert.frame_of(header, data)

    @contextmanager
    def _opening_frame(self, frame: bytes | RawFrame) -> Iterator[None]:
        with nullcontext() if isinstance(frame, RawFrame) else self._opening(medium_digest(_PICTURE, [frame])):
            yield  # raw pixels kill no decoder
