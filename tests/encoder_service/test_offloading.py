"""An encoder whose weights leave its device: what is in flight is finished, what the store has is announced, all else
is refused until they are back."""

from __future__ import annotations

import asyncio

import pytest
import torch

from chiasm.cache.memory import MemoryStore
from chiasm.cache.store import Lease
from chiasm.errors import Unavailable, Unsupported
from chiasm.models.family import EncoderHalf
from chiasm.models.registry import Model, find
from chiasm.models.streaming import Streaming
from chiasm.settings import SettingsError
from encoder_service.engine import Announced, EncoderEngine
from encoder_service.graphs import captured
from tests.encoder_service.test_engine import ROOT, WORKERS, engine, frame, held, payload, plan
from tests.waiting import until


@pytest.fixture
def model() -> Model:
    return Model(find("digits"))


async def asked(e: EncoderEngine, model: Model, seed: int) -> Announced:
    return await e.announce([frame(seed)], plan(model), root=ROOT, lease=Lease.of(1))


async def test_what_is_in_flight_is_finished_first_and_what_comes_then_is_refused(model: Model) -> None:
    async with engine(model) as e:
        known = await asked(e, model, 1)
        with held(e):
            flying = [asyncio.create_task(asked(e, model, seed)) for seed in (2, 3)]
            await until(lambda: e.in_flight == 2)
            leaving = asyncio.create_task(e.offload())
            await asyncio.sleep(0)
            joins = asyncio.create_task(asked(e, model, 3))
            with pytest.raises(Unavailable) as caught:
                await asked(e, model, 4)
            assert (caught.value.reason, caught.value.retryable) == ("OFFLOADED", True)
            assert e.residence.here and not leaving.done()
        made = [*await asyncio.gather(*flying), await joins]
        await leaving
        assert made[1].contract == made[2].contract and e.counts.encoded_units == 3
        assert (await asked(e, model, 1)).cached and (await asked(e, model, 3)).cached
        with pytest.raises(Unavailable, match="OFFLOADED"):
            await asked(e, model, 4)
        assert e.in_flight == 0
        await e.load()
        assert torch.isfinite(await payload(e, (await asked(e, model, 4)).contract)).all()
        assert (await asked(e, model, 1)).contract == known.contract


async def test_entries_after_the_weights_came_back_are_those_of_before(model: Model) -> None:
    for streaming in (None, Streaming()):
        e = EncoderEngine(
            model.encoder(dtype=torch.float32, streaming=streaming),
            model.processor,
            fingerprint=model.checkpoint.fingerprint,
            store=MemoryStore(1 << 24),
            workers_secret=WORKERS,
        )
        try:
            before = await payload(e, (await asked(e, model, 1)).contract)
            await e.offload()
            await e.offload()
            await e.load()
            await e.load()
            again = await e.announce([frame(1)], plan(model), root=ROOT, lease=Lease.of(1), afresh=True)
            assert not again.cached and torch.equal(await payload(e, again.contract), before)
        finally:
            await e.close()


async def test_whoever_gives_up_waiting_has_changed_nothing(model: Model) -> None:
    async with engine(model) as e:
        with held(e):
            flying = asyncio.create_task(asked(e, model, 1))
            await until(lambda: e.in_flight == 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await e.offload()
            other = asyncio.create_task(asked(e, model, 2))
            await until(lambda: e.in_flight == 2)
        await asyncio.gather(flying, other)
        assert e.residence.here


async def test_an_engine_that_ends_while_weights_wait_to_leave_ends(model: Model) -> None:
    async with engine(model) as e:
        with held(e):
            flying = asyncio.create_task(asked(e, model, 1))
            await until(lambda: e.in_flight == 1)
            leaving = asyncio.create_task(e.offload())
            await asyncio.sleep(0)
            closing = asyncio.create_task(e.close())
            with pytest.raises(Unavailable, match="DRAINING"):
                await flying
        await closing
        async with asyncio.timeout(20):  # they may have left before the thread ended
            await asyncio.gather(leaving, return_exceptions=True)


async def test_streamed_blocks_are_not_captured_and_captured_weights_do_not_leave(model: Model) -> None:
    half = model.encoder(streaming=Streaming())
    assert captured(half, None, 4096) is None and captured(half, False, 4096) is None
    with pytest.raises(SettingsError, match="streamed blocks") as caught:
        captured(half, True, 4096)
    assert caught.value.where == "--layerwise-offload"

    def trunk(patches_pv: torch.Tensor, grids: object, attention: object) -> torch.Tensor:
        raise AssertionError("nothing is encoded")

    def captured_of(half: EncoderHalf) -> EncoderEngine:
        return EncoderEngine(
            half,
            model.processor,
            fingerprint=model.checkpoint.fingerprint,
            store=MemoryStore(1 << 20),
            workers_secret=WORKERS,
            trunk=trunk,
        )

    with pytest.raises(SettingsError, match="streamed blocks"):
        captured_of(half)
    e = captured_of(model.encoder())
    try:
        with pytest.raises(Unsupported, match="OFFLOAD_CAPTURED"):
            await e.offload()
        assert e.residence.here
    finally:
        await e.close()
