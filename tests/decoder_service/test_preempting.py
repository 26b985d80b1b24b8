"""Sequences that lose their room and get it again: not a token is lost, repeated or another one, whatever was kept of
them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
import torch

from chiasm.errors import Overloaded
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.seats import Seat
from decoder_service.sequence import DecodeSequence
from tests.decoder_service.caller import Caller
from tests.decoder_service.halves import CLOSE, SIDE, Halves, halves, sized
from tests.decoder_service.holders import hold
from tests.decoder_service.oracle import Clip, Oracle, Replay, grid_of
from tests.decoder_service.test_sharing import counted
from tests.fuzz.timelines import frames
from tests.waiting import until

UNITS = 3
"""Of a video. Where a unit is of several frames, the last lacks one."""


def clip_of(system: Halves) -> Clip:
    count = UNITS * system.span - (system.span > 1)
    return Clip(frames(0)[:count], [float(number) for number in range(count)], span=system.span)


def sizes_of(clip: Clip, slot: int = 0) -> dpb.DecodeSized:
    return sized(len(clip.frames), slot=slot, span=clip.span)


def tokens_of(judge: Oracle) -> int:
    """Visual tokens of a unit."""
    return judge.processor.unit_layout(grid_of(frames(0)[0])).vision_tokens


class Pushed(NamedTuple):
    """A decoder in which the last to come gives way whenever the first says so."""

    system: Halves
    first: Seat[DecodeSequence]

    async def push(self) -> bool:
        """Whether there was anybody."""
        tries = iter([False, True])
        return await self.system.decoder.stepping.make_way(self.first, lambda: next(tries))


@asynccontextmanager
async def pushed(judge: Oracle, **engine: Any) -> AsyncIterator[Pushed]:
    async with halves(judge, dtype=torch.float64, page_size=4, **engine) as system:
        first = await hold(system.decoder, text=1)
        yield Pushed(system, first)
        await system.decoder.release(first)


def ask(system: Halves, *parts: str | int, tokens: int = 16, number: int = 1, seed: int = 1) -> Caller:
    opened = system.opened(*parts, max_tokens=tokens)
    opened.sampling.ignore_eos = True
    opened.sampling.temperature = 1.0
    opened.sampling.logprobs = 2
    opened.sampling.n = number
    opened.seed = seed
    return Caller(system, opened, {part: clip_of(system) for part in parts if isinstance(part, int)})


async def show(caller: Caller, number: int, event: int) -> None:
    """Appends a frame to a live timeline, in the slot of its number."""
    append = dpb.DecodeAppend(event=event, slot=number)
    append.slots.add(slot=number, kind=pb.MEDIA_KIND_FRAME)
    caller.clips[number] = Clip([frames(1)[number % 3]], [float(number)], pb.MEDIA_KIND_FRAME)
    unit = pb.Unit(index=0, grid=pb.Grid(t=1, h=SIDE, w=SIDE))
    unit.frames.add(file_index=0, frame_offset=to_duration(float(number)))
    caller.send(append, dpb.DecodeSized(slot=number, revision=1, final=True, units=[unit]))
    await caller.hand_over(number, 0)


async def told_by(caller: Caller, tokens: int) -> None:
    await until(lambda: len(caller.told.ids) >= tokens)


async def say_all(caller: Caller, *, close: bool = True) -> None:
    for slot, clip in caller.clips.items():
        caller.send(sizes_of(clip, slot=slot))
        for unit in range(len(clip.units)):
            await caller.hand_over(slot, unit)
    if close:
        caller.send(CLOSE)


async def flush_nothing(system: Halves) -> None:
    """Units and pages are where they were."""


async def flush_pools(system: Halves) -> None:
    """Entries are in the store."""
    system.decoder.flush()


async def flush_all(system: Halves) -> None:
    """Nothing is anywhere that nobody holds or has pinned."""
    system.decoder.flush()
    await system.store.flush()


@pytest.mark.parametrize("flush", [flush_nothing, flush_pools, flush_all])
@pytest.mark.parametrize("told", [1, 2, 9])
async def test_an_answer_goes_on_where_it_was_however_much_is_left_of_it(
    judge: Oracle, flush: Callable[[Halves], Awaitable[None]], told: int
) -> None:
    async with pushed(judge) as (system, first):
        engine = counted(system)
        caller = ask(system, 0, "Read the digits.")
        await say_all(caller)
        running = asyncio.create_task(caller.run())
        await told_by(caller, told)
        await flush(system)
        await Pushed(system, first).push()
        await running
        assert system.decoder.scheduler.preempted == 1
    caller.check_whole(judge)
    assert len(caller.told.ids) == 16 and len(caller.attached) == 2 * UNITS, "its units are attached twice"
    assert engine.copied == (1 if flush is flush_nothing else 2) * UNITS * tokens_of(judge)
    asked = [(0, unit, "absent") for unit in range(UNITS)] if flush is flush_all else []
    assert sorted(caller.missing) == asked
    assert caller.told.finished is not None
    assert caller.told.finished.usage.cached_prompt_tokens == 0, "what it found again was its own"


async def test_a_sequence_that_is_pushed_again_and_again_comes_to_its_end(judge: Oracle) -> None:
    async with pushed(judge) as pushing:
        caller = ask(pushing.system, 0, "Read the digits.", tokens=12, number=2)
        await say_all(caller)
        running = asyncio.create_task(caller.run())
        for told in range(1, 12):
            await told_by(caller, told)
            await flush_all(pushing.system)
            await pushing.push()
        await running
        assert pushing.system.decoder.scheduler.preempted >= 5
    caller.check_whole(judge)


async def test_what_was_never_handed_over_is_not_asked_for_again(judge: Oracle) -> None:
    """It loses its room twice while its video is still being made."""
    async with pushed(judge) as pushing:
        caller = ask(pushing.system, 0, "Read the digits.")
        caller.send(sizes_of(clip_of(pushing.system)))
        running = asyncio.create_task(caller.run())
        for times in range(1, 3):
            await until(lambda: pushing.system.decoder.running == 2)
            await pushing.push()
            assert pushing.system.decoder.scheduler.preempted == times
        await until(lambda: pushing.system.decoder.running == 2)
        for unit in range(UNITS):
            await caller.hand_over(0, unit)
        caller.send(CLOSE)
        await running
    caller.check_whole(judge)
    assert not caller.missing


async def test_what_was_said_to_be_held_is_asked_for_when_it_is_lost(judge: Oracle) -> None:
    async with pushed(judge) as pushing:
        system = pushing.system
        before = ask(system, 0, "Read the digits.", tokens=2)
        await say_all(before)
        await before.run()
        caller, clip = ask(system, 0, "Read the digits."), clip_of(system)
        sizes = sizes_of(clip)
        for ready in await system.ready(clip.frames):
            sizes.units[ready.unit].key = ready.entry.key
            await system.store.release(ready.entry.key, ready.entry.lease.lease_id)
        caller.send(sizes, CLOSE)
        running = asyncio.create_task(caller.run())
        await told_by(caller, 3)
        assert caller.told.admitted is not None and len(caller.told.admitted.held) == UNITS
        system.decoder.flush()
        await pushing.push()
        await running
    caller.check_whole(judge)
    assert sorted(caller.missing) == [(0, unit, "stale") for unit in range(UNITS)]


async def test_answers_of_one_request_ask_once_for_what_all_of_them_have_lost(judge: Oracle) -> None:
    async with pushed(judge) as pushing:
        system = pushing.system
        caller = ask(system, 0, "Read the digits.", tokens=40, number=3)
        await say_all(caller)
        running = asyncio.create_task(caller.run())
        await until(lambda: all(len(caller.told.sequences[number]) > 2 for number in range(3)))
        await flush_all(system)
        await asyncio.gather(*(pushing.push() for _ in range(3)))
        await running
        assert system.decoder.scheduler.preempted == 3
    caller.check_whole(judge)
    assert sorted(caller.missing) == [(0, unit, "absent") for unit in range(UNITS)]


@pytest.mark.parametrize("leaves", [False, True])
async def test_who_waits_for_its_room_again_goes_on_or_leaves(judge: Oracle, leaves: bool) -> None:
    async with pushed(judge, max_running=2) as pushing:
        system = pushing.system
        caller = ask(system, 0, "Read the digits.")
        await say_all(caller)
        running = asyncio.create_task(caller.run())
        await told_by(caller, 3)
        other = asyncio.create_task(hold(system.decoder, text=1))
        await until(lambda: system.decoder.waiting == 1)
        await pushing.push()
        seat = await other
        await until(lambda: system.decoder.waiting == 1)
        told = len(caller.told.ids)
        if leaves:
            running.cancel()
            await asyncio.wait([running])
            assert system.decoder.waiting == 0 and system.store.stats().pinned_bytes == 0
        else:
            assert not running.done()
        await system.decoder.release(seat)
        if not leaves:
            await running
            caller.check_whole(judge)
            assert told < len(caller.told.ids)
    caller.check(judge)


async def test_a_live_timeline_goes_on_where_it_was(judge: Oracle) -> None:
    async with pushed(judge) as pushing:
        system = pushing.system
        caller = ask(system, "Say each digit you see.", tokens=200)
        caller.opened.sample = dpb.SAMPLE_MODE_WHILE_OPEN
        running = asyncio.create_task(caller.run())
        for number in range(4):
            told = len(caller.told.ids)
            await told_by(caller, told + 3)
            if number % 2:
                await flush_all(system)
            await pushing.push()
            await show(caller, number, 2 * number + 1)
            if number == 2 and not judge.overlaid:
                caller.send(dpb.DecodeDrop(event=2 * number + 2, first_visible=2))
        told = len(caller.told.ids)
        await until(lambda: len(caller.told.ids) > told + 2)
        await pushing.push()
        await until(lambda: len(caller.told.ids) > told + 6)
        caller.send(CLOSE)
        await running
        assert system.decoder.scheduler.preempted == 5
    assert caller.missing
    caller.check(judge)
    assert caller.told.finished is not None and caller.told.finished.reason == pb.FINISH_REASON_CLOSED


async def test_a_higher_priority_of_the_same_tenant_takes_the_place_and_gives_it_back(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64, max_running=1) as system:
        low, high = ask(system, 0, "Read the digits.", tokens=40), ask(system, "Q", tokens=10)
        high.opened.priority = 1
        await say_all(low)
        await say_all(high)
        running = asyncio.create_task(low.run())
        await until(lambda: len(low.told.ids) >= 3)
        await high.run()
        assert len(low.told.ids) < 40, "it has waited"
        await running
        assert system.decoder.scheduler.preempted == 1
    low.check_whole(judge)
    high.check_whole(judge)


async def test_a_tenant_of_many_requests_gets_no_more_than_one_of_few(judge: Oracle) -> None:
    """All of the many come first."""
    async with halves(judge, dtype=torch.float64, max_running=4) as system:
        held = [await hold(system.decoder, text=1) for _ in range(4)]
        many = [ask(system, f"Q{number}", tokens=20, seed=number) for number in range(24)]
        few = [ask(system, f"F{number}", tokens=20, seed=number) for number in range(6)]
        for caller in (*many, *few):
            caller.opened.fairness_key = "few" if caller in few else "many"
            await say_all(caller)
        runs = {caller: asyncio.create_task(caller.run()) for caller in many}
        await until(lambda: system.decoder.waiting == len(many))
        runs |= {caller: asyncio.create_task(caller.run()) for caller in few}
        await until(lambda: system.decoder.waiting == len(many) + len(few))
        for seat in held:
            await system.decoder.release(seat)
        await asyncio.wait([runs[caller] for caller in few])
        told = sum(len(caller.told.ids) for caller in many)
        await asyncio.gather(*runs.values())
    # What has begun is not taken back.
    assert 6 * 20 - 2 * 20 <= told <= 6 * 20 + 4 * 20
    for caller in (*many, *few):
        caller.check_whole(judge)


async def test_answers_to_one_prompt_share_its_pages_and_are_those_that_are_drawn_alone(judge: Oracle) -> None:
    long = "Read the digits. " * 16
    async with halves(judge, dtype=torch.float64, page_size=4) as system:
        caller = ask(system, 0, long, tokens=24, number=4)
        await say_all(caller)
        prompt = Replay(judge, caller.opened, caller.clips)
        prompt.lay_prompt()
        most = 0
        running = asyncio.create_task(caller.run())
        while not running.done():
            most = max(most, system.decoder.engine.holdings.held.pages)
            await asyncio.sleep(0)
        await running
        alone = ask(system, 0, long, tokens=24)
        await say_all(alone)
        await alone.run()
        pages = len(prompt.timeline) // 4
        assert pages < most <= pages + 4 * (24 // 4 + 2)
    caller.check_whole(judge)
    assert caller.told.ids == alone.told.ids
    assert len({tuple(ids) for ids in caller.told.sequences.values()}) == 4
    (used,) = [end.usage for end in caller.told.ends.values() if end.HasField("usage")]
    assert (used.cached_prompt_tokens, used.output_tokens) == (0, 96)


async def test_a_caller_that_is_done_speaking_hears_every_answer_to_its_end(judge: Oracle) -> None:
    """The end of its side comes when the first answer has ended, and stops nobody."""
    async with halves(judge, dtype=torch.float64, max_running=1) as system:
        caller = ask(system, "Q", tokens=6, number=3)
        await say_all(caller)
        caller.end_after = 6
        await caller.run()
    caller.check_whole(judge)


async def test_a_live_timeline_takes_room_from_one_that_came_later_and_both_come_to_their_end(judge: Oracle) -> None:
    """Who has given way wants its room back at once, and must not get it before it is taken."""
    async with halves(judge, dtype=torch.float64, page_size=4, visual_tokens=5 * tokens_of(judge)) as system:
        live = ask(system, "Say each digit you see.", tokens=400)
        live.opened.sample = dpb.SAMPLE_MODE_WHILE_OPEN
        running = asyncio.create_task(live.run())
        await told_by(live, 2)
        other = ask(system, 0, "Read the digits.", tokens=60)
        await say_all(other)
        beside = asyncio.create_task(other.run())
        await told_by(other, 2)
        for number in range(4):
            await show(live, number, number + 1)
            await told_by(live, len(live.told.ids) + 3)
        assert system.decoder.scheduler.preempted == 1 and not beside.done()
        live.send(CLOSE)
        await running
        await beside
        assert system.decoder.scheduler.preempted == 1
    live.check(judge)
    other.check_whole(judge)


async def test_a_live_timeline_that_outgrows_a_pool_is_refused_and_holds_up_nobody(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64, visual_tokens=3 * tokens_of(judge)) as system:
        live = ask(system, "Say each digit you see.", tokens=400)
        live.opened.sample = dpb.SAMPLE_MODE_WHILE_OPEN
        running = asyncio.create_task(live.run())
        for number in range(4):
            await show(live, number, number + 1)
        with pytest.raises(Overloaded) as caught:
            await running
        assert caught.value.reason == "KV_POOL_FULL"
        other = ask(system, 0, "Read the digits.", tokens=4)
        await say_all(other)
        await other.run()
    other.check_whole(judge)
