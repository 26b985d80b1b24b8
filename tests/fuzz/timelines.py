"""Requests of every kind at one small decoder, in every order: whatever it does with them, the tokens are those of one
undivided pass.

What varies is all that must not matter: how large a step is, how many run, how little the pools hold, which messages
come when and between which steps, who asks beside whom, what is found and what was flushed, who leaves.

The test suite runs a short slice of this; `python -m tests.fuzz.timelines --minutes 30` runs a long one and prints a
line a minute. What fails is made as small as it can be, and printed so that it can be run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from chiasm.errors import Overloaded
from chiasm.models.registry import SHIPPED, find
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import UnitLayout
from tests import checkpoints_qwen3_vl, checkpoints_tiny, digits
from tests.decoder_service.caller import Caller
from tests.decoder_service.halves import CLOSE, Halves, halves
from tests.decoder_service.oracle import Clip, Oracle, grid_of

TEXTS = ["Read the digits.", "Read the digits. Which one?", "Say each digit you see.", "Q", "x" * 40]
MODELS = ["random", "random", "digits", "qwen3_vl", "qwen3_vl"]
"""From which that of an example is drawn (`oracle`)."""

CLIPS = 3
FRAMES = 3
"""Units of a clip at most, where one is one frame."""

LARGEST = 2
"""Frames of a unit, in any family."""

FEW = 4
"""Responses behind which a stream may break that has told no token yet."""

STILL = 10.0
"""Seconds without a step after which an example that does not end is stuck."""

counts: Counter[str] = Counter()
"""What the examples came to."""
answers: set[tuple[int, ...]] = set()
"""That were told, of eight tokens or more."""


@cache
def oracle(name: str) -> Oracle:
    """`digits`, which is sure of what it says; `random` of its family, whose every token hangs on all that it sees; and
    `qwen3_vl`, which is random too, and whose units lie over their placeholders."""
    if name == "digits":
        return Oracle(find("digits"))
    folder = Path(tempfile.mkdtemp(prefix="chiasm-timelines-")) / name
    if name == "qwen3_vl":
        return Oracle(checkpoints_qwen3_vl.write(folder, seed=3))
    shipped = SHIPPED / "digits"
    checkpoints_tiny.write(folder, json.loads((shipped / "config.json").read_text(encoding="utf-8")), seed=3)
    (folder / "tokenizer.json").write_bytes((shipped / "tokenizer.json").read_bytes())
    return Oracle(folder)


@cache
def frames(clip: int) -> list[digits.Rgb]:
    """Pictures of a clip. Those of the last are twice as wide as high."""
    rng = np.random.default_rng(clip)
    cells = digits.held_out_digits()
    made = [digits.frame(cells[clip * 31 + number][0], rng) for number in range((FRAMES + 2) * LARGEST)]
    wide = clip == CLIPS - 1
    return [np.concatenate([one, made[number - 1]], axis=1) for number, one in enumerate(made)] if wide else made


# -- what is asked -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Medium:
    """A medium of the prompt.

    Attributes:
        clip, count: its first `count` units.
        image: it is a picture; `count` is 1.
        odd: the last unit lacks a frame, where it would have several.
        extra: units that it was said to have beyond those, at first; then none lacks a frame.
        moved: the others are shown at other times then.
    """

    clip: int
    count: int
    image: bool = False
    odd: bool = False
    extra: int = 0
    moved: bool = False

    @property
    def kind(self) -> pb.MediaKind.ValueType:
        return pb.MEDIA_KIND_IMAGE if self.image else pb.MEDIA_KIND_VIDEO

    def offsets(self, span: int, *, first: bool = False) -> list[float]:
        """Of each frame."""
        step = 2.0 if self.moved and not first else 1.0
        return [number * step for number in range(self._frames(span, first=first))]

    def shown(self, span: int, *, first: bool = False) -> Clip:
        """What it becomes, or what it was said to become at first."""
        offsets = self.offsets(span, first=first)
        return Clip(frames(self.clip)[: len(offsets)], offsets, self.kind, 1 if self.image else span)

    def _frames(self, span: int, *, first: bool) -> int:
        if self.image:
            return 1
        return (self.count + self.extra) * span if first else self.count * span - (self.odd and span > 1)


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        events: of a live one: texts, clips of which a frame is shown, and drops (None); None for one that is closed.
        known: keys are told with the sizes, and what is held then is not handed over.
        order: where in it each message comes; what it stands on comes first nevertheless.
        leaves: after so many of its messages; None stays.
        breaks: its stream, behind so many responses, and if those are more than `FEW` not before there is a token; what
            it has by then is gone on with in another call. None for one that does not break.
    """

    text: str
    media: tuple[Medium, ...]
    video_first: bool
    events: tuple[str | int | None, ...] | None
    sampling: dict[str, Any]
    seed: int
    priority: int
    tenant: str
    known: bool
    order: tuple[int, ...]
    leaves: int | None
    breaks: int | None


@dataclass(frozen=True)
class Scene:
    """An example.

    Attributes:
        text, visual: tokens that the pools hold beyond the largest request.
        turns: whose next message comes, and so many steps before it.
        forgets: the store and the pools forget what nobody holds whenever a sequence has lost its room.
    """

    model: str
    engine: dict[str, Any]
    text: int
    visual: int
    asked: tuple[Asked, ...]
    turns: tuple[tuple[int, int], ...]
    forgets: bool


@st.composite
def medium(draw: st.DrawFn, *, live: bool) -> Medium:
    if draw(st.integers(0, 3)) == 0:
        return Medium(draw(st.integers(0, CLIPS - 1)), 1, image=True)
    return Medium(
        draw(st.integers(0, CLIPS - 1)),
        draw(st.integers(1, FRAMES)),
        odd=draw(st.booleans()),
        extra=0 if live else draw(st.sampled_from([0, 0, 0, 1, 2])),
        moved=not live and draw(st.booleans()),
    )


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    live = draw(st.integers(0, 4)) == 0
    media = tuple(draw(medium(live=live)) for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))))
    events = None
    if live:
        events = tuple(draw(st.lists(st.sampled_from([0, 1, 2, "And?", None]), min_size=1, max_size=5)))
    sampling: dict[str, Any] = {
        "max_tokens": draw(st.sampled_from([40, 32, 24, 10, 3, 1])),
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0])),
        "ignore_eos": draw(st.sampled_from([True, True, False])),
    }
    if draw(st.integers(0, 3)):
        sampling["logprobs"] = 2
    if draw(st.integers(0, 3)) == 0:
        sampling["frequency_penalty"] = 0.5
    if not live:
        sampling["n"] = draw(st.sampled_from([1, 1, 2, 3]))
    leaves = draw(st.sampled_from([None, None, None, None, 2, 5]))
    return Asked(
        text=draw(st.sampled_from(TEXTS)) + draw(st.sampled_from(["", "", "abc", " ab c"])),
        media=media,
        video_first=draw(st.booleans()),
        events=events,
        sampling=sampling,
        seed=draw(st.integers(0, 2)),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        tenant=draw(st.sampled_from(["a", "a", "b"])),
        known=draw(st.booleans()),
        order=tuple(draw(st.lists(st.integers(0, 9), min_size=8, max_size=8))),
        leaves=leaves,
        breaks=None if live or leaves else draw(st.sampled_from([None, None, 1, 4, 9, 20, 40])),
    )


@st.composite
def scenes(draw: st.DrawFn, models: Sequence[str]) -> Scene:
    engine = {
        "max_rows": draw(st.sampled_from([1, 2, 3, 5, 8, 17, 64])),
        "max_units": draw(st.integers(1, 4)),
        "max_running": draw(st.sampled_from([8, 8, 8, 8, 4, 2, 1])),
        "page_size": draw(st.sampled_from([2, 4, 4, 8, 16])),
    }
    return Scene(
        model=draw(st.sampled_from(models)),
        engine=engine,
        text=draw(st.sampled_from([0, 2, 8, 20, 40])),
        visual=draw(st.sampled_from([30, 30, 15, 5, 0])),
        asked=tuple(draw(st.lists(asked(), min_size=3, max_size=6))),
        turns=tuple(
            draw(
                st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 0, 0, 1, 2, 5])), min_size=16, max_size=16)
            )
        ),
        forgets=draw(st.booleans()),
    )


# -- what is done ------------------------------------------------------------------------------------------------------


class Asking:
    """One request of an example: what it still has to say, a message at a time."""

    def __init__(self, system: Halves, asked: Asked) -> None:
        self.asked = asked
        self.live = asked.events is not None
        self.clips = {slot: medium.shown(system.span) for slot, medium in enumerate(asked.media)}
        self._system = system
        # What is part of the text cannot be forgotten.
        overlaid = oracle_of(system).overlaid
        self._events = [event for event in asked.events or () if not (overlaid and event is None)]
        self._ready: dict[tuple[int, int], dpb.DecodeReady] = {}  # known before they are handed over
        self._units = sum(medium.count for medium in asked.media)
        self._dropped = 0
        self._event = 0
        slots = range(len(asked.media))
        parts: list[str | int] = [*slots, asked.text] if asked.video_first else [asked.text, *slots]
        opened = system.opened(*parts)
        for named in opened.slots:
            named.kind = asked.media[named.slot].kind
        for name, value in asked.sampling.items():
            setattr(opened.sampling, name, value)
        opened.seed, opened.priority, opened.fairness_key = asked.seed, asked.priority, asked.tenant
        if self.live:
            opened.sample = dpb.SAMPLE_MODE_WHILE_OPEN
        self.caller = Caller(system, opened, self.clips)
        self.resumed: Caller | None = None
        self.todo = self._plan()
        self.said = 0

    def needs(self) -> tuple[int, int]:
        """Rows and visual tokens that it may come to at most."""
        span = self._system.span
        largest = {slot: medium.shown(span, first=True) for slot, medium in enumerate(self.asked.media)}
        rows = visual = 0
        for clips in (self.clips, largest):
            replay = Caller(self._system, self.caller.opened, clips).replay(oracle_of(self._system))
            rows, visual = max(rows, len(replay.timeline)), max(visual, replay.timeline.vision_tokens)
        for event in self._events:
            rows += 24 if isinstance(event, int) else 32
            visual += self._layout(frames(event)[0]).vision_tokens if isinstance(event, int) else 0
        return rows + self.asked.sampling["max_tokens"] + 1, visual

    def _plan(self) -> list[tuple[str, int, int]]:
        """What it says, in an order in which everything comes behind what it stands on."""
        media = [*self.asked.media]
        actions: list[list[tuple[str, int, int]]] = []  # each a chain
        for slot, medium in enumerate(media):
            chain = [("size", slot, 0)] if medium.extra else []
            actions.append([*chain, ("final", slot, 0)])
            actions += [[("ready", slot, unit)] for unit in range(medium.count)]
        if not self.live:
            actions.append([("close", 0, 0)])
        shown = len(media)
        appended: list[tuple[str, int, int]] = []
        for event in self._events:
            if isinstance(event, int):
                appended.append(("show", shown, event))
                actions += [[("final", shown, 0)], [("ready", shown, 0)]]
                shown += 1
            else:
                appended.append(("drop", 0, 0) if event is None else ("say", 0, 0))
        actions.append(appended)
        planned: list[tuple[str, int, int]] = []
        order = iter(self.asked.order * 9)
        while actions := [chain for chain in actions if chain]:
            possible = [chain for chain in actions if self._may(chain[0], planned, len(media))]
            planned.append(possible[next(order) % len(possible)].pop(0))
        if self.live:
            planned.append(("close", 0, 0))
        return planned

    def _may(self, action: tuple[str, int, int], done: list[tuple[str, int, int]], media: int) -> bool:
        what, slot, _ = action
        if what == "ready":
            return any(one[0] in ("size", "final") and one[1] == slot for one in done)
        if what == "final" and slot >= media:
            return any(one[0] == "show" and one[1] == slot for one in done)
        return True

    async def run(self) -> None:
        """Listens to its end. Once its stream broke, another call is told everything at once."""
        caller, media = self.caller, range(len(self.asked.media))
        breaks = self.asked.breaks
        await caller.run(leave_after=breaks, with_token=breaks is not None and breaks > FEW)
        n = self.asked.sampling.get("n", 1)
        if self.asked.breaks is None or len(caller.told.ends) == n:
            return
        opened = dpb.DecodeOpen()
        opened.CopyFrom(caller.opened)
        opened.attempt += 1
        for number, ids in caller.told.sequences.items():
            opened.emitted.add(sequence=number, ids=ids)
        counts["resumed"] += any(caller.told.sequences.values())
        self.resumed = Caller(self._system, opened, self.clips)
        for slot in media:
            self.resumed.send(self._units_of(slot, self.clips[slot], final=True))
            for unit in range(len(self.clips[slot].units)):
                await self.resumed.hand_over(slot, unit)
        self.resumed.send(CLOSE)
        await self.resumed.run()

    async def say(self) -> None:
        """The next message."""
        what, slot, number = self.todo.pop(0)
        self.said += 1
        caller = self.caller
        if what in ("size", "final"):
            caller.send(await self._sized(slot, first=what == "size", final=what == "final"))
        elif what == "ready":
            await self._hand_over(slot, number)
        elif what == "close":
            caller.send(CLOSE)
        else:
            self._event += 1
            if what == "drop":
                self._dropped = max(self._dropped, self._units - 1)
                caller.send(dpb.DecodeDrop(event=self._event, first_visible=self._dropped))
                return
            append = dpb.DecodeAppend(event=self._event)
            if what == "say":
                append.turn.role = pb.ROLE_USER
                append.turn.parts.add(text="And?")
            else:
                self.clips[slot] = Clip([frames(number)[0]], [float(slot)], pb.MEDIA_KIND_FRAME)
                append.slot = slot
                append.slots.add(slot=slot, kind=pb.MEDIA_KIND_FRAME)
                self._units += 1
            caller.send(append)

    async def _sized(self, slot: int, *, first: bool, final: bool) -> dpb.DecodeSized:
        clip = self.asked.media[slot].shown(self._system.span, first=True) if first else self.clips[slot]
        message = self._units_of(slot, clip, first=first, final=final)
        if self.asked.known and final:
            for ready in await self._system.ready(self.clips[slot].frames, slot=slot):
                message.units[ready.unit].key = ready.entry.key
                self._ready[slot, ready.unit] = ready
        return message

    def _layout(self, frame: digits.Rgb) -> UnitLayout:
        return self._system.model.processor.unit_layout(grid_of(frame))

    def _units_of(self, slot: int, clip: Clip, *, first: bool = False, final: bool) -> dpb.DecodeSized:
        (h, w), tokens = clip.grid, self._layout(clip.frames[0]).vision_tokens
        units = [pb.Unit(index=unit, grid=pb.Grid(t=1, h=h, w=w), tokens=tokens) for unit in range(len(clip.units))]
        for number, offset in enumerate(clip.offsets):
            units[number // clip.span].frames.add(file_index=number, frame_offset=to_duration(offset))
        return dpb.DecodeSized(slot=slot, revision=1 if first else 2, final=final, units=units)

    async def _hand_over(self, slot: int, unit: int) -> None:
        ready, admitted = self._ready.pop((slot, unit), None), self.caller.told.admitted
        if ready is None:
            await self.caller.hand_over(slot, unit)
        elif admitted is not None and pb.UnitRef(slot=slot, unit=unit) in admitted.held:
            await self._system.store.release(ready.entry.key, ready.entry.lease.lease_id)
        else:
            await self.caller.say_ready(ready)

    async def end(self) -> None:
        for ready in self._ready.values():
            await self._system.store.release(ready.entry.key, ready.entry.lease.lease_id)


def oracle_of(system: Halves) -> Oracle:
    assert isinstance(system.model, Oracle)
    return system.model


async def play(scene: Scene) -> None:
    """Runs an example, and holds all that was told against undivided passes."""
    async with _system(scene) as system:
        scheduler = system.decoder.scheduler
        askings = [Asking(system, asked) for asked in scene.asked]
        runs = [asyncio.create_task(asking.run()) for asking in askings]
        left: set[int] = set()
        turns = _turns(scene)
        forgetting = asyncio.create_task(_forget(system)) if scene.forgets else None
        while pending := [i for i, asking in enumerate(askings) if asking.todo and i not in left]:
            who, gap = next(turns)
            who = pending[who % len(pending)]
            goal = scheduler.counts.steps + gap
            await asyncio.sleep(0)
            while scheduler.counts.steps < goal and scheduler.asking:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
            await askings[who].say()
            if askings[who].said == askings[who].asked.leaves:
                left.add(who)
                runs[who].cancel()
        stuck, steps = set(runs), -1
        while stuck and steps != scheduler.counts.steps:  # a busy machine is slow, which is something else
            steps = scheduler.counts.steps
            _, stuck = await asyncio.wait(stuck, timeout=STILL)
        for run in stuck:
            run.cancel()
        results = await asyncio.gather(*runs, return_exceptions=True)
        if forgetting is not None:
            forgetting.cancel()
        for asking in askings:
            await asking.end()
        counts["preempted"] += scheduler.preempted > 0
        counts["asked again"] += any(asking.caller.missing for asking in askings)
        counts["examples"] += 1
        counts[f"of {scene.model}"] += 1
        assert not stuck, f"{[i for i, run in enumerate(runs) if run in stuck]} are stuck"
        for i, (asking, result) in enumerate(zip(askings, results, strict=True)):
            _check(asking, result, left=i in left, judge=oracle_of(system))


async def _forget(system: Halves) -> None:
    seen = 0
    while True:
        if seen != (seen := system.decoder.scheduler.preempted):
            await system.store.flush()
            system.decoder.flush()
        await asyncio.sleep(0.0005)


def _check(asking: Asking, result: BaseException | None, *, left: bool, judge: Oracle) -> None:
    asking.caller.check(judge)
    caller = asking.resumed or asking.caller
    caller.check(judge)
    answers.update(tuple(ids) for ids in caller.told.sequences.values() if len(ids) >= 8)
    if left:
        return
    if isinstance(result, Overloaded):
        # What grows, or moves although others share it, may find no room.
        assert asking.live or any(medium.extra for medium in asking.asked.media), result
        counts["refused"] += 1
        return
    if result is not None:
        raise result
    counts["answered"] += 1
    if asking.live:
        assert caller.told.finished is not None
    else:
        caller.check_whole(judge)


def _turns(scene: Scene) -> Iterator[tuple[int, int]]:
    while True:
        yield from scene.turns


@asynccontextmanager
async def _system(scene: Scene) -> AsyncIterator[Halves]:
    model = oracle(scene.model)
    async with halves(model, dtype=torch.float64) as measure:
        needs = [Asking(measure, asked).needs() for asked in scene.asked]
    size = scene.engine["page_size"]
    pages = -(-(max(rows for rows, _ in needs) + scene.text) // size) + 1
    visual = max(1, *(visual for _, visual in needs)) + scene.visual
    async with halves(
        model, dtype=torch.float64, text_tokens=pages * size, visual_tokens=visual, **scene.engine
    ) as system:
        yield system


AT_A_TIME = 10
"""Examples of one run: behind its tenth Hypothesis goes on with what differs little from those that it has."""

SETTINGS = hypothesis.settings(
    max_examples=AT_A_TIME,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def examine(
    runs: int,
    *,
    seed: int | None = None,
    phases: Collection[hypothesis.Phase] = tuple(hypothesis.Phase),
    models: Sequence[str] = MODELS,
) -> None:
    """Plays the examples of so many runs: those that the seed stands for, or any."""
    first = random.randrange(2**32) if seed is None else seed
    for number in range(runs):
        _examine_run(first + number, phases, models)


def _examine_run(seed: int, phases: Collection[hypothesis.Phase], models: Sequence[str]) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(SETTINGS, phases=phases)
    @given(scenes(models))
    def any_scene(scene: Scene) -> None:
        asyncio.run(play(scene))

    any_scene()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.timelines", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", choices=sorted(set(MODELS)), help="of every example; by default any")
    told = parser.parse_args()
    ends = time.monotonic() + 60 * told.minutes
    while time.monotonic() < ends:
        minute = time.monotonic() + 60
        while time.monotonic() < min(minute, ends):
            examine(1, models=[told.model] if told.model else MODELS)
        sys.stdout.write(f"{dict(counts)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
