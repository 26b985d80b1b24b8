"""Workers that are nearly alike: of other weights, another configuration, another type, or processing that was changed.
They are never paired, and what one has made is never found by another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from chiasm import AsyncClient
from chiasm.cache.memory import MemoryStore
from chiasm.cache.store import Lease
from chiasm.errors import Unavailable
from chiasm.media.sample import SamplingOptions
from chiasm.models.family import MediumFacts
from chiasm.models.registry import open_model
from encoder_service.engine import EncoderEngine
from tests.e2e.test_digits import drawn
from tests.faults.clips import FRAMES, unseen
from tests.faults.twins import other_config, other_weights
from tests.processes import Role, Trio


@contextmanager
def started_again(role: Role, *flags: str) -> Iterator[None]:
    """A role with other flags while the block lasts."""

    def again(flags: tuple[str, ...]) -> None:
        if role.code is None:
            role.kill()
        role.more = [*flags]
        role.start()
        role.wait_for("ready")

    try:
        again(flags)
        yield
    finally:
        again(())


def weights(folder: Path) -> list[str]:
    return ["--model", str(other_weights(folder)), "--name", "digits"]


def config(folder: Path) -> list[str]:
    return ["--model", str(other_config(folder)), "--name", "digits"]


def dtype(folder: Path) -> list[str]:
    return ["--dtype", "float16"]


@pytest.mark.chaos
@pytest.mark.parametrize("twin", [weights, config, dtype])
async def test_a_twin_encodes_nothing_for_a_decoder_and_alone_it_is_no_partner(
    pair: Trio, quiet: AsyncClient, tmp_path: Path, twin: Callable[[Path], list[str]]
) -> None:
    """M22, M23"""
    right, other = pair.encoders
    with started_again(other, *twin(tmp_path)):
        async with AsyncClient(pair.target, max_retries=0) as client:
            for _ in range(4):  # each would go to either, were they alike
                content = unseen()
                answer = await client.generate("digits", content, max_tokens=24)
                assert answer.ids == (await quiet.generate("digits", content, max_tokens=24)).ids
                assert answer.usage.media[0].units_cached == 0
            assert other.counted()["chiasm_encoder_units_total:encoded"] == 0
            await asyncio.to_thread(right.kill)
            try:
                with pytest.raises(Unavailable):
                    await client.generate("digits", unseen(), max_tokens=24, timeout=60)
                assert other.counted()["chiasm_encoder_units_total:encoded"] == 0
            finally:
                right.start()
                await asyncio.to_thread(right.wait_for, "ready")


async def test_encoders_whose_processing_differs_find_nothing_of_each_other_in_one_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """M23: the same pixels, the same grid, the same shape, and a word of difference in what was done to them."""
    model = open_model("digits")
    half, store = model.encoder(), MemoryStore(64 << 20)
    frames, _ = drawn(np.random.default_rng(3), FRAMES)

    def engine() -> EncoderEngine:
        return EncoderEngine(
            half, model.processor, fingerprint=model.checkpoint.fingerprint, store=store, workers_secret=bytes(32)
        )

    one = engine()
    described = model.processor.describe()
    monkeypatch.setattr(type(model.processor), "describe", lambda self: described + b" ")
    other = engine()
    try:
        height, width = frames[0].shape[:2]
        plan = model.processor.size([MediumFacts("image", height, width, 1, 0.0, SamplingOptions())])[0]
        for made in (one, other):
            found = [
                (await made.announce([frame], plan, root=bytes(32), lease=Lease.of(30.0))).cached for frame in frames
            ]
            assert found == [False] * FRAMES
        again = [await one.announce([frame], plan, root=bytes(32), lease=Lease.of(30.0)) for frame in frames]
        assert all(announced.cached for announced in again), "its own it finds"
    finally:
        await one.close()
        await other.close()
