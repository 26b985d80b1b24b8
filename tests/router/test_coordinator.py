"""The coordinator with workers that lose entries, break off, or end: answered, or refused with a reason, and nothing
left."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from chiasm.cache.memory import MemoryStore
from chiasm.errors import DeadlineExceeded, ServerError, Unavailable
from chiasm.local import LocalService
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from decoder_service.seats import Seat
from decoder_service.sequence import DecodeSequence
from tests import digits
from tests.asking import ask, forget, image, question, running, video
from tests.decoder_service.holders import hold
from tests.decoder_service.test_entries import Meddling
from tests.e2e.test_requests import settled
from tests.router.scripted import Meddle, MeddledDecoder, MeddledEncoder, MeddledFleet, answer
from tests.waiting import until

KINDS = {"encoder": MeddledEncoder, "decoder": MeddledDecoder}
STAGES_OF_AN_ENCODING = ["probed", "sized", "ready", "end"]


def lose(service: LocalService, times: int) -> MemoryStore:
    """A store that loses entries when the decoder asks for them, `times` times."""
    store = Meddling(lambda sealed: None, times)
    service.store = service.encoder.store = service.decoder.store = store
    return store


def dies_before(which: str, *, times: int = 1) -> Meddle:
    """Calls 1 to `times` break when a response of that kind is due."""

    def meddle(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
        if number <= times and response.WhichOneof("message") == which:
            raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")
        return True

    return meddle


# -- entries -----------------------------------------------------------------------------------------------------------


async def test_a_lost_entry_is_encoded_again_even_with_credit_for_one_unit_only() -> None:
    """The first call waits for credit that only the lost unit could bring, while holding the only media process."""
    clip = digits.shipped_clips()[-1]
    async with running() as service:
        lose(service, 1)
        got = await answer(MeddledFleet(service), question("Read the digits.", video(clip.path.read_bytes())), credit=1)
        assert got.text == clip.answer and len(got.media) == 1
        await settled(service)


async def test_many_lost_entries_are_asked_for_together() -> None:
    clip = digits.shipped_clips()[-1]
    async with running() as service:
        lose(service, len(clip.digits))
        fleet = MeddledFleet(service)
        got = await answer(fleet, question("Read the digits.", video(clip.path.read_bytes())))
        assert got.text == clip.answer
        assert fleet.encoders is not None and fleet.encoders.calls <= 4
        await settled(service)


async def test_a_second_encode_that_brings_nothing_fails_the_request() -> None:
    clip = digits.shipped_clips()[0]

    def drop_ready_of_later_calls(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
        if number > 1 and response.HasField("ready"):  # type: ignore[arg-type]
            response.ClearField("ready")  # type: ignore[arg-type]
        return True

    async with running() as service:
        lose(service, 1)
        fleet = MeddledFleet(service, encoder=drop_ready_of_later_calls)
        with pytest.raises(ServerError) as caught:
            await answer(fleet, question("Read the digits.", video(clip.path.read_bytes())))
        assert (caught.value.reason, caught.value.item) == ("ENTRY_MISSING", "messages[0].content[1]")
        await forget(service)


async def test_text_and_early_units_are_prefilled_while_later_units_are_still_encoded() -> None:
    clip = digits.shipped_clips()[-1]
    ready: list[int] = []
    gate = asyncio.Event()

    async def slowly(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> None:
        assert isinstance(response, epb.EncodeResponse)
        if response.HasField("ready"):
            ready.append(response.ready.unit)
            if len(ready) == 4:
                await gate.wait()

    async with running() as service:
        fleet = MeddledFleet(service, encoder=slowly)
        asking = asyncio.create_task(answer(fleet, question("Read the digits.", video(clip.path.read_bytes()))))
        engine = service.decoder.engine
        await until(lambda: engine.holdings.held.visual == 3 * 5 and engine.holdings.held.pages > 0)
        assert len(ready) == 4 and not asking.done()
        gate.set()
        assert (await asking).text == clip.answer
        await settled(service)


# -- encoders that are lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", STAGES_OF_AN_ENCODING)
async def test_a_lost_encoder_is_replaced_and_the_answer_is_the_same(before: str) -> None:
    clip, shown = digits.shipped_clips()[-1], digits.shipped_images()[0][0]
    request = question("Read the digits.", video(clip.path.read_bytes()), image(shown.read_bytes()))
    async with running() as service:
        expected = await ask(service, request)
        fleet = MeddledFleet(service, encoder=dies_before(before))
        got = await answer(fleet, request)
        assert (got.ids, got.text) == (expected.ids, expected.text)
        assert [m.units for m in got.media] == [m.units for m in expected.media]
        assert len(fleet.lost_workers) == 1 and fleet.encoders is not None
        assert [opened.attempt for opened in fleet.encoders.opened].count(2) == 1
        await forget(service)  # nobody is left who would take back the pins of the call that broke


async def test_units_that_a_lost_encoder_had_announced_are_not_encoded_again() -> None:
    clip = digits.shipped_clips()[-1]
    seen: list[int] = []

    def dies_after_three(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
        assert isinstance(response, epb.EncodeResponse)
        if number == 1 and response.HasField("ready"):
            seen.append(response.ready.unit)
            if len(seen) > 3:
                raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")
        return True

    async with running() as service:
        fleet = MeddledFleet(service, encoder=dies_after_three)
        got = await answer(fleet, question("Read the digits.", video(clip.path.read_bytes())))
        assert got.text == clip.answer
        assert fleet.encoders is not None
        wanted = {unit.first for unit in fleet.encoders.goes[-1].units}
        assert wanted == set(range(len(clip.digits))) - set(seen[:3])
        assert not fleet.encoders.goes[-1].afresh, "what the store holds is taken from it"
        await forget(service)


async def test_entries_whose_announcement_was_lost_are_found_in_the_store_and_not_made_again() -> None:
    clip = digits.shipped_clips()[-1]
    async with running() as service:
        gate = asyncio.Event()

        async def lost_when_all_are_made(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> None:
            if number == 1 and response.HasField("ready"):  # type: ignore[arg-type]
                await gate.wait()
                raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")

        fleet = MeddledFleet(service, encoder=lost_when_all_are_made)
        asking = asyncio.create_task(answer(fleet, question("Read the digits.", video(clip.path.read_bytes()))))
        await until(lambda: service.encoder.counts.encoded_units == len(clip.digits))
        gate.set()
        got = await asking
        assert got.text == clip.answer and got.encoded == 0
        assert service.encoder.counts.encoded_units == len(clip.digits)
        await forget(service)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_finished_answer_waits_for_the_encoders_accounts_and_is_not_lost_with_one(lost: bool) -> None:
    """The encoder's last word is late, or never comes."""
    clip = digits.shipped_clips()[-1]
    finished = asyncio.Event()

    async def late(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> None:
        if response.HasField("end"):  # type: ignore[arg-type]
            await finished.wait()
            await asyncio.sleep(0.2)
            if lost:
                raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")

    def seen(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
        if response.HasField("finished"):  # type: ignore[arg-type]
            finished.set()
        return True

    async with running() as service:
        fleet = MeddledFleet(service, encoder=late, decoder=seen)
        got = await answer(fleet, question("Read the digits.", video(clip.path.read_bytes())))
        assert got.text == clip.answer
        assert [medium.units for medium in got.media] == ([] if lost else [len(clip.digits)])
        await forget(service) if lost else await settled(service)


async def test_an_encoder_lost_after_its_last_word_is_not_replaced() -> None:
    clip = digits.shipped_clips()[-1]
    async with running() as service:
        fleet = MeddledFleet(service)
        encoder = await fleet.encoder(fleet.served, await fleet.decoder(fleet.served), hint=b"")
        assert isinstance(encoder.calls, MeddledEncoder)
        encoder.calls.dies_at_the_end = True
        got = await answer(fleet, question("Read the digits.", video(clip.path.read_bytes())))
        assert got.text == clip.answer and len(got.media) == 1 and encoder.calls.calls == 1
        assert len(fleet.lost_workers) == 1
        await settled(service)


async def test_a_medium_that_ends_two_encoders_is_not_given_to_a_third() -> None:
    async with running() as service:
        fleet = MeddledFleet(service, encoder=dies_before("probed", times=9))
        with pytest.raises(Unavailable) as caught:
            await answer(fleet, question("Read the digits.", image(digits.shipped_images()[0][0].read_bytes())))
        assert (caught.value.reason, caught.value.item) == ("ENCODER_LOST", "messages[0].content[1]")
        assert caught.value.retryable and fleet.encoders is not None and fleet.encoders.calls == 2
        await settled(service)


@pytest.mark.parametrize("before", STAGES_OF_AN_ENCODING)
async def test_an_encoder_that_ends_its_stream_early_fails_the_request_and_frees_everything(before: str) -> None:
    clip = digits.shipped_clips()[0]
    async with running() as service:
        fleet = MeddledFleet(service, encoder=lambda number, response: not response.HasField(before))  # type: ignore[arg-type]
        with pytest.raises(ServerError) as caught:
            await answer(fleet, question("Read the digits.", video(clip.path.read_bytes())))
        assert caught.value.reason == "STREAM_BROKEN"
        await settled(service)


# -- decoders that are lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["admitted", "attached", "started", "visible", "tokens"])
async def test_a_decoder_lost_before_its_first_token_is_replaced_and_the_answer_is_the_same(before: str) -> None:
    clip = digits.shipped_clips()[-1]
    request = question("Read the digits.", video(clip.path.read_bytes()))
    async with running() as service:
        expected = await ask(service, request)
        fleet = MeddledFleet(service, decoder=dies_before(before))
        got = await answer(fleet, request)
        assert (got.ids, got.text) == (expected.ids, expected.text)
        assert got.attempts[-1] == 2 and fleet.decoders is not None and fleet.decoders.calls == 2
        await settled(service)


async def test_a_decoder_lost_after_some_tokens_is_replaced_and_nothing_is_encoded_again() -> None:
    clip = digits.shipped_clips()[-1]
    request = question("Read the digits.", video(clip.path.read_bytes()))
    async with running() as service:
        expected = await answer(MeddledFleet(service), request)
        made = service.encoder.counts.encoded_units

        def dies_at_the_third(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
            assert isinstance(response, dpb.DecodeResponse)
            return not (number == 1 and response.HasField("tokens") and response.tokens.index == 2)

        got = await answer(MeddledFleet(service, decoder=dies_at_the_third), request)
        assert (got.ids, got.text, got.attempts) == (expected.ids, expected.text, [1, 2])
        assert service.encoder.counts.encoded_units == made
        await settled(service)


async def test_a_request_that_ends_two_decoders_is_not_given_to_a_third() -> None:
    async with running() as service:
        fleet = MeddledFleet(service, decoder=dies_before("started", times=9))
        with pytest.raises(Unavailable) as caught:
            await answer(fleet, question("Say something."))
        assert caught.value.reason == "DECODER_LOST" and fleet.decoders is not None and fleet.decoders.calls == 2
        await settled(service)


async def test_a_worker_that_is_ending_has_not_begun_and_is_not_held_against_the_request() -> None:
    def drains(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
        if number <= 3:
            raise Unavailable("DRAINING", "the worker is ending", retry_after=1.0)
        return True

    async with running() as service:
        shown, digit = digits.shipped_images()[0]
        fleet = MeddledFleet(service, encoder=drains, decoder=drains)
        got = await answer(fleet, question("Read the digits.", image(shown.read_bytes())))
        assert got.text == str(digit)
        await settled(service)


# -- workers that stand still ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "before"), [("encoder", "sized"), ("decoder", "admitted"), ("decoder", "tokens")])
async def test_a_worker_that_is_not_heard_of_is_replaced_although_its_connection_stands(role: str, before: str) -> None:
    clip = digits.shipped_clips()[-1]
    stands = asyncio.Event()

    async def stand_still(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> None:
        if number == 1 and response.WhichOneof("message") == before:
            stands.set()
            await asyncio.Event().wait()

    async with running() as service:
        fleet = (
            MeddledFleet(service, encoder=stand_still)
            if role == "encoder"
            else MeddledFleet(service, decoder=stand_still)
        )
        asking = asyncio.create_task(answer(fleet, question("Read the digits.", video(clip.path.read_bytes()))))
        await stands.wait()
        still = next(worker for worker in fleet.given if isinstance(worker.calls, KINDS[role]))
        still.silent.set()
        assert (await asking).text == clip.answer
        assert fleet.lost_workers == [still]
        await settled(service)


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "after"), [("queue", None), ("encode", None), ("prefill", "admitted"), ("decode", "tokens")]
)
async def test_a_deadline_names_the_stage_at_which_it_passed(stage: str, after: str | None) -> None:
    """Another holds all the room, or the device of one half stands still: from the beginning, or once the decoder has
    said something."""
    clip = digits.shipped_clips()[-1]
    gate = threading.Event()
    async with running() as service:

        def stand_still(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
            if response.WhichOneof("message") == after:
                standing.append(asyncio.create_task(service.decoder.run(gate.wait)))
            return True

        standing: list[asyncio.Task[bool]] = []
        fleet = MeddledFleet(service, decoder=stand_still)
        request = question("Read the digits.", video(clip.path.read_bytes()))
        holders: list[Seat[DecodeSequence]] = []
        if stage != "encode":
            await ask(service, request)  # what comes before that stage is quick the second time
        try:
            if stage == "encode":
                service.encoder.device.submit(gate.wait)
            elif stage == "queue":
                holders.append(await hold(service.decoder, text=service.decoder.text_capacity))
            ending = asyncio.create_task(answer(fleet, request, deadline=time.monotonic() + 2.0))
            await asyncio.sleep(2.5)  # leaving waits for what stands still
        finally:
            gate.set()
            for holder in holders:
                await service.decoder.release(holder)
        with pytest.raises(DeadlineExceeded) as caught:
            await ending
        assert caught.value.stage == stage
        await asyncio.gather(*standing)
        await settled(service)


async def test_a_system_in_one_process_that_is_ending_makes_its_requests_unavailable() -> None:
    clip = digits.shipped_clips()[-1]
    async with running() as service:
        gate = threading.Event()
        service.encoder.device.submit(gate.wait)
        try:
            asking = asyncio.create_task(ask(service, question("Read the digits.", video(clip.path.read_bytes()))))
            await until(lambda: service.encoder.in_flight > 0)
            closing = asyncio.create_task(service.encoder.close())
            with pytest.raises(Unavailable) as caught:
                await asking
        finally:
            gate.set()
        await closing
    assert caught.value.reason == "DRAINING" and caught.value.retryable
