"""The loop around the scheduler: steps one after the other, owners woken, units settled, and an end for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from chiasm.errors import ServerError, Unavailable
from decoder_service.room import Room
from decoder_service.scheduler import Scheduler
from decoder_service.seats import Plan, Seat
from decoder_service.stepping import Result, Stepping
from tests.decoder_service.test_scheduler import Pages


class Device:
    """Computes steps by writing them down. A token is the number of its step."""

    def __init__(self, pages: int = 100) -> None:
        self.steps: list[list[str]] = []
        self.gate = asyncio.Event()  # while it is not set, a step that has begun does not end
        self.gate.set()
        self.breaks: Exception | None = None
        self.pages = Pages(pages)
        self.scheduler: Scheduler[str] = Scheduler(self.pages, max_rows=8, max_units=2)
        self.stepping: Stepping[str] = Stepping(self.scheduler, self.compute)

    async def compute(self, plan: Plan[str]) -> Result[str]:
        self.steps.append([seat.sequence for seat in plan.singles])
        await self.gate.wait()
        if self.breaks is not None:
            raise self.breaks
        units: list[Exception | None] = []
        for unit in plan.units:
            try:
                unit.work()
            except Exception as error:
                units.append(error)
            else:
                units.append(None)
        self.pages.computed.update(seat.sequence for seat in plan.singles)
        return Result(units, [len(self.steps) for _ in plan.singles], failed=False, ended=())

    def seat(self, name: str, *, woken: Callable[[], None] = lambda: None, rows: int = 1) -> Seat[str]:
        seat = self.scheduler.seat(name, wake=woken)
        self.scheduler.enter(seat, Room(-(-rows // 4), 0))
        return seat

    def draw(self, seat: Seat[str], tokens: int) -> None:
        self.scheduler.want(seat, 1, draws=True, allowed=tokens)
        self.stepping.poke()

    async def idle(self) -> None:
        while self.stepping.running:  # noqa: ASYNC110 - turns of the event loop, one by one
            await asyncio.sleep(0)


async def test_steps_follow_each_other_until_nobody_wants_any_and_begin_again_when_somebody_does() -> None:
    device = Device()
    woken = asyncio.Event()
    seat = device.seat("s", woken=woken.set)
    device.draw(seat, 3)
    await device.idle()
    assert seat.fresh == [1, 2, 3] and woken.is_set()
    device.draw(seat, 2)
    await device.idle()
    assert seat.fresh == [1, 2, 3, 4, 5] and device.steps == [["s"]] * 5


async def test_who_comes_while_a_step_runs_is_in_the_next_one() -> None:
    device = Device()
    device.gate.clear()
    first, later = device.seat("first"), device.seat("later")
    device.draw(first, 3)
    await asyncio.sleep(0)
    device.draw(later, 2)
    device.gate.set()
    await device.idle()
    assert device.steps == [["first"], ["first", "later"], ["first", "later"]]


def test_they_do_so_on_the_event_loop_of_the_services() -> None:
    uvloop.run(test_who_comes_while_a_step_runs_is_in_the_next_one())


async def test_apart_a_sequence_is_in_no_step_and_keeps_the_token_of_the_one_it_was_in() -> None:
    device = Device()
    device.gate.clear()
    stays, changes = device.seat("stays"), device.seat("changes")
    device.draw(stays, 4)
    device.draw(changes, 4)
    await asyncio.sleep(0)
    entered = asyncio.Event()

    async def change() -> None:
        async with device.stepping.apart(changes):
            entered.set()
            assert changes.fresh == [1]
            await asyncio.sleep(0.01)
            device.draw(changes, 1)

    changing = asyncio.create_task(change())
    await asyncio.sleep(0.01)
    assert not entered.is_set(), "the step it is in has not ended"
    device.gate.set()
    await changing
    await device.idle()
    assert device.steps[:2] == [["stays", "changes"], ["stays"]] and len(stays.fresh) == 4 and len(changes.fresh) == 2


async def test_units_are_settled_when_all_were_attached_or_one_was_not() -> None:
    device = Device()
    seat = device.seat("s")
    attached: list[int] = []
    works = [lambda i=i: attached.append(i) for i in range(5)]
    assert await device.stepping.attach(seat, works)
    assert attached == [0, 1, 2, 3, 4] and len(device.steps) == 3, "two a step"

    def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await device.stepping.attach(seat, [fails, works[0]])
    device.gate.clear()
    other = device.seat("other")
    attaching = asyncio.create_task(device.stepping.attach(seat, works))
    await asyncio.sleep(0)
    device.scheduler.leave(seat)
    device.gate.set()
    assert not await attaching, "it has left before the last ones"
    assert await device.stepping.attach(other, []) and not await device.stepping.attach(seat, [fails])


async def test_somebody_behind_gives_way_when_asked_and_nobody_in_front() -> None:
    device = Device()
    first, last = device.seat("first"), device.seat("last")

    def alone(seat: Seat[str]) -> bool:
        return device.scheduler.running == 1 and seat.admitted

    assert not await device.stepping.make_way(last, lambda: alone(last))
    assert await device.stepping.make_way(first, lambda: alone(first))
    assert last.preempted and not last.admitted and first.admitted


async def test_closing_waits_for_the_step_that_runs_and_ends_everybody() -> None:
    device = Device(pages=2)
    device.gate.clear()
    runs, waits = device.seat("runs", rows=8), device.seat("waits", rows=8)
    device.draw(runs, 9)
    await asyncio.sleep(0)
    closing = asyncio.create_task(device.stepping.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    device.gate.set()
    await closing
    for seat in (runs, waits):
        assert isinstance(seat.error, Unavailable) and seat.error.reason == "DRAINING"
    assert len(device.steps) == 1
    with pytest.raises(Unavailable):
        device.stepping.poke()


async def test_a_step_whose_outcome_is_wrong_leaves_no_unit_waiting() -> None:
    device = Device()
    seat = device.seat("s")

    async def wrong(plan: Plan[str]) -> Result[str]:
        return Result([None for _ in plan.units], [1, 2, 3], failed=False, ended=())

    device.stepping = Stepping(device.scheduler, wrong)
    with pytest.raises(ServerError):
        await device.stepping.attach(seat, [lambda: None])


async def test_a_step_that_breaks_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    device.breaks = RuntimeError("a bug")
    woken = asyncio.Event()
    seat = device.seat("s", woken=woken.set)
    device.draw(seat, 2)
    unit = asyncio.create_task(device.stepping.attach(seat, [lambda: None]))
    await device.idle()
    assert isinstance(seat.error, ServerError) and "a bug" not in seat.error.message
    assert woken.is_set()
    with pytest.raises(ServerError):
        await unit
    assert "a step broke" in caplog.text
    device.breaks = None
    other = device.seat("other")
    device.draw(other, 1)
    await device.idle()
    assert len(other.fresh) == 1, "those who come after it are computed"
