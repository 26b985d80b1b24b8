"""One `Encode` call driven as a router drives it, and everything it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from google.rpc.status_pb2 import Status

from chiasm.cache.sealed import EntryKey
from chiasm.errors import ChiasmError
from chiasm.local import LocalService
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Limits
from chiasm.rpc.status import from_status
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service.servicer import EncoderServicer
from router.media import Inline

ROOT = bytes([7]) * 32


@dataclass
class Told:
    """What one call was told and asked.

    Attributes:
        wanted: of each `probed`, whether it asked for bytes.
        chunks: pieces that were sent.
    """

    wanted: list[bool] = field(default_factory=list)
    probe: pb.Probe | None = None
    sized: list[epb.EncodeSized] = field(default_factory=list)
    ready: list[epb.EncodeReady] = field(default_factory=list)
    end: epb.EncodeEnd | None = None
    error: ChiasmError | None = None
    chunks: int = 0

    @property
    def usage(self) -> pb.MediaUsage:
        assert self.end is not None, self.error
        usage = pb.MediaUsage()
        usage.CopyFrom(self.end.usage)
        usage.ClearField("units_cached")
        return usage

    @property
    def keys(self) -> dict[int, EntryKey]:
        """Of the units that were told."""
        return {ready.unit: ready.entry.key for ready in self.ready}

    @property
    def encoded(self) -> list[int]:
        """Units that were not in the store."""
        return [ready.unit for ready in self.ready if not ready.cached]


@dataclass
class Fresh:
    """An encoder that has just begun, over the store of a running system: it remembers nothing in itself, and no media
    process of it runs.
    """

    service: LocalService
    sandbox: Sandbox
    servicer: EncoderServicer

    async def encode(
        self,
        medium: pb.Media,
        *,
        root: bytes = ROOT,
        digest: bytes | None = None,
        known: bool = True,
        others: Sequence[epb.Sibling] = (),
        go: epb.EncodeGo | None = None,
        credit: int = 1 << 30,
        before_go: Any = None,
    ) -> Told:
        """The whole call. Bytes are sent when they are asked for; what is told is attached at once.

        Args:
            digest: what the router says the medium is, if not the truth.
            known: whether it says so at all.
            others: the siblings, this medium apart.
            before_go: awaited when the units are sized, with what was told so far.
        """
        source = Inline(medium)
        requests: asyncio.Queue[epb.EncodeRequest | None] = asyncio.Queue()
        told = Told()

        def send(**message: Any) -> None:
            requests.put_nowait(epb.EncodeRequest(**message))

        async def send_bytes() -> None:
            async for chunk in source.chunks():
                told.chunks += 1
                send(chunk=chunk)

        opened = epb.EncodeOpen(
            item="messages[0].content[0]",
            model="digits",
            fingerprint=self.service.encoder.identity_digest,
            tenant_root=root,
            media=source.header,
            sampling=medium.sampling,
            initial_credit=credit,
        )
        opened.media.byte_length = source.size
        if known:
            opened.file_digest = digest or await source.digest()
        send(open=opened)
        if not known:
            await send_bytes()
        responses: Any = self.servicer.Encode(_sent(requests), None)
        async with asyncio.timeout(60), aclosing(responses):
            async for response in responses:
                which = response.WhichOneof("message")
                if which == "probed":
                    told.wanted.append(response.probed.bytes_wanted)
                    if response.probed.bytes_wanted and not told.chunks:
                        await send_bytes()
                    if response.probed.HasField("probe") and told.probe is None:
                        told.probe = response.probed.probe
                        mine = epb.Sibling(slot=0, probe=told.probe, sampling=medium.sampling)
                        send(siblings=epb.EncodeSiblings(siblings=[mine, *others]))
                elif which == "sized":
                    told.sized.append(response.sized)
                    if len(told.sized) == 1:
                        if before_go is not None:
                            await before_go(told)
                        send(go=go or epb.EncodeGo())
                elif which == "ready":
                    told.ready.append(response.ready)
                    entry = response.ready.entry
                    await self.service.store.release(entry.key, entry.lease.lease_id)
                    send(credit=epb.EncodeCredit(bytes=entry.byte_length))
                elif which == "end":
                    told.end = response.end
                    requests.put_nowait(None)
                elif which == "failed":
                    told.error = from_status(Status.FromString(response.failed.status))
        return told


async def _sent(requests: asyncio.Queue[epb.EncodeRequest | None]) -> AsyncIterator[epb.EncodeRequest]:
    while (request := await requests.get()) is not None:
        yield request


@asynccontextmanager
async def fresh(service: LocalService) -> AsyncIterator[Fresh]:
    """Ended with the block."""
    async with Sandbox() as sandbox:
        servicer = EncoderServicer(service.encoder, sandbox, name="digits", family="moss_vl", limits=Limits())
        yield Fresh(service, sandbox, servicer)
