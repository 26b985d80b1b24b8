"""Turns that are lent while their owners wait: never more than there are, none lost, nobody forgotten."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.media.places import Place, Places

TURNS, LONG = 2, 5


@settings(max_examples=100, deadline=None)
@given(jobs=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=16), seed=st.integers(0, 2**16))
def test_whoever_comes_waits_or_leaves_all_turns_are_there_in_the_end(jobs: list[tuple[int, bool]], seed: int) -> None:
    """Each job has so many frames, a short one none, and stays or leaves at some turn of the loop."""
    asyncio.run(_jobs(jobs, random.Random(seed)))


async def _jobs(jobs: list[tuple[int, bool]], rng: random.Random) -> None:
    places = Places(TURNS, LONG)
    working: set[Place] = set()
    alive: set[Place] = set()

    async def steps(most: int) -> None:
        for _ in range(rng.randrange(most + 1)):
            await asyncio.sleep(0)

    async def work(place: Place) -> None:
        working.add(place)
        try:
            assert len(working) <= TURNS
            await steps(3)
        finally:
            working.discard(place)

    async def job(frames: int) -> None:
        place = Place(places, long=frames > 0)
        try:
            await place.take()
            if frames:
                alive.add(place)
            for _ in range(frames):
                await work(place)
                place.stand_by()
                assert len(alive) <= LONG
                await steps(6)
                await place.go_on()
            await work(place)
        finally:
            place.end()
            alive.discard(place)

    tasks = []
    for frames, stays in jobs:
        task = asyncio.create_task(job(frames))
        tasks.append(task)
        await steps(4)
        if not stays:
            task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    for task, (_, stays) in zip(tasks, jobs, strict=True):
        assert not stays or task.exception() is None
    assert (places._turns._value, places._rooms._value) == (TURNS, LONG)
    assert not places._waiting and not places._lenders


async def test_a_turn_goes_to_who_waited_longest_and_comes_back() -> None:
    places = Places(1, 2)
    first, second, third = (Place(places, long=True) for _ in range(3))
    short = Place(places, long=False)
    await first.take()
    waiting = [asyncio.create_task(place.take()) for place in (second, third, short)]
    await asyncio.sleep(0)
    first.stand_by()
    await waiting[0]
    second.stand_by()
    await waiting[2]
    back = asyncio.create_task(first.go_on())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting[1].done() and not back.done(), "two long ones are there, and the short one works"
    short.end()
    await back
    second.end()
    first.end()
    await waiting[1]
    third.end()
    assert (places._turns._value, places._rooms._value) == (1, 2)
