"""Callers that leave at every single place: no page, unit, pin, task or descriptor stays behind, and nobody notices."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import aclosing

import torch

from chiasm.rpc.v1 import decoder_pb2 as dpb
from tests.decoder_service.caller import Caller
from tests.decoder_service.halves import Halves, halves
from tests.decoder_service.oracle import Oracle
from tests.decoder_service.test_preempting import ask, pushed, say_all, show, told_by
from tests.fuzz.timelines import oracle_of
from tests.waiting import until


class Traces:
    """What there is beside the calls: taken before them, and looked for again behind each."""

    def __init__(self, system: Halves) -> None:
        self._system = system
        self._tasks = asyncio.all_tasks()
        self._files = _files()
        self._held = system.decoder.engine.holdings.held
        self._running = system.decoder.running

    async def assert_none(self) -> None:
        decoder = self._system.decoder
        assert decoder.engine.holdings.held == self._held and decoder.engine.holdings.promised.visual == 0
        assert (decoder.running, decoder.waiting, decoder.scheduler.asking) == (self._running, 0, 0)
        assert self._system.store.stats().pinned_bytes == 0
        assert not decoder._readers.keys() - {seat.sequence for seat in decoder.scheduler._rooms.running}
        # The loop over steps ends by itself once there is nothing to do.
        await until(lambda: asyncio.all_tasks() <= self._tasks)
        assert _files() == self._files


def _files() -> list[str]:
    return sorted(os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if _open(one))


def _open(one: str) -> bool:
    """Not the one through which the folder itself is read."""
    return os.path.islink(f"/proc/self/fd/{one}")


async def everywhere(system: Halves, made: Callable[[], Caller], say: Callable[[Caller], object]) -> int:
    """Leaves a call behind each of its responses in turn. Returns how many there are."""
    whole = made()
    await say(whole)  # type: ignore[misc]
    await whole.run()
    system.decoder.flush()
    traces = Traces(system)
    for after in range(1, whole.responses + 1):
        caller = made()
        await say(caller)  # type: ignore[misc]
        await caller.run(leave_after=after)
        await traces.assert_none()
        caller.check(oracle_of(system))
        if after % 3 == 0:
            system.decoder.flush()
            await system.store.flush()
    return whole.responses


async def test_a_question_about_a_video_leaves_nothing_wherever_it_is_left(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64, max_units=1) as system:
        assert await everywhere(system, lambda: ask(system, 0, "Read the digits.", tokens=8), say_all) >= 12


async def test_several_answers_leave_nothing_wherever_they_are_left(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64, page_size=4) as system:
        assert await everywhere(system, lambda: ask(system, 0, "Q", tokens=6, number=3), say_all) >= 20


async def test_a_live_timeline_leaves_nothing_wherever_it_is_left(judge: Oracle) -> None:
    def made() -> Caller:
        caller = ask(system, "Say each digit you see.", tokens=12)
        caller.opened.sample = dpb.SAMPLE_MODE_WHILE_OPEN
        return caller

    async def show_all(caller: Caller) -> None:
        for number in range(3):
            await show(caller, number, number + 1)

    async with halves(judge, dtype=torch.float64) as system:
        assert await everywhere(system, made, show_all) >= 15


async def test_who_has_lost_its_room_leaves_nothing_wherever_it_is_left(judge: Oracle) -> None:
    """It is pushed out at each token in turn and leaves at once, whether it waits or has room again by then."""
    async with pushed(judge, max_running=2) as pushing:
        system = pushing.system
        traces = Traces(system)
        for told in range(1, 8):
            for number in (1, 2):
                caller = ask(system, 0, "Read the digits.", tokens=12, number=number)
                await say_all(caller)
                running = asyncio.create_task(caller.run())
                await told_by(caller, told)
                await pushing.push()
                for _ in range(told - 1):
                    await asyncio.sleep(0)
                running.cancel()
                await asyncio.wait([running])
                await traces.assert_none()
                caller.check(judge)


async def test_who_waits_to_be_admitted_leaves_nothing(judge: Oracle) -> None:
    async with pushed(judge, max_running=1) as pushing:
        traces = Traces(pushing.system)
        for _ in range(3):
            caller = ask(pushing.system, 0, "Read the digits.")
            await say_all(caller)
            running = asyncio.create_task(caller.run())
            await until(lambda: pushing.system.decoder.waiting == 1)
            running.cancel()
            await asyncio.wait([running])
            await traces.assert_none()
            assert not caller.responses


async def test_neighbours_of_those_who_leave_notice_nothing(judge: Oracle) -> None:
    """One stays while others come and go beside it, with its video and with others."""
    async with halves(judge, dtype=torch.float64, page_size=4, text_tokens=160, visual_tokens=40) as system:
        stays = ask(system, 0, "Read the digits.", tokens=60)
        await say_all(stays)
        running = asyncio.create_task(stays.run())
        left = 0
        while not running.done():
            caller = ask(system, 0, "Q" * (left % 5), "Read", tokens=30, number=left % 2 + 1, seed=left)
            await say_all(caller)
            async with aclosing(caller.stream()) as responses:
                async for response in responses:
                    await caller.note(response)
                    if running.done() or caller.responses > left % 9:
                        break
            await caller.take_back()
            left += 1
        await running
        assert left > 5
    stays.check_whole(judge)
