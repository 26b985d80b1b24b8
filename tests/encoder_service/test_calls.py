"""`Encode` with callers that break off, say things twice or out of order: a typed end, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from google.rpc.status_pb2 import Status

from chiasm.cache.tenant import owner
from chiasm.errors import ChiasmError, InvalidRequest, Unsupported
from chiasm.local import LocalService, LocalSettings
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, Limits, MediaSource
from chiasm.rpc.status import from_status
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service.bounds import MAX_UNITS
from encoder_service.servicer import EncoderServicer
from tests import digits
from tests.asking import ask, question, running, video
from tests.e2e.test_requests import settled
from tests.waiting import until


class Call:
    """One `Encode` call, driven message by message."""

    def __init__(
        self,
        service: LocalService,
        *,
        credit: int = 1 << 20,
        kind: int = pb.MEDIA_KIND_VIDEO,
        frames: pb.FrameList | None = None,
        sandbox: Sandbox | None = None,
        servicer: EncoderServicer | None = None,
    ) -> None:
        self.service = service
        self.servicer = servicer or EncoderServicer(
            service.encoder, sandbox or service.sandbox, name="digits", family="moss_vl", limits=Limits()
        )
        self.requests: asyncio.Queue[epb.EncodeRequest | None] = asyncio.Queue()
        self.responses: Any = self.servicer.Encode(self._sent(), None)
        opened = epb.EncodeOpen(
            slot=0,
            item="messages[0].content[0]",
            model="digits",
            fingerprint=service.encoder.identity_digest,
            tenant_root=bytes(32),
            media=pb.MediaHeader(kind=kind, frames=frames),  # type: ignore[arg-type]
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


async def test_videos_that_wait_for_credit_keep_no_picture_from_being_opened_and_told() -> None:
    """One process opens media at a time."""
    async with running() as service, Sandbox() as sandbox:
        videos = [Call(service, credit=1, sandbox=sandbox) for _ in range(2)]
        for call, clip in zip(videos, digits.shipped_clips(), strict=False):
            await call.sized(clip.path.read_bytes())
            call.send(go=epb.EncodeGo())
            assert (await call.next()).HasField("ready")
        picture = Call(service, kind=pb.MEDIA_KIND_IMAGE, sandbox=sandbox)
        await picture.sized(digits.shipped_images()[0][0].read_bytes())
        picture.send(go=epb.EncodeGo())
        assert (await picture.next()).HasField("ready")
        for call in (*videos, picture):
            await call.responses.aclose()
        await until(lambda: not service.encoder.in_flight)


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


class Stalling(Sandbox):
    """Decodes two frames, and the others once it may.

    Attributes:
        given: frames so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given = 0
        self.may_go_on = asyncio.Event()

    async def decode(
        self, source: MediaSource, indices: Sequence[int], *, item: str | None = None
    ) -> AsyncGenerator[Frame | Decoded, None]:
        async with aclosing(super().decode(source, indices, item=item)) as frames:
            async for frame in frames:
                if self.given == 2:
                    await self.may_go_on.wait()
                self.given += 1
                yield frame


async def test_the_first_units_are_told_while_the_next_frames_are_not_decoded_yet() -> None:
    async with running() as service, Stalling() as sandbox:
        call = Call(service, sandbox=sandbox)
        await call.sized(digits.shipped_clips()[-1].path.read_bytes())
        call.send(go=epb.EncodeGo())
        told = [(await call.next()).ready.unit for _ in range(2)]
        assert told == [0, 1] and sandbox.given == 2
        sandbox.may_go_on.set()
        while not (response := await call.next()).HasField("end"):
            told += [response.ready.unit] if response.HasField("ready") else []
        assert told == list(range(response.end.usage.units)) and len(told) > 2
        await call.responses.aclose()
        assert service.store.stats().pinned_bytes == 0


async def test_leaving_while_a_frame_is_waited_for_ends_its_decoding() -> None:
    async with running() as service, Stalling() as sandbox:
        call = Call(service, sandbox=sandbox)
        await call.sized(digits.shipped_clips()[-1].path.read_bytes())
        call.send(go=epb.EncodeGo())
        assert (await call.next()).ready.unit == 0
        waiting = asyncio.create_task(call.rest())
        await until(lambda: service.encoder.in_flight == 0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await call.responses.aclose()
        assert service.store.stats().pinned_bytes == 0 and service.encoder.in_flight == 0
        await still_serves(service)


async def test_frames_that_no_pass_could_hold_are_refused_when_they_are_sized_with_both_numbers() -> None:
    async with running(settings=LocalSettings(max_unit_patches=8)) as service:
        call = Call(service)
        call.send(chunk=pb.MediaChunk(data=digits.shipped_clips()[0].path.read_bytes(), last=True))
        probed = (await call.next()).probed
        call.send(siblings=epb.EncodeSiblings(siblings=[epb.Sibling(slot=0, probe=probed.probe)]))
        error = failure((await call.rest())[0])
        assert isinstance(error, InvalidRequest) and error.reason == "MEDIA_TOO_LARGE"
        assert error.item == "messages[0].content[0]"
        assert error.facts["limit"] == 8 and int(error.facts["patches"]) > 8


async def test_the_bounds_of_a_pass_are_told() -> None:
    async with running(settings=LocalSettings(max_patches=4096)) as service:
        info = await Call(service).servicer.Info(epb.EncoderInfoRequest(), None)
        assert (info.limits.max_patches, info.limits.max_units) == (4096, MAX_UNITS)


async def test_a_calls_tenant_and_priority_decide_when_its_units_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as service:
        shares = []
        share = service.encoder.share

        def sharing(root: bytes, **given: Any) -> Any:
            shares.append(share(root, **given))
            return shares[-1]

        monkeypatch.setattr(service.encoder, "share", sharing)
        for name, priority in (("", None), ("somebody", 3)):
            call = Call(service)
            opened = call.requests.get_nowait()
            assert opened is not None
            opened.open.fairness_key = name
            if priority is not None:
                opened.open.priority = priority
            call.requests.put_nowait(opened)
            await call.sized(digits.shipped_clips()[0].path.read_bytes())
            call.send(go=epb.EncodeGo())
            while not (await call.next()).HasField("ready"):
                pass
            await call.responses.aclose()
        assert [(one.tenant, one.priority) for one in shares] == [(owner(bytes(32)), 0), (b"somebody", 3)]
        await settled(service)
