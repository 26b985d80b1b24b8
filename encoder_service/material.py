"""The bytes of one medium and what the sandbox makes of them: what it is, and its frames.

It waits for the bytes itself, so that whoever needs none of them never does. It knows no model and no entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from chiasm.errors import InvalidRequest
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, MediaSource, Probed
from chiasm.rpc.medium import LARGE, medium_digest
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service import convert
from encoder_service.inbox import Inbox
from encoder_service.quarantine import POISON, Quarantine


class _Whole(NamedTuple):
    source: MediaSource
    digest: bytes


class Material:
    """One medium of one call.

    Whatever ends the processes that open it is remembered as poison of its tenant, and is not opened again for a while.
    """

    def __init__(self, opened: epb.EncodeOpen, inbox: Inbox, sandbox: Sandbox, quarantine: Quarantine) -> None:
        self._open = opened
        self._inbox = inbox
        self._sandbox = sandbox
        self._quarantine = quarantine
        self._whole: _Whole | None = None

    def check(self) -> None:
        """Raises InvalidRequest POISON_INPUT for a medium that is remembered as such, where its digest is told."""
        if self._open.HasField("file_digest"):
            self._quarantine.check(self._open.tenant_root, self._open.file_digest)

    async def digest(self) -> bytes:
        """Of all that it is (`chiasm.rpc.medium`), from its bytes, once all of them have come. Raises POISON_INPUT."""
        return (await self._come()).digest

    async def probe(self) -> Probed:
        """What the medium is, once enough of it has come to tell. Raises as `Sandbox.probe`, and POISON_INPUT."""
        whole = await self._come()
        try:
            return await self._sandbox.probe(whole.source, item=self._open.item)
        except InvalidRequest as error:
            self._judge(whole, error)
            raise

    async def decode(self, indices: Sequence[int]) -> AsyncGenerator[Frame | Decoded, None]:
        """Its frames at `indices`, then one `Decoded`. As `Sandbox.decode`, and as `probe` on poison."""
        whole = await self._come()
        try:
            async with aclosing(self._sandbox.decode(whole.source, indices, item=self._open.item)) as frames:
                async for frame in frames:
                    yield frame
        except InvalidRequest as error:
            self._judge(whole, error)
            raise

    async def _come(self) -> _Whole:
        if self._whole is None:
            header, pieces = self._open.media, await self._inbox.media()
            source = convert.media_source(header, pieces)
            if sum(map(len, pieces)) > LARGE:
                digest = await asyncio.to_thread(medium_digest, header, pieces)
            else:
                digest = medium_digest(header, pieces)
            self._quarantine.check(self._open.tenant_root, digest)
            self._whole = _Whole(source, digest)
        return self._whole

    def _judge(self, whole: _Whole, error: InvalidRequest) -> None:
        if error.reason == POISON:
            self._quarantine.remember(self._open.tenant_root, whole.digest)
