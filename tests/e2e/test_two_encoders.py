"""Two encoder processes: a long video is made by both, and either may be killed over it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from chiasm import AsyncClient, Video
from chiasm.client import Content
from tests import digits
from tests.e2e.test_digits import drawn
from tests.processes import Trio, trio
from tests.waiting import until

FRAMES = 40
QUESTION = "Which digit is at 3.0 seconds?"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with trio(
        tmp_path_factory.mktemp("pair"), encoders=2, encoder=["--lease-seconds", "3"], router=["--fan-out", "2"]
    ) as made:
        yield made


def clip(seed: int) -> bytes:
    frames, _ = drawn(np.random.default_rng(seed), FRAMES)
    return digits.clip(frames)


def encoded(served: Trio) -> list[float]:
    return [encoder.counted()["chiasm_encoder_units_total:encoded"] for encoder in served.encoders]


async def test_a_long_video_is_made_by_both_and_the_answer_is_that_of_one(pair: Trio) -> None:
    asked: Content = [Video(clip(1)), QUESTION]
    before = encoded(pair)
    async with AsyncClient.in_process("digits") as inside, AsyncClient(pair.target) as outside:
        here = await inside.generate("digits", asked, max_tokens=8)
        there = await outside.generate("digits", asked, max_tokens=8)
    assert (there.ids, there.frames) == (here.ids, here.frames)
    made = [now - then for now, then in zip(encoded(pair), before, strict=True)]
    assert sorted(made) == [16, 24], "turns of eight"
    await pair.settled()


async def test_what_both_have_made_is_known_to_each_and_opened_by_neither(pair: Trio) -> None:
    asked: Content = [Video(clip(9)), QUESTION]
    async with AsyncClient(pair.target) as client:
        first = await client.generate("digits", asked, max_tokens=8)
        await pair.settled()
        made = encoded(pair)
        spared = sum(encoder.counted()["chiasm_encoder_media_spared_bytes_total"] for encoder in pair.encoders)
        again = await client.generate("digits", asked, max_tokens=8)
        assert again.ids == first.ids and again.usage.media[0].units_cached == FRAMES
        assert encoded(pair) == made
        after = sum(encoder.counted()["chiasm_encoder_media_spared_bytes_total"] for encoder in pair.encoders)
        assert after > spared
    await pair.settled()


@pytest.mark.parametrize("which", [0, 1])
async def test_either_may_be_killed_in_the_middle(pair: Trio, which: int) -> None:
    asked: Content = [Video(clip(2 + which)), QUESTION]
    async with AsyncClient.in_process("digits") as inside:
        here = await inside.generate("digits", asked, max_tokens=8)
    victim = pair.encoders[which]
    before = victim.counted()["chiasm_encoder_units_total:encoded"]
    async with AsyncClient(pair.target) as outside:
        asking = asyncio.create_task(outside.generate("digits", asked, max_tokens=8))
        await until(lambda: victim.counted()["chiasm_encoder_units_total:encoded"] > before)
        await asyncio.to_thread(victim.kill)
        there = await asking
    assert (there.ids, there.frames) == (here.ids, here.frames)
    # A pin that it had taken and not told of ends by itself.
    victim.start()
    await asyncio.to_thread(victim.wait_for, "ready")
    await pair.settled()
