"""The loop that packs steps: who runs with whom, who goes first, and whose fault a failure is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import uvloop

from chiasm.errors import Unavailable
from decoder_service.scheduler import Outcome, Scheduler, Share

Step = list[tuple[str, int]]


class Device:
    """Computes steps by writing them down. A token is the number of its step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.computed: Counter[str] = Counter()
        self.gate = asyncio.Event()  # while it is not set, a step that has begun does not end
        self.gate.set()
        self.fails: Callable[[Step], Exception | None] = lambda step: None
        self.spoils: dict[str, Exception] = {}

    async def __call__(self, shares: Sequence[Share[str, bool]]) -> list[Outcome]:
        step = [(share.sequence, share.rows) for share in shares]
        self.steps.append(step)
        number = len(self.steps)
        await self.gate.wait()
        if (error := self.fails(step)) is not None:
            raise error
        self.computed.update(dict(step))
        return [self.spoils.get(share.sequence, number if share.draw else None) for share in shares]

    async def begun(self) -> None:
        while not self.steps:  # noqa: ASYNC110 - turns of the event loop, one by one
            await asyncio.sleep(0)


async def answer(
    scheduler: Scheduler[str, bool], device: Device, name: str, *, prompt: int = 1, tokens: int = 1
) -> list[int]:
    """Computes a prompt of so many rows and draws so many tokens after it."""
    drawn: list[int] = []
    try:
        while len(drawn) < tokens or (not tokens and device.computed[name] < prompt):
            rows = prompt + len(drawn) - device.computed[name]
            token = await scheduler.step(name, rows, True if tokens else None)
            if token is not None:
                drawn.append(token)
    finally:
        scheduler.leave(name)
    return drawn


async def test_sequences_that_ask_together_share_every_step() -> None:
    device = Device()
    scheduler = Scheduler(device, max_rows=16)
    names = [f"s{i}" for i in range(8)]
    await asyncio.gather(*(answer(scheduler, device, name, tokens=5) for name in names))
    assert device.steps == [[(name, 1) for name in names]] * 5
    assert (scheduler.counts.steps, scheduler.counts.rows, scheduler.counts.batches) == (5, 40, [8] * 5)


async def test_sequences_that_join_later_run_with_those_that_run_already() -> None:
    """Without a turn for those who come straight back there would be two groups that take turns for ever."""
    device = Device()
    scheduler = Scheduler(device, max_rows=16)
    device.gate.clear()
    first = asyncio.create_task(answer(scheduler, device, "first", tokens=6))
    await device.begun()
    later = [asyncio.create_task(answer(scheduler, device, f"later{i}", tokens=4)) for i in range(3)]
    await asyncio.sleep(0)
    device.gate.set()
    await asyncio.gather(first, *later)
    assert [len(step) for step in device.steps] == [1, 4, 4, 4, 4, 1]


def test_they_do_so_on_the_event_loop_of_the_services() -> None:
    """Which is another one than that of these tests, and must keep the same order of turns."""
    uvloop.run(test_sequences_that_join_later_run_with_those_that_run_already())


async def test_single_rows_go_first_and_prefills_fill_the_rest_in_order_of_arrival() -> None:
    device = Device()
    scheduler = Scheduler(device, max_rows=8)
    prompts = {"long": 12, "short": 3, "running": 1}
    await asyncio.gather(*(answer(scheduler, device, name, prompt=rows) for name, rows in prompts.items()))
    assert device.steps == [[("running", 1), ("long", 7)], [("long", 5), ("short", 3)]]


async def test_a_long_prefill_starves_no_running_answer_and_keeps_its_place() -> None:
    device = Device()
    scheduler = Scheduler(device, max_rows=8)
    _, _, drawn = await asyncio.gather(
        answer(scheduler, device, "old", prompt=21, tokens=0),
        answer(scheduler, device, "new", prompt=14, tokens=0),
        answer(scheduler, device, "running", tokens=5),
    )
    assert drawn == [1, 2, 3, 4, 5]
    assert device.steps == [[("running", 1), (name, 7)] for name in ("old", "old", "old", "new", "new")]


async def test_more_answers_than_a_step_holds_take_turns() -> None:
    device = Device()
    scheduler = Scheduler(device, max_rows=2)
    names = ["a", "b", "c", "d", "e"]
    await asyncio.gather(*(answer(scheduler, device, name, tokens=4) for name in names))
    ran = [name for step in device.steps for name, _ in step]
    assert len(device.steps) == 10 and ran == names * 4


async def test_a_token_is_drawn_only_from_the_last_of_the_rows_asked_for() -> None:
    device = Device()
    scheduler = Scheduler(device, max_rows=8)
    assert await scheduler.step("long", 12, True) is None
    assert await scheduler.step("long", 4, True) == 2


async def test_a_step_that_fails_as_a_whole_is_tried_sequence_by_sequence() -> None:
    device = Device()
    device.fails = lambda step: ValueError("broken") if ("bad", 1) in step else None
    scheduler = Scheduler(device, max_rows=8)
    good, bad, other = await asyncio.gather(
        *(scheduler.step(name, 1, True) for name in ("good", "bad", "other")), return_exceptions=True
    )
    assert isinstance(bad, ValueError)
    assert isinstance(good, int) and isinstance(other, int)
    assert device.steps[1:] == [[("good", 1)], [("bad", 1)], [("other", 1)]]
    assert scheduler.counts.rows == 2


async def test_a_failure_of_one_row_is_that_row_s_own() -> None:
    device = Device()
    device.spoils["bad"] = ValueError("not a number")
    scheduler = Scheduler(device, max_rows=8)
    good, bad = await asyncio.gather(
        scheduler.step("good", 1, True), scheduler.step("bad", 1, True), return_exceptions=True
    )
    assert good == 1 and isinstance(bad, ValueError) and len(device.steps) == 1


async def test_who_has_left_is_in_no_later_step() -> None:
    device = Device()
    scheduler = Scheduler(device, max_rows=8)
    device.gate.clear()
    stays = asyncio.create_task(answer(scheduler, device, "stays", tokens=3))
    leaves = asyncio.create_task(answer(scheduler, device, "leaves", tokens=3))
    await device.begun()
    leaves.cancel()
    device.gate.set()
    assert await stays == [1, 2, 3]
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert [[name for name, _ in step] for step in device.steps] == [["stays", "leaves"], ["stays"], ["stays"]]


async def test_who_leaves_during_a_step_that_fails_is_not_tried_again() -> None:
    device = Device()
    device.fails = lambda step: ValueError("broken") if len(step) > 1 else None
    scheduler = Scheduler(device, max_rows=8)
    device.gate.clear()
    stays = asyncio.create_task(answer(scheduler, device, "stays"))
    leaves = asyncio.create_task(answer(scheduler, device, "leaves"))
    await device.begun()
    leaves.cancel()
    device.gate.set()
    assert await stays == [2]
    assert device.steps == [[("stays", 1), ("leaves", 1)], [("stays", 1)]]


async def test_closing_waits_for_the_step_that_runs_and_refuses_every_other() -> None:
    device = Device()
    scheduler = Scheduler(device, max_rows=1)
    device.gate.clear()
    waiting = [asyncio.create_task(scheduler.step(name, 1, True)) for name in ("runs", "waits")]
    await device.begun()
    closing = asyncio.create_task(scheduler.close())
    await asyncio.sleep(0)
    device.gate.set()
    await closing
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, Unavailable) and end.reason == "DRAINING" for end in ended)
    assert len(device.steps) == 1
    with pytest.raises(Unavailable):
        await scheduler.step("late", 1, True)
