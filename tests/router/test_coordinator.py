"""The coordinator with workers that lose entries, break their streams, or end: answered, or refused with a reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from chiasm.cache.memory import MemoryStore
from chiasm.errors import ServerError, Unavailable
from chiasm.local import LocalService
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.coordinator import Coordinator
from router.fleet import EncoderCalls, Pair
from tests import digits
from tests.asking import Answer, forget, note, question, running, video
from tests.decoder_service.test_entries import Meddling
from tests.e2e.test_requests import settled
from tests.encoder_service.test_engine import until


async def answer(pair: Pair, request: rpb.GenerateRequest, *, credit: int = 1 << 26) -> Answer:
    got = Answer()
    async with (
        asyncio.timeout(30),
        aclosing(Coordinator(request, pair, tenant_root=bytes(32), credit=credit).run()) as events,
    ):
        async for event in events:
            note(got, event)
    return got


class Scripted:
    """An encoder whose every call is changed on its way to the coordinator."""

    def __init__(self, encoder: EncoderCalls, change: Callable[[int, epb.EncodeResponse], bool]) -> None:
        self.encoder = encoder
        self.change = change
        self.calls = 0

    async def encode(self, requests: AsyncIterator[epb.EncodeRequest]) -> AsyncIterator[epb.EncodeResponse]:
        self.calls += 1
        number = self.calls
        async for response in self.encoder.encode(requests):
            if not self.change(number, response):
                return
            yield response


def pair_of(service: LocalService, change: Callable[[int, epb.EncodeResponse], bool]) -> tuple[Pair, Scripted]:
    pair = service.router.fleet.choose("digits")
    scripted = Scripted(pair.encoder, change)
    return replace(pair, encoder=scripted), scripted


def lose(service: LocalService, times: int) -> MemoryStore:
    """A store that loses entries when the decoder asks for them, `times` times."""
    store = Meddling(lambda sealed: None, times)
    service.store = service.encoder.store = service.decoder.store = store
    return store


async def test_a_lost_entry_is_encoded_again_even_with_credit_for_one_unit_only() -> None:
    """The first call waits for credit that only the lost unit could bring, while holding the only media process."""
    clip = digits.shipped_clips()[-1]
    async with running() as service:
        lose(service, 1)
        pair, _ = pair_of(service, lambda number, response: True)
        got = await answer(pair, question("Read the digits.", video(clip.path.read_bytes())), credit=1)
        assert got.finished is not None and len(got.media) == 1
        await settled(service)


async def test_many_lost_entries_are_asked_for_together() -> None:
    clip = digits.shipped_clips()[-1]
    async with running() as service:
        lose(service, len(clip.digits))
        pair, encoder = pair_of(service, lambda number, response: True)
        await answer(pair, question("Read the digits.", video(clip.path.read_bytes())))
        assert encoder.calls <= 4
        await settled(service)


async def test_a_second_encode_that_brings_nothing_fails_the_request() -> None:
    clip = digits.shipped_clips()[0]

    def drop_ready_of_later_calls(number: int, response: epb.EncodeResponse) -> bool:
        if number > 1 and response.HasField("ready"):
            response.ClearField("ready")
        return True

    async with running() as service:
        lose(service, 1)
        pair, _ = pair_of(service, drop_ready_of_later_calls)
        with pytest.raises(ServerError) as caught:
            await answer(pair, question("Read the digits.", video(clip.path.read_bytes())))
        assert (caught.value.reason, caught.value.item) == ("ENTRY_MISSING", "messages[0].content[1]")
        await forget(service)


@pytest.mark.parametrize("before", ["probed", "sized", "ready", "end"])
async def test_an_encoder_that_breaks_off_fails_the_request_and_frees_everything(before: str) -> None:
    clip = digits.shipped_clips()[0]
    async with running() as service:
        pair, _ = pair_of(service, lambda number, response: not response.HasField(before))  # type: ignore[arg-type]
        with pytest.raises(ServerError) as caught:
            await answer(pair, question("Read the digits.", video(clip.path.read_bytes())))
        assert caught.value.reason == "STREAM_BROKEN"
        await settled(service)


async def test_a_worker_that_ends_while_it_is_needed_makes_the_request_unavailable() -> None:
    clip = digits.shipped_clips()[-1]
    async with running() as service:
        gate = threading.Event()
        service.encoder.device.submit(gate.wait)
        pair = service.router.fleet.choose("digits")
        asking = asyncio.create_task(answer(pair, question("Read the digits.", video(clip.path.read_bytes()))))
        await until(lambda: service.encoder.in_flight > 0)
        closing = asyncio.create_task(service.encoder.close())
        with pytest.raises(Unavailable) as caught:
            await asking
        gate.set()
        await closing
    assert caught.value.reason == "DRAINING" and caught.value.retryable
