"""The bytes of one medium and what the sandbox makes of them: what it is, and its frames.

It waits for the bytes itself, so that whoever needs none of them never does. It knows no model and no entry.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from chiasm.errors import InvalidRequest
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, MediaSource, Probed
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service import convert
from encoder_service.inbox import Inbox
from encoder_service.quarantine import POISON, Quarantine


class Material:
    """One medium of one call.

    Whatever ends the processes that open it is remembered as poison of its tenant, and is not opened again for a while.
    """

    def __init__(self, opened: epb.EncodeOpen, inbox: Inbox, sandbox: Sandbox, quarantine: Quarantine) -> None:
        self._open = opened
        self._inbox = inbox
        self._sandbox = sandbox
        self._quarantine = quarantine
        self._source: MediaSource | None = None

    async def probe(self) -> Probed:
        """What the medium is, once enough of it has come to tell. Raises as `Sandbox.probe`, and POISON_INPUT."""
        source = await self._whole()
        try:
            return await self._sandbox.probe(source, item=self._open.item)
        except InvalidRequest as error:
            self._judge(source, error)
            raise

    async def decode(self, indices: Sequence[int]) -> AsyncGenerator[Frame | Decoded, None]:
        """Its frames at `indices`, then one `Decoded`. As `Sandbox.decode`, and as `probe` on poison."""
        source = await self._whole()
        try:
            async with aclosing(self._sandbox.decode(source, indices, item=self._open.item)) as frames:
                async for frame in frames:
                    yield frame
        except InvalidRequest as error:
            self._judge(source, error)
            raise

    async def _whole(self) -> MediaSource:
        if self._source is None:
            source = convert.media_source(self._open.media, await self._inbox.media())
            self._quarantine.check(self._open.tenant_root, source)
            self._source = source
        return self._source

    def _judge(self, source: MediaSource, error: InvalidRequest) -> None:
        if error.reason == POISON:
            self._quarantine.remember(self._open.tenant_root, source)
