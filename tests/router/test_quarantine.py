"""Who is suspected when a worker is lost, who waits for whom, and who is convicted."""

from __future__ import annotations

import asyncio

import pytest

from chiasm.errors import InvalidRequest
from router.quarantine import Quarantine, name
from tests.waiting import until

ROOT = bytes(32)
POISON, *INNOCENTS = (name(ROOT, bytes([number])) for number in range(8))


class Place:
    """A worker, as far as a quarantine knows one."""


async def test_who_is_alone_on_two_workers_that_are_lost_is_convicted_for_a_while_and_then_forgotten() -> None:
    now = 0.0
    quarantine = Quarantine(seconds=10, clock=lambda: now)
    for convicts in (False, True):
        trial = quarantine.trial(POISON, Place(), "media[0]")
        await trial.begin()
        assert trial.lost() is convicts
    with pytest.raises(InvalidRequest) as caught:
        quarantine.check(POISON, "media[0]")
    assert (caught.value.reason, caught.value.item, caught.value.retryable) == ("POISON_INPUT", "media[0]", False)
    assert caught.value.facts == {"attempts": 2, "seconds": 10}
    assert quarantine.convictions == 1
    now = 10.0
    quarantine.check(POISON)
    assert not quarantine.suspected(POISON)


async def test_of_eight_that_were_lost_together_seven_are_let_go_and_one_is_convicted_after_two_trials() -> None:
    quarantine = Quarantine()
    tried = dict.fromkeys((POISON, *INNOCENTS), 0)
    place = Place()
    together = [quarantine.trial(subject, place) for subject in tried]
    for trial in together:
        await trial.begin()
        tried[trial.subject] += 1
    assert not any(trial.lost() for trial in together)
    assert quarantine.suspects == 8

    place = Place()  # the one worker that is left, and then its restarts
    running = 0

    async def again(subject: bytes) -> bool:
        nonlocal running
        while True:
            trial = quarantine.trial(subject, place)
            await trial.begin()
            running += 1
            assert running == 1, "a suspect is tried apart"
            tried[subject] += 1
            await asyncio.sleep(0.001)
            running -= 1
            if subject != POISON:
                trial.passed()
                return True
            if trial.lost():
                return False

    let_go = await asyncio.gather(*(again(subject) for subject in tried))
    assert let_go == [False, *[True] * 7]
    assert tried == {POISON: 2, **dict.fromkeys(INNOCENTS, 1 + 1)}
    assert quarantine.suspects == 0


async def test_nothing_begins_beside_a_suspect_and_a_suspect_waits_for_what_runs() -> None:
    quarantine, place, elsewhere = Quarantine(patience=60), Place(), Place()
    first = quarantine.trial(POISON, Place())
    await first.begin()
    first.lost()
    before, suspect, after = (quarantine.trial(one, place) for one in (INNOCENTS[0], POISON, INNOCENTS[1]))
    await before.begin()
    waiting = [asyncio.create_task(trial.begin()) for trial in (suspect, after)]
    await asyncio.wait_for(quarantine.trial(INNOCENTS[2], elsewhere).begin(), 5)
    assert not any(task.done() for task in waiting), "what comes after a suspect waits too, or its turn never comes"
    before.passed()
    await until(lambda: suspect.begun)
    assert suspect.apart and not waiting[1].done()
    suspect.passed()
    await asyncio.gather(*waiting)
    assert not quarantine.suspected(POISON)


async def test_one_suspect_is_tried_at_one_place_at_a_time() -> None:
    quarantine = Quarantine(patience=60)
    first = quarantine.trial(POISON, Place())
    await first.begin()
    first.lost()
    one, other = (quarantine.trial(POISON, Place(), "media[1]") for _ in range(2))
    await one.begin()
    waiting = asyncio.create_task(other.begin())
    await asyncio.sleep(0)
    assert not other.begun
    assert one.lost()
    with pytest.raises(InvalidRequest) as caught:
        await waiting
    assert caught.value.item == "media[1]"


async def test_who_is_not_alone_is_not_convicted_however_often_workers_are_lost() -> None:
    quarantine = Quarantine(patience=0.01)
    for _ in range(3):
        place = Place()
        beside, suspect = (quarantine.trial(one, place) for one in (INNOCENTS[0], POISON))
        await beside.begin()
        await suspect.begin()
        assert not suspect.lost() and not beside.lost()
    quarantine.check(POISON)


async def test_who_leaves_or_fails_stays_a_suspect_and_who_waits_in_vain_leaves_nothing_behind() -> None:
    quarantine, place = Quarantine(patience=60), Place()
    first = quarantine.trial(POISON, place)
    await first.begin()
    first.lost()
    second = quarantine.trial(POISON, place)
    await second.begin()
    waiting = asyncio.create_task(quarantine.trial(INNOCENTS[0], place).begin())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    second.end()
    assert quarantine.suspected(POISON)
    last = quarantine.trial(INNOCENTS[1], place)
    await asyncio.wait_for(last.begin(), 5)
    assert not last.lost() and quarantine.suspects == 2


async def test_who_loses_a_worker_after_it_got_through_is_hurt_and_no_suspect() -> None:
    quarantine = Quarantine()
    for _ in range(3):
        trial = quarantine.trial(POISON, Place())
        await trial.begin()
        trial.passed()
        assert not trial.lost() and not quarantine.suspected(POISON)


async def test_who_was_hurt_and_then_ends_a_worker_alone_is_convicted_and_beside_others_a_suspect() -> None:
    for beside, convicted in ((False, True), (True, False)):
        quarantine, place = Quarantine(), Place()
        hurt = quarantine.trial(POISON, Place())
        await hurt.begin()
        hurt.passed()
        hurt.lost()
        other = quarantine.trial(INNOCENTS[0], place)
        if beside:
            await other.begin()
        again = quarantine.trial(POISON, place)
        await again.begin()
        assert again.lost() is convicted
        assert quarantine.suspected(POISON) is not convicted


def test_what_is_remembered_is_bounded_and_of_one_tenant() -> None:
    assert name(ROOT, b"a", b"b") != name(ROOT, b"ab") != name(bytes([1]) * 32, b"ab")


async def test_the_oldest_suspects_are_forgotten_first() -> None:
    quarantine = Quarantine(most=2)
    for subject in INNOCENTS[:3]:
        trial = quarantine.trial(subject, Place())
        await trial.begin()
        trial.lost()
    assert [quarantine.suspected(one) for one in INNOCENTS[:3]] == [False, True, True]
