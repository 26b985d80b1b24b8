"""Encoders that die or stand still at a named place of their work: another one goes on, nothing that was finished is
made twice, and nothing half-made is ever seen."""

from __future__ import annotations

import asyncio

import pytest

from chiasm import AsyncClient
from chiasm.client import Content, Generation
from tests.faults.clips import FRAMES, unseen
from tests.faults.injectors import injected
from tests.faults.injectors.points import Points
from tests.faults.injectors.processes import Stop
from tests.processes import Role, Trio
from tests.waiting import until

TRIES = 12
"""Clips of which one surely goes to the encoder that is hurt: each is as likely to go to the other."""


async def asked(client: AsyncClient, content: Content) -> Generation:
    return await client.generate("digits", content, max_tokens=24, timeout=60)


def encoded(role: Role) -> float:
    return role.counted()["chiasm_encoder_units_total:encoded"]


async def over(served: Trio, quiet: AsyncClient, faults: str) -> tuple[Generation, float]:
    """Asks about new clips until one of the faults has happened at the first encoder. The answer about that clip, and
    the units that the other one made for it. Every answer is right."""
    victim, other = served.encoders
    point = Points(victim, faults)
    await asyncio.to_thread(point.inject)
    try:
        async with AsyncClient(served.target) as client:
            for _ in range(TRIES):
                before = encoded(other)
                content = unseen()
                answer = await asked(client, content)
                assert answer.ids == (await asked(quiet, content)).ids
                if victim.event("failpoint"):
                    break
        await asyncio.to_thread(point.verify)
        return answer, encoded(other) - before
    finally:
        await asyncio.to_thread(point.end)
        await served.settled(seconds=45)


async def test_killed_in_a_pass_another_encodes_all_and_each_unit_once(pair: Trio, quiet: AsyncClient) -> None:
    """M1"""
    answer, made = await over(pair, quiet, "encoder.pass=exit")
    assert made == FRAMES and answer.usage.media[0].units == FRAMES


@pytest.mark.parametrize("point", [pytest.param("store.reserved", marks=pytest.mark.chaos), "store.publishing"])
async def test_killed_between_an_entrys_room_and_its_record_nobody_sees_it(
    pair: Trio, quiet: AsyncClient, point: str
) -> None:
    """M2, in the region: the third time, when two are whole. Of a store between nodes: `tests/faults/test_redis.py`."""
    _, made = await over(pair, quiet, f"{point}=exit@3")
    assert 0 < made <= FRAMES


@pytest.mark.parametrize("action", ["exit", pytest.param("drop", marks=pytest.mark.chaos)])
async def test_lost_when_an_entry_is_there_and_not_told_it_is_found_and_not_made_again(
    pair: Trio, quiet: AsyncClient, action: str
) -> None:
    """M3"""
    answer, made = await over(pair, quiet, f"Encode/ready={action}")
    assert made < FRAMES
    assert (answer.usage.media[0].units_cached or 0) >= FRAMES - made


@pytest.mark.chaos
@pytest.mark.timeout(240)
async def test_standing_still_in_a_pass_another_takes_over_and_what_the_first_publishes_late_harms_nobody(
    pair: Trio, quiet: AsyncClient
) -> None:
    """M4"""
    victim = pair.encoders[0]
    point = Points(victim, "encoder.pass=sleep(1)")
    await asyncio.to_thread(point.inject)
    try:
        async with AsyncClient(pair.target) as client:
            for _ in range(TRIES):
                content = unseen()
                asking = asyncio.create_task(asked(client, content))
                await until(lambda asking=asking: asking.done() or victim.event("failpoint") is not None)  # type: ignore[misc]
                if not asking.done():
                    break
            async with injected(Stop(victim.pid)):
                answer = await asking  # while the first stands still
            await asyncio.to_thread(point.verify)
            await pair.settled(seconds=60)  # it has woken up, and has put what it had begun
            again = await asked(client, content)
        truth = await asked(quiet, content)
        assert answer.ids == again.ids == truth.ids
        assert again.usage.media[0].units_cached == FRAMES
        rejected = [value for name, value in pair.decoder.counted().items() if "kv_rejected" in name]
        assert not any(rejected)
    finally:
        await asyncio.to_thread(point.end)
