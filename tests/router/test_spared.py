"""Bytes of media go to an encoder that asks for them, and to no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from chiasm.client import AsyncClient, Image, Video
from chiasm.errors import Unavailable
from chiasm.local import LocalService
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.estimate import Estimating
from router.media import Inline
from tests import digits
from tests.asking import Answer, ask, image, question, running, video
from tests.e2e.test_requests import settled
from tests.router.scripted import MeddledFleet, answer
from tests.router.test_held import noting

CLIP = digits.shipped_clips()[-1]
UNITS = len(CLIP.digits)
ID = bytes(range(16))


def about(text: str = "Read the digits.") -> rpb.GenerateRequest:
    return question(text, video(CLIP.path.read_bytes()))


def looking_at(text: str) -> rpb.GenerateRequest:
    """The video first, so that it lies at the same place whatever is asked."""
    return question(video(CLIP.path.read_bytes()), text)


async def told(service: LocalService, request: rpb.GenerateRequest) -> tuple[Answer, int]:
    """An answer, and how many pieces of media its encoders were sent."""
    fleet = MeddledFleet(service)
    got = await answer(fleet, request)
    assert fleet.encoders is not None
    return got, fleet.encoders.chunks


async def test_a_second_question_sends_no_byte_and_is_answered_the_same() -> None:
    async with running() as service:
        first, sent = await told(service, about())
        again, none = await told(service, about())
        assert (sent, none) == (1, 0)
        assert again.ids == first.ids and again.text == CLIP.answer
        assert again.started == first.started and again.visible == first.visible
        usage = again.media[0]
        assert usage.units_cached == UNITS
        usage.units_cached = 0
        assert usage == first.media[0]


async def test_a_second_question_about_what_the_decoder_holds_touches_nothing_but_the_memory_of_it() -> None:
    async with running() as service:
        await told(service, looking_at("Read the digits."))
        encoder, before = service.encoder.counts, service.store.stats()
        passes, cached = len(encoder.batches), encoder.cached_units
        _, sent = await told(service, looking_at("Which digit is at 1.0 seconds?"))
        after = service.store.stats()
        assert sent == 0 and (len(encoder.batches), encoder.cached_units) == (passes, cached)
        assert after.hits - before.hits == 2, "two records of the medium, and no entry"
        assert after.puts == before.puts


async def test_what_the_decoder_does_not_hold_is_read_from_the_store_and_encoded_by_nobody() -> None:
    async with running() as service:
        first, _ = await told(service, about())
        service.decoder.flush()
        passes = len(service.encoder.counts.batches)
        again, sent = await told(service, about())
        assert sent == 0 and again.ids == first.ids and len(service.encoder.counts.batches) == passes
        assert again.encoded == 0
        await settled(service)


async def test_entries_that_are_gone_are_encoded_and_their_bytes_are_asked_for() -> None:
    async with running() as service:
        keys: dict[int, bytes] = {}
        first = await answer(MeddledFleet(service, encoder=noting(keys)), about())
        service.decoder.flush()
        for unit in range(1, UNITS, 2):
            await service.store.discard(keys[unit])
        gone = UNITS // 2
        encoded = service.encoder.counts.encoded_units
        again, sent = await told(service, about())
        assert sent == 1 and again.ids == first.ids
        assert service.encoder.counts.encoded_units == encoded + gone == encoded + again.encoded
        await settled(service)


async def test_several_media_of_a_request_are_known_together_and_alone_are_others() -> None:
    picture = digits.shipped_images()[0][0].read_bytes()
    request = question("Read the digits.", video(CLIP.path.read_bytes()), image(picture))
    async with running() as service:
        first, sent = await told(service, request)
        again, none = await told(service, request)
        assert (sent, none) == (2, 0) and again.ids == first.ids


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("before", ["probed", "sized", "ready", "end"])
async def test_a_lost_encoder_is_replaced_whether_or_not_the_medium_is_known(before: str, known: bool) -> None:
    def dies(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
        if number == 1 and response.WhichOneof("message") == before:
            raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")
        return True

    async with running() as service:
        request = about()
        if known:
            await told(service, request)
            service.decoder.flush()
        fleet = MeddledFleet(service, encoder=dies)
        got = await answer(fleet, request)
        assert got.text == CLIP.answer
        assert fleet.encoders is not None and fleet.encoders.calls == 2
        if known:
            assert fleet.encoders.chunks == 0
        for key in service.store.held():  # nobody is left who would take back the pins of the call that broke
            await service.store.discard(key)


async def test_a_decoder_that_finds_an_entry_wanting_has_it_made_afresh_from_bytes() -> None:
    async with running() as service:
        keys: dict[int, bytes] = {}
        first = await answer(MeddledFleet(service, encoder=noting(keys)), about())
        service.decoder.flush()
        sealed = await service.store.get(keys[2])
        assert sealed is not None
        spoilt = bytearray(sealed.payload)
        spoilt[7] ^= 1
        await service.store.put(type(sealed)(sealed.header, memoryview(spoilt), sealed.tag), keys[2])
        encoded = service.encoder.counts.encoded_units
        fleet = MeddledFleet(service)
        again = await answer(fleet, about())
        assert again.ids == first.ids
        assert fleet.encoders is not None and fleet.encoders.chunks == 1
        assert [go.afresh for go in fleet.encoders.goes] == [False, True]
        assert service.encoder.counts.encoded_units == encoded + 1
        assert again.media[0].units_cached == UNITS - 1
        await settled(service)


async def test_an_upload_is_known_once_it_is_whole() -> None:
    """The first question overtakes its upload, which is sent to the encoder as it comes."""
    data = CLIP.path.read_bytes()
    half = len(data) // 2
    go_on = asyncio.Event()

    async def uploading() -> AsyncIterator[rpb.UploadRequest]:
        media = pb.MediaHeader(kind=pb.MEDIA_KIND_VIDEO)
        yield rpb.UploadRequest(header=rpb.UploadHeader(upload_id=ID, media=media))
        yield rpb.UploadRequest(chunk=pb.MediaChunk(data=data[:half]))
        await go_on.wait()
        yield rpb.UploadRequest(chunk=pb.MediaChunk(data=data[half:], last=True))

    request = question("Read the digits.", pb.Media(kind=pb.MEDIA_KIND_VIDEO, handle=ID.hex()))
    async with running() as service:
        memo = service.memo
        upload = asyncio.create_task(service.upload(uploading()))
        asking = asyncio.create_task(ask(service, request))
        await asyncio.sleep(0)
        go_on.set()
        await upload
        first = await asking
        assert first.text == CLIP.answer and memo.spared == 0
        again = await ask(service, request)
        assert again.ids == first.ids and memo.spared == len(data)
        inline = await ask(service, about())
        assert inline.ids == first.ids and memo.spared == 2 * len(data), "the same bytes, whichever way they came"


async def test_an_estimate_of_what_is_known_sends_nothing() -> None:
    estimate = rpb.EstimateRequest(model="digits", prompt=about().prompt, media=about().media)
    async with running() as service:

        async def estimated() -> tuple[rpb.EstimateResponse, int]:
            fleet = MeddledFleet(service)
            sources = [Inline(medium) for medium in estimate.media]
            told = await Estimating(estimate, sources, fleet, fleet.served, tenant_root=bytes(32)).run()
            assert fleet.encoders is not None
            return told, fleet.encoders.chunks

        before, sent = await estimated()
        assert (await estimated())[1] == sent == 1, "what was only sized is not remembered"
        await told(service, about())
        assert await estimated() == (before, 0)


async def test_the_sdk_tells_of_a_known_medium_as_of_any() -> None:
    picture, shown = digits.shipped_images()[0]
    async with AsyncClient.in_process("digits") as client:
        handle = await client.upload(Video(CLIP.path))
        first = await client.generate("digits", [handle, "Read the digits."])
        again = await client.generate("digits", [handle, "Read the digits."])
        assert again.text == first.text == CLIP.answer and again.frames == first.frames
        assert again.usage.media[0].units_cached == UNITS
        for _ in range(2):
            said = await client.generate("digits", [Image(picture.read_bytes()), "Read the digits."])
            assert said.text == str(shown)
