"""The units of one medium shared out among encoders: each makes its own, once, and whoever is lost is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm.errors import InvalidRequest, Unavailable
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.fleet import DecoderWorker, EncoderWorker, Served
from router.spread import Spread
from tests import digits
from tests.asking import forget, question, running, video
from tests.e2e.test_requests import settled
from tests.router.scripted import Meddle, MeddledEncoder, MeddledFleet, answer, untouched
from tests.router.test_coordinator import dies_before

CLIP = max(digits.shipped_clips(), key=lambda clip: len(clip.digits))
COUNT = len(CLIP.digits)
TWO = Spread(encoders=2, least=2, turn=1)


def asked_for(encoder: MeddledEncoder, call: int = 0) -> list[int]:
    return [run.first for run in encoder.goes[call].units]


@given(count=st.integers(0, 300), encoders=st.integers(1, 9), least=st.integers(1, 40), turn=st.integers(1, 20))
def test_every_unit_is_in_one_share_and_the_shares_are_even(count: int, encoders: int, least: int, turn: int) -> None:
    shares = Spread(encoders, least, turn).shares(range(count))
    assert sorted(unit for share in shares for unit in share) == list(range(count))
    assert all(share == sorted(share) for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= turn
    assert len(shares) == 1 or (len(shares) <= encoders and count >= least * len(shares))


async def test_each_of_two_encoders_makes_its_share_and_no_unit_is_made_twice() -> None:
    async with running() as service:
        fleet = MeddledFleet(service, others=[untouched])
        got = await answer(fleet, question("Read the digits.", video(CLIP.path.read_bytes())), spread=TWO)
        assert got.text == CLIP.answer and got.encoded == COUNT == service.encoder.counts.encoded_units
        assert fleet.encoders is not None
        assert asked_for(fleet.encoders) == list(range(0, COUNT, 2))
        assert asked_for(fleet.others[1]) == list(range(1, COUNT, 2)) and fleet.others[1].goes[0].part
        again = await answer(MeddledFleet(service, others=[untouched]), question("?", video(CLIP.path.read_bytes())))
        assert again.encoded == 0
        await settled(service)


async def test_the_priority_of_a_request_is_told_to_every_encoder_of_its_media() -> None:
    request = question("Read the digits.", video(CLIP.path.read_bytes()))
    request.priority = 7
    async with running() as service:
        fleet = MeddledFleet(service, others=[untouched])
        await answer(fleet, request, spread=TWO)
        assert fleet.encoders is not None
        assert [opened.priority for opened in [*fleet.encoders.opened, *fleet.others[1].opened]] == [7, 7]


async def test_a_short_medium_is_one_encoders() -> None:
    async with running() as service:
        fleet = MeddledFleet(service, others=[untouched])
        spread = Spread(encoders=2, least=COUNT, turn=1)
        got = await answer(fleet, question("Read the digits.", video(CLIP.path.read_bytes())), spread=spread)
        assert got.text == CLIP.answer and not fleet.others


async def test_units_in_the_store_count_as_cached_whoever_finds_them() -> None:
    async with running() as service:
        request = question("Read the digits.", video(CLIP.path.read_bytes()))
        await answer(MeddledFleet(service), request)
        service.decoder.flush()
        got = await answer(MeddledFleet(service, others=[untouched]), request, spread=TWO)
        assert got.text == CLIP.answer and got.media[0].units_cached == COUNT
        assert service.encoder.counts.encoded_units == COUNT


@pytest.mark.parametrize("before", ["probed", "sized", "ready", "end"])
@pytest.mark.parametrize("who", ["first", "other"])
async def test_either_encoder_may_be_lost_at_any_stage(who: str, before: str) -> None:
    meddles: dict[str, Meddle] = {"first": untouched, "other": untouched} | {who: dies_before(before)}
    async with running() as service:
        fleet = MeddledFleet(service, encoder=meddles["first"], others=[meddles["other"]])
        got = await answer(fleet, question("Read the digits.", video(CLIP.path.read_bytes())), spread=TWO)
        assert got.text == CLIP.answer and len(got.media) == 1
        assert len(fleet.lost_workers) == 1
        await forget(service)  # nobody is left who would take back the pins of the call that broke
        await settled(service)


async def test_two_losses_over_one_medium_are_the_last_whoever_is_lost() -> None:
    async with running() as service:
        meddle = dies_before("ready")
        fleet = MeddledFleet(service, encoder=meddle, others=[meddle])
        with pytest.raises(InvalidRequest) as caught:
            await answer(fleet, question("Read the digits.", video(CLIP.path.read_bytes())), spread=TWO)
        assert caught.value.reason == "POISON_INPUT"
        await settled(service)


async def test_a_worker_that_is_lost_with_two_calls_about_one_medium_is_one_loss() -> None:
    class One(MeddledFleet):
        """Its encoder is the only one that is left when the medium was shared out."""

        only: EncoderWorker | None = None

        async def encoder(self, model: Served, decoder: DecoderWorker, *, hint: bytes, rank: int = 0) -> EncoderWorker:
            self.only = self.only or await super().encoder(model, decoder, hint=hint)
            return self.only

    broken = asyncio.Event()
    began: set[int] = set()

    async def dies(number: int) -> None:
        began.add(number)
        if len(began) == 2:
            broken.set()
        await broken.wait()
        raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")

    def meddle(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool | Awaitable[None]:
        return dies(number) if number <= 2 and response.WhichOneof("message") == "ready" else True

    async with running() as service:
        fleet = One(service, encoder=meddle, others=[untouched])
        got = await answer(fleet, question("Read the digits.", video(CLIP.path.read_bytes())), spread=TWO)
        assert got.text == CLIP.answer
        assert began == {1, 2} and fleet.encoders is not None and fleet.encoders.calls == 4
        await forget(service)
        await settled(service)


async def test_a_video_that_ends_early_is_laid_with_what_came_however_it_was_shared_out() -> None:
    rng, pool = np.random.default_rng(8), digits.held_out_digits()
    cut = digits.without_last_frames(digits.clip([digits.frame(pool[i][0], rng) for i in range(20)]))
    request = question(video(cut), "Read the digits.", max_tokens=4)
    async with running() as service:
        alone = await answer(MeddledFleet(service), request)
        assert 0 < alone.media[0].units < 20
    async with running() as service:
        fleet = MeddledFleet(service, others=[untouched])
        got = await answer(fleet, request, spread=TWO)
        assert fleet.others and got.ids == alone.ids and got.media[0].units == alone.media[0].units
        await settled(service)


async def test_whoever_leaves_leaves_nothing_behind_at_either_encoder() -> None:
    reached = asyncio.Event()

    def meddle(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
        if response.WhichOneof("message") == "ready":
            reached.set()
        return True

    async with running() as service:
        fleet = MeddledFleet(service, others=[meddle])
        asking = asyncio.create_task(
            answer(fleet, question("Read the digits.", video(CLIP.path.read_bytes())), spread=TWO)
        )
        await reached.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await settled(service)
