"""`Encode` with callers that break off, say things twice or out of order: a typed end, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from google.rpc.status_pb2 import Status

from chiasm.errors import ChiasmError, InvalidRequest, Unsupported
from chiasm.local import LocalService
from chiasm.media.types import Limits
from chiasm.rpc.status import from_status
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service.servicer import EncoderServicer
from tests import digits
from tests.asking import ask, question, running, video


class Call:
    """One `Encode` call, driven message by message."""

    def __init__(self, service: LocalService, *, credit: int = 1 << 20, kind: int = pb.MEDIA_KIND_VIDEO) -> None:
        self.service = service
        self.servicer = EncoderServicer(
            service.encoder, service.sandbox, name="digits", family="moss_vl", limits=Limits()
        )
        self.requests: asyncio.Queue[epb.EncodeRequest | None] = asyncio.Queue()
        self.responses: Any = self.servicer.Encode(self._sent(), None)
        opened = epb.EncodeOpen(
            slot=0,
            item="messages[0].content[0]",
            model="digits",
            fingerprint=service.encoder.identity_digest,
            tenant_root=bytes(32),
            media=pb.MediaHeader(kind=kind),  # type: ignore[arg-type]
            initial_credit=credit,
        )
        self.send(open=opened)

    def send(self, **message: object) -> None:
        self.requests.put_nowait(epb.EncodeRequest(**message))  # type: ignore[arg-type]

    def end(self) -> None:
        self.requests.put_nowait(None)

    async def _sent(self) -> AsyncIterator[epb.EncodeRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    async def next(self) -> epb.EncodeResponse:
        response: epb.EncodeResponse = await asyncio.wait_for(anext(self.responses), 20)
        return response

    async def rest(self) -> Sequence[epb.EncodeResponse]:
        async def gather() -> list[epb.EncodeResponse]:
            return [response async for response in self.responses]

        return await asyncio.wait_for(gather(), 20)

    async def sized(self, data: bytes) -> None:
        """Brings the call to where it waits for go."""
        self.send(chunk=pb.MediaChunk(data=data, last=True))
        probed = (await self.next()).probed
        self.send(siblings=epb.EncodeSiblings(siblings=[epb.Sibling(slot=0, probe=probed.probe)]))
        assert (await self.next()).HasField("sized")


def failure(response: epb.EncodeResponse) -> ChiasmError:
    assert response.HasField("failed"), response
    return from_status(Status.FromString(response.failed.status))


async def still_serves(service: LocalService) -> None:
    clip = digits.shipped_clips()[0]
    answer = await asyncio.wait_for(ask(service, question("Read the digits.", video(clip.path.read_bytes()))), 30)
    assert answer.finished is not None


async def test_a_caller_that_ends_while_credit_is_waited_for_ends_the_call() -> None:
    async with running() as service:
        call = Call(service, credit=1)
        await call.sized(digits.shipped_clips()[-1].path.read_bytes())
        call.send(go=epb.EncodeGo())
        call.end()
        error = failure((await call.rest())[-1])
        assert isinstance(error, InvalidRequest) and error.reason == "UPLOAD_PROTOCOL"
        assert service.store.stats().pinned_bytes == 0
        await still_serves(service)


@pytest.mark.parametrize("twice", ["go", "siblings"])
async def test_a_message_too_many_ends_the_call(twice: str) -> None:
    async with running() as service:
        call = Call(service)
        await call.sized(digits.shipped_clips()[0].path.read_bytes())
        call.send(go=epb.EncodeGo())
        call.send(**{twice: epb.EncodeGo() if twice == "go" else epb.EncodeSiblings()})
        error = failure((await call.rest())[-1])
        assert isinstance(error, InvalidRequest) and error.reason == "UPLOAD_PROTOCOL"
        assert service.store.stats().pinned_bytes == 0
        await still_serves(service)


async def test_a_caller_that_ends_well_keeps_its_pins_and_one_that_leaves_does_not() -> None:
    clip = digits.shipped_clips()[0].path.read_bytes()
    for well in (True, False):
        async with running() as service:
            call = Call(service)
            await call.sized(clip)
            call.send(go=epb.EncodeGo())
            seen: list[epb.EncodeResponse] = []
            while not seen or not seen[-1].HasField("end"):
                seen.append(await call.next())
            if well:
                call.end()
                assert not await call.rest()
                assert service.store.stats().pinned_bytes > 0
                for response in seen:
                    if response.HasField("ready"):
                        entry = response.ready.entry
                        await service.store.release(entry.key, entry.lease.lease_id)
            else:
                await call.responses.aclose()
            assert service.store.stats().pinned_bytes == 0


async def test_an_absurd_range_of_units_costs_nothing() -> None:
    async with running() as service:
        call = Call(service)
        await call.sized(digits.shipped_clips()[0].path.read_bytes())
        call.send(go=epb.EncodeGo(units=[pb.UnitRange(first=1, count=2**32 - 1)]))
        ready = []
        while not (response := await call.next()).HasField("end"):
            ready += [response.ready.unit] if response.HasField("ready") else []
        assert ready == [1, 2]
        await call.responses.aclose()


async def test_what_is_for_another_model_or_not_built_is_refused() -> None:
    async with running() as service:
        for change in (
            {"fingerprint": bytes(32)},
            {"uri": "http://example.invalid"},
            {"form": pb.ENTRY_FORM_EMBEDDINGS},
        ):
            call = Call(service)
            opened = call.requests.get_nowait()
            assert opened is not None
            for name, value in change.items():
                setattr(opened.open, name, value)
            call.requests.put_nowait(opened)
            with pytest.raises(Unsupported):
                await call.next()


async def test_chunks_too_large_or_too_many_are_refused() -> None:
    async with running() as service:
        call = Call(service)
        call.send(chunk=pb.MediaChunk(data=bytes(1 + (1 << 20))))
        assert "UPLOAD_PROTOCOL" in str(failure((await call.rest())[-1]))
        call = Call(service, kind=pb.MEDIA_KIND_UNSPECIFIED)
        call.send(chunk=pb.MediaChunk(data=b"x", last=True))
        assert "FIELD_OUT_OF_RANGE" in str(failure((await call.rest())[-1]))
