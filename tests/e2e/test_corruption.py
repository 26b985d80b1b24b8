"""Bytes of the arena are written over while questions run: no digit is ever wrong, and what was found is counted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from chiasm import AsyncClient, ServerError, Video
from chiasm.cache.arena import ArenaStore
from chiasm.cache.ledger import Ledger
from chiasm.cache.region import Region
from tests.digits import ShippedClip, shipped_clips
from tests.processes import Trio, trio

QUESTION = "Read the digits."
ROUNDS = 12


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trio, Region]]:
    """Three processes whose decoder has room for one clip only, so that it reads the arena for every question."""
    folder = tmp_path_factory.mktemp("corrupted")
    with trio(folder, arena_bytes=2 << 20, decoder=["--visual-tokens", "48"]) as served:
        region = Region.open(folder / "arena")
        yield served, region
        region.close()


class Spoiling:
    """Writes over entries, wherever they lie."""

    def __init__(self, region: Region, seed: int) -> None:
        self._ledger = Ledger(region.body)
        self._draw = random.Random(seed)
        self.written = 0

    def spoil(self, count: int) -> None:
        """Changes one byte of each of some entries: of payload, header or tag."""
        extents = self._ledger.extents()
        for extent in self._draw.sample(extents, min(count, len(extents))):
            # A part in three each, or the small ones would never be hit.
            header, tag = extent.payload, extent.payload + extent.header
            part = self._draw.choice([(0, header), (header, tag), (tag, tag + extent.tag)])
            at = extent.start + self._draw.randrange(*part)
            self._ledger.data[at] ^= self._draw.randrange(1, 256)
            self.written += 1

    async def go_on(self, seconds: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            self.spoil(1)


@pytest.mark.timeout(240)
async def test_no_digit_is_wrong_whatever_is_written_over_the_arena_meanwhile(system: tuple[Trio, Region]) -> None:
    served, region = system
    clips = shipped_clips()
    spoiling = Spoiling(region, 7)
    outcomes: Counter[str] = Counter()

    async def ask(client: AsyncClient, clip: ShippedClip) -> None:
        try:
            answer = await client.generate("digits", [Video(clip.path), QUESTION])
        except ServerError as error:  # met it twice: refused, and not answered wrongly
            outcomes[error.reason] += 1
        else:
            outcomes["right" if answer.text == clip.answer else f"{answer.text} for {clip.answer}"] += 1

    async with AsyncClient(served.target) as client:
        for clip in clips:
            await ask(client, clip)
        assert outcomes == {"right": len(clips)}
        encoded = served.encoder.counted()["chiasm_encoder_units_total:encoded"]
        meanwhile = asyncio.create_task(spoiling.go_on(0.02))
        for _ in range(ROUNDS):
            spoiling.spoil(4)
            await asyncio.gather(*(ask(client, clip) for clip in clips))
        meanwhile.cancel()
        await asyncio.gather(meanwhile, return_exceptions=True)

        asked = len(clips) * (ROUNDS + 1)
        assert outcomes["right"] + outcomes["ENTRY_MISSING"] == asked, outcomes
        assert outcomes["right"] >= 0.8 * asked, outcomes

        rejected = {
            name.rpartition(":")[2]: count
            for name, count in served.decoder.counted().items()
            if name.startswith("chiasm_kv_rejected_total")
        }
        assert rejected["tag"] > 0 and sum(rejected.values()) <= spoiling.written
        assert served.encoder.counted()["chiasm_kv_rejected_total:header"] > 0
        assert served.encoder.counted()["chiasm_encoder_units_total:encoded"] >= encoded + sum(rejected.values())
        assert served.decoder.event("an entry is wrong and is encoded again") is not None
        again = served.decoder.event("an entry is wrong again and again: memory, or somebody who writes to it")
        assert again is not None and again["level"] == "error" and again["times"] >= 3

        outcomes.clear()
        for clip in clips:  # nobody writes any more
            await ask(client, clip)
        assert outcomes["right"] + outcomes["ENTRY_MISSING"] == len(clips)
    await served.settled(seconds=45)


async def test_a_region_that_is_flushed_again_and_again_under_questions_costs_encoding_and_nothing_else(
    system: tuple[Trio, Region],
) -> None:
    served, region = system
    store = ArenaStore(region, patience=5.0)
    clips = shipped_clips()

    async def flushing() -> None:
        while True:
            await store.flush()
            await asyncio.sleep(0.005)

    async with AsyncClient(served.target) as client:
        task = asyncio.create_task(flushing())
        for _ in range(4):
            answers = await asyncio.gather(*(client.generate("digits", [Video(c.path), QUESTION]) for c in clips))
            assert [answer.text for answer in answers] == [clip.answer for clip in clips]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await served.settled(seconds=45)
