"""Calls that wait, run and are refused."""

from __future__ import annotations

import asyncio

import pytest

from chiasm.errors import DeadlineExceeded, Overloaded
from chiasm.rpc.turns import Turns


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_waits_then_runs_then_is_gone() -> None:
    now = 10.0
    turns = Turns(max_waiting=2, clock=lambda: now)
    with turns.enter() as turn:
        now = 13.0
        assert (turns.waiting, turns.running, turns.oldest_wait) == (1, 0, 3.0)
        await turn.begin()
        assert (turns.waiting, turns.running, turns.oldest_wait) == (0, 1, 0.0)
        turn.finish()
        assert (turns.waiting, turns.running) == (0, 0)
    assert (turns.waiting, turns.running) == (0, 0)


async def test_one_too_many_is_refused_and_told_when_to_come_again() -> None:
    turns = Turns(max_waiting=2)
    with turns.enter() as first, turns.enter():
        with pytest.raises(Overloaded) as caught, turns.enter():
            raise AssertionError("it was let in")
        assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", 1.0)
        assert caught.value.facts == {"waiting": 2, "limit": 2}
        await first.begin()
        with turns.enter():
            assert turns.waiting == 2, "one that runs no longer waits"


async def test_no_more_run_than_may_and_the_first_to_come_is_the_first_to_run() -> None:
    turns = Turns(max_waiting=8, max_running=1)
    order: list[int] = []
    release = [asyncio.Event() for _ in range(3)]

    async def call(number: int) -> None:
        with turns.enter() as turn:
            await turn.begin()
            order.append(number)
            await release[number].wait()

    calls = [asyncio.create_task(call(number)) for number in range(3)]
    await settle()
    assert (order, turns.running, turns.waiting) == ([0], 1, 2)
    calls[1].cancel()  # one that waits leaves; its place in the queue goes with it
    release[0].set()
    await settle()
    assert (order, turns.running, turns.waiting) == ([0, 2], 1, 0)
    release[2].set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (turns.running, turns.waiting) == (0, 0)


async def test_a_call_that_is_done_and_waits_for_its_caller_keeps_nobody_else_waiting() -> None:
    turns = Turns(max_waiting=8, max_running=1)
    with turns.enter() as first, turns.enter() as second:
        await first.begin()
        first.finish()
        async with asyncio.timeout(10):
            await second.begin()
        assert turns.running == 1


async def test_a_call_that_fails_gives_its_turn_back() -> None:
    turns = Turns(max_waiting=1, max_running=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), turns.enter() as turn:
            await turn.begin()
            raise ZeroDivisionError
    assert (turns.running, turns.waiting) == (0, 0)


async def test_a_call_that_waits_for_its_caller_leaves_its_place_to_others() -> None:
    turns = Turns(max_waiting=8, max_running=1)
    came, order = asyncio.Event(), []

    async def slow() -> None:
        with turns.enter() as turn:
            await turn.begin()
            async with turn.aside():
                await came.wait()
            order.append("slow")
            turn.finish()

    async def quick() -> None:
        with turns.enter() as turn:
            await turn.begin()
            order.append("quick")
            assert (turns.running, turns.waiting) == (1, 1)

    waiting = asyncio.create_task(slow())
    await settle()
    assert (turns.running, turns.waiting) == (0, 1)
    await quick()
    came.set()
    await waiting
    assert (order, turns.running, turns.waiting) == (["quick", "slow"], 0, 0)


async def test_a_call_that_leaves_while_it_stood_aside_leaves_nothing() -> None:
    turns = Turns(max_waiting=8, max_running=1)
    with pytest.raises(KeyError), turns.enter() as turn:
        await turn.begin()
        async with turn.aside():
            raise KeyError
    assert (turns.running, turns.waiting) == (0, 0)
    with turns.enter() as turn:
        async with turn.aside():
            assert (turns.running, turns.waiting) == (0, 1), "one that has not begun waits as it did"
        assert turns.running == 0


async def test_calls_that_wait_for_too_much_keep_others_out_and_one_that_runs_does_not() -> None:
    turns = Turns(max_waiting=8, max_cost=100)
    with turns.enter() as large:
        large.weigh(1000)
        with pytest.raises(Overloaded) as caught, turns.enter():
            raise AssertionError("it was let in")
        assert caught.value.reason == "QUEUE_FULL" and caught.value.facts == {"waiting": 1000, "limit": 100}
        await large.begin()
        with turns.enter() as small:
            small.weigh(99)
            assert (turns.waiting_cost, turns.cost) == (99, 1099)
            with turns.enter():
                assert turns.waiting == 2
    assert (turns.waiting_cost, turns.cost) == (0, 0)


async def test_the_tenant_that_has_had_less_goes_first_however_many_calls_another_has() -> None:
    turns = Turns(max_waiting=64, max_running=1)
    order: list[bytes] = []

    async def call(tenant: bytes, cost: int) -> None:
        with turns.enter() as turn:
            turn.weigh(cost, tenant)
            await turn.begin()
            order.append(tenant)
            await asyncio.sleep(0)

    loud = [asyncio.create_task(call(b"loud", 10)) for _ in range(20)]
    await asyncio.sleep(0)
    quiet = [asyncio.create_task(call(b"quiet", 10)) for _ in range(3)]
    await asyncio.gather(*loud, *quiet)
    assert max(at for at, tenant in enumerate(order) if tenant == b"quiet") <= 8
    assert (turns.running, turns.waiting, turns.cost) == (0, 0, 0)


async def test_a_call_whose_caller_has_left_is_told_so_when_its_turn_comes_and_takes_no_place() -> None:
    now = 0.0
    turns = Turns(max_waiting=8, max_running=1, clock=lambda: now)
    begun: list[str] = []

    async def call(name: str, seconds: float) -> None:
        with turns.enter(seconds) as turn:
            await turn.begin()
            begun.append(name)

    with turns.enter() as first:
        await first.begin()
        late = asyncio.create_task(call("late", 1.0))
        patient = asyncio.create_task(call("patient", 9.0))
        await settle()
        now = 2.0
        first.finish()
        await patient
        with pytest.raises(DeadlineExceeded) as caught:
            await late
    assert caught.value.stage == "queue" and begun == ["patient"]
    assert (turns.running, turns.waiting) == (0, 0)


async def test_a_call_that_leaves_at_the_moment_its_turn_comes_gives_it_to_the_next() -> None:
    turns = Turns(max_waiting=8, max_running=1)
    begun: list[int] = []

    async def call(number: int) -> None:
        with turns.enter() as turn:
            await turn.begin()
            begun.append(number)

    with turns.enter() as first:
        await first.begin()
        calls = [asyncio.create_task(call(number)) for number in range(2)]
        await settle()
        first.finish()
        calls[0].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert begun == [1] and (turns.running, turns.waiting) == (0, 0)
