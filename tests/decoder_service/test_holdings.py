"""Who holds what of both pools, held against a plain account: every page and slot says what was written into it.

A timeline here is made of numbers; computing a row writes down all that a row of a real model depends on. So a page
that is shared wrongly, evicted while it is read, or written into while others hold it is found out by its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiasm.attention.pages import ExtentAllocator, PageAllocator
from chiasm.chat_template import Slot
from chiasm.errors import Overloaded
from chiasm.timeline import UnitLayout, UnitName
from decoder_service.holdings import Holdings
from decoder_service.laid import Drop, SizedSlot
from decoder_service.prefix import Chain
from decoder_service.room import Room
from decoder_service.scheduler import Scheduler
from decoder_service.sequence import DecodeSequence

PAGE = 4
TENANTS = [b"a" * 32, b"b" * 32]

Grid: TypeAlias = tuple[int, int]
Row: TypeAlias = tuple[object, ...]

few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def layout(grid: Grid) -> UnitLayout:
    """A unit of `grid[0]` placeholders and `grid[1]` vision tokens."""
    steps = np.array([(0, i, 0) for i in range(grid[0])], dtype=np.int32).T
    return UnitLayout(tuple([90] * grid[0]), steps, advance=grid[0], vision_tokens=grid[1])


@dataclass(eq=False)
class Asked:
    """One timeline: text, a medium, text, another medium, text, as far as it has come."""

    tenant: bytes
    media: list[list[int]]  # what each unit shows; its grid follows from that
    sequence: DecodeSequence
    need: Room
    admitted: bool = False
    grows: bool = True  # the first medium may still turn out shorter

    def shows(self, name: UnitName) -> int:
        return self.media[name.slot][name.unit]

    def know(self, name: UnitName) -> None:
        self.sequence.know(name, bytes([self.shows(name)]) * 32)

    def size(self, slot: int, count: int, *, final: bool) -> None:
        pieces: list[list[int] | int] = []
        for unit in range(count):
            pieces += [[7], unit]
        grids = [(1 + shown % 2, 2 + shown % 3) for shown in self.media[slot][:count]]
        self.sequence.size(slot, SizedSlot([*pieces, [8]], grids, [float(i) for i in range(count)], final))


@dataclass
class World:
    """Two pools of which the content is written down, and everybody who asks."""

    holdings: Holdings
    rows: dict[int, Row] = field(default_factory=dict)  # by slot of the self pool
    tokens: dict[int, Row] = field(default_factory=dict)  # by slot of the cross pool
    asking: list[Asked] = field(default_factory=list)

    @classmethod
    def of(cls, pages: int, slots: int) -> World:
        return cls(Holdings(PageAllocator(pages, PAGE), ExtentAllocator(slots)))

    def ask(
        self,
        tenant: int,
        text: Sequence[int],
        units: Sequence[int],
        more: Sequence[int] = (),
        *,
        room: int,
        drop: int = 0,
    ) -> Asked:
        """Nothing of it is attached or computed."""
        sequence = DecodeSequence(layout, Chain(TENANTS[tenant], PAGE))
        asked = Asked(TENANTS[tenant], [list(units), list(more)], sequence, Room(0, 0))
        sequence.extend([list(text), Slot(0), [1, 2], Slot(1)])
        asked.size(0, len(units), final=False)
        asked.size(1, len(more), final=True)
        sequence.extend([Drop(min(drop, len(units))), [3, 4, 5]])
        timeline = sequence.timeline
        asked.need = Room(-(-(len(timeline) + room) // PAGE), timeline.vision_tokens)
        self.asking.append(asked)
        return asked

    # -- what a model would do -------------------------------------------------------------------------------------

    def row(self, asked: Asked, number: int) -> Row:
        """All that the keys and values of a row depend on: those of the row before it, and what it sees."""
        sequence = asked.sequence
        timeline = sequence.timeline
        first, last = timeline.boundaries(number, number + 1)[0].tolist()
        seen = [(asked.shows(u.name), u.start) for u in timeline.units if first <= u.first < last]
        position = timeline.positions(number, number + 1)[:, 0].tolist()
        before = self.read(asked, number - 1) if number else (asked.tenant,)
        return (hash(before), timeline.ids(number, number + 1)[0], tuple(position), tuple(seen))

    def read(self, asked: Asked, number: int) -> Row:
        return self.rows[asked.sequence.pages[number // PAGE] * PAGE + number % PAGE]

    def compute(self, asked: Asked, count: int) -> None:
        sequence = asked.sequence
        self.holdings.grow([(sequence, count)])
        for first, slot, length in sequence.rows(count).extents:
            for i in range(length):
                self.check_token(asked, first + i, slot + i)
        for number in range(sequence.computed, sequence.computed + count):
            made = self.row(asked, number)
            self.rows[sequence.pages[number // PAGE] * PAGE + number % PAGE] = made
        sequence.computed += count
        self.holdings.share(sequence)

    def attach(self, asked: Asked, name: UnitName) -> None:
        """Over its entry's key, as an announcement has it."""
        sequence, holdings = asked.sequence, self.holdings
        asked.know(name)
        if holdings.hold_unit(sequence, name):
            return
        laid = sequence.timeline.find(name)
        assert laid is not None
        with holdings.filling(sequence, name, laid.layout.vision_tokens) as runs:
            slots = [slot for run in runs for slot in range(run.start, sum(run))]
            for i, slot in enumerate(slots):
                self.tokens[slot] = (asked.tenant, asked.shows(name), laid.start, i)

    def check_token(self, asked: Asked, token: int, slot: int) -> None:
        (unit,) = [u for u in asked.sequence.timeline.units if u.first <= token < u.last]
        assert self.tokens[slot] == (asked.tenant, asked.shows(unit.name), unit.start, token - unit.first)

    # -- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        holdings = self.holdings
        pages = {page for asked in self.asking for page in asked.sequence.pages}
        runs = {run for asked in self.asking for extent in asked.sequence.extents() for run in extent.runs}
        held, kept, promised = holdings.held, holdings.kept, holdings.promised
        assert held == (len(pages), sum(run.length for run in runs))
        assert holdings.pages.free + held.pages + kept.pages == holdings.pages.total
        assert holdings.extents.free + held.visual + kept.visual == holdings.extents.total
        left = [
            (max(a.need.pages - len(a.sequence.pages), 0), max(a.need.visual - a.sequence.attached_tokens, 0))
            for a in self.asking
            if a.admitted
        ]
        assert promised == (sum(p for p, _ in left), sum(v for _, v in left))
        for asked in self.asking:
            for number in range(asked.sequence.computed):
                assert self.read(asked, number) == self.row(asked, number)

    def admit(self, asked: Asked) -> bool:
        asked.admitted = self.holdings.admit(asked.sequence, asked.need)
        return asked.admitted

    def finish(self, asked: Asked) -> None:
        """To the last row, as `Decoding` does it."""
        sequence = asked.sequence
        for unit in sequence.timeline.units:
            if not sequence.attached(unit.name):
                self.attach(asked, unit.name)
        if sequence.computed < len(sequence.timeline):
            self.holdings.share(sequence)
            assert sequence.computed < len(sequence.timeline), "the last row is left to compute"
            self.compute(asked, len(sequence.timeline) - sequence.computed)

    def shrink(self, asked: Asked, count: int) -> None:
        """The first medium turns out to have `count` units; ends who has no room for what moved."""
        asked.size(0, count, final=True)
        asked.grows = False
        try:
            self.holdings.detach_moved(asked.sequence)
        except Overloaded:
            assert min(self.holdings.free) < 0
            self.end(asked)

    def end(self, asked: Asked) -> None:
        self.holdings.release(asked.sequence)
        self.holdings.release(asked.sequence)
        self.asking.remove(asked)


# Few texts and few looks, some of equal grids, so that most timelines begin like another.
texts = st.sampled_from([[0], [0, 1], [0, 1, 0, 1, 0], [0, 1, 0, 1, 1], [90, 90, 0, 7]])
units = st.lists(st.sampled_from([0, 1, 6, 7]), max_size=3)
MOVES = ["ask", "ask", "finish", "finish", "attach", "attach", "compute", "shrink", "shrink", "end", "forget", "flush"]


@few
@given(data=st.data())
def test_whatever_happens_in_whatever_order_the_accounts_are_exact(data: st.DataObject) -> None:
    pages, slots = data.draw(st.sampled_from([(14, 24), (60, 100)]))
    world = World.of(pages, slots)
    holdings = world.holdings
    for move in data.draw(st.lists(st.sampled_from(MOVES), min_size=5, max_size=40)):
        asked = data.draw(st.sampled_from(world.asking)) if world.asking else None
        if move == "flush":
            holdings.flush()
            assert holdings.kept == (0, 0)
        elif move == "ask" or asked is None:
            tenant, drop = data.draw(st.sampled_from([0, 0, 0, 1])), data.draw(st.sampled_from([0, 0, 1]))
            asked = world.ask(tenant, data.draw(texts), data.draw(units), data.draw(units), room=3, drop=drop)
            if data.draw(st.booleans()):
                for unit in asked.sequence.timeline.units:
                    asked.know(unit.name)
            free, before = holdings.free, holdings.held
            if world.admit(asked):
                assert min(holdings.free) >= min(*free, 0)
            else:
                assert asked.need.pages > free.pages or asked.need.visual > free.visual
                assert (holdings.held, holdings.free) == (before, free), "who is not admitted changes nothing"
                world.end(asked)
        elif move == "finish":
            world.finish(asked)
        elif move == "end":
            world.end(asked)
        elif move == "forget":
            holdings.forget(asked.sequence)
        elif move == "shrink" and asked.grows:
            world.shrink(asked, data.draw(st.integers(asked.sequence.timeline.dropped, len(asked.media[0]))))
        elif move == "attach":
            waiting = [u.name for u in asked.sequence.timeline.units if not asked.sequence.attached(u.name)]
            if waiting:
                world.attach(asked, data.draw(st.sampled_from(waiting)))
        elif move == "compute":
            ready = asked.sequence.ready_rows - asked.sequence.computed
            if ready > 0:
                world.compute(asked, data.draw(st.integers(1, ready)))
        world.check()
    for asked in list(world.asking):
        world.end(asked)
        world.check()
    assert holdings.held == holdings.promised == (0, 0)
    holdings.flush()
    assert (holdings.pages.free, holdings.extents.free) == (pages, slots)
    assert holdings.extents.take(slots)[0].length == slots, "and in one piece"


def whole(world: World, asked: Asked) -> None:
    """From admission to the last row."""
    assert world.admit(asked)
    world.finish(asked)
    world.check()


TEXT, UNITS = [0, 1, 0, 1, 1, 0], [0, 1, 2]


def test_what_one_has_computed_the_next_is_given_but_for_the_last_rows() -> None:
    world = World.of(pages=20, slots=40)
    first = world.ask(0, TEXT, UNITS, room=3)
    whole(world, first)
    rows = len(first.sequence.timeline)
    assert rows % PAGE == 0, "the last page is full, and is computed all the same"
    assert first.sequence.spared == 0
    for _ in range(2):  # while the first holds it, and when it has left
        again = world.ask(0, TEXT, UNITS, room=3)
        whole(world, again)
        assert again.sequence.spared == (rows - 1) // PAGE * PAGE
        assert again.sequence.attached_tokens == first.sequence.attached_tokens
        world.end(first)
        first = again


@pytest.mark.parametrize("other", ["tenant", "unit", "look", "order", "text"])
def test_what_depends_on_something_else_is_not_shared(other: str) -> None:
    world = World.of(pages=40, slots=80)
    whole(world, world.ask(0, TEXT, UNITS, room=3))
    tenant = int(other == "tenant")
    shown = {"unit": [3, 1, 2], "look": [6, 1, 2], "order": [1, 0, 2]}.get(other, UNITS)
    text = [9, *TEXT[1:]] if other == "text" else TEXT
    asked = world.ask(tenant, text, shown, room=3)
    whole(world, asked)
    # The page of text before the medium is the same where only the medium is another.
    assert asked.sequence.spared == (0 if other in ("tenant", "text") else PAGE)


def test_equal_tokens_that_see_fewer_units_are_not_shared() -> None:
    world = World.of(pages=40, slots=80)
    for drop, spared in ((0, 0), (1, 16), (0, 24)):
        asked = world.ask(0, TEXT, UNITS, room=3, drop=drop)  # the drop is behind row 17
        asked.sequence.extend([[5] * 8])
        asked.need = Room(10, asked.need.visual)
        whole(world, asked)
        assert asked.sequence.spared == spared


def test_who_is_laid_anew_leaves_what_others_hold_as_it_is() -> None:
    """A medium turns out shorter when its pages and those behind it are shared already."""
    world = World.of(pages=40, slots=80)
    first, second = (world.ask(0, TEXT, UNITS, UNITS, room=3) for _ in range(2))
    whole(world, first)
    whole(world, second)
    assert second.sequence.spared
    world.shrink(second, 1)
    world.check()
    assert second.sequence.attached_tokens == 2, "of the second medium all units have moved"
    world.finish(second)
    world.check()
    third = world.ask(0, TEXT, UNITS, UNITS, room=3)
    whole(world, third)
    assert third.sequence.spared == len(first.sequence.timeline) // PAGE * PAGE


def test_who_is_laid_anew_without_room_is_refused_and_nobody_else() -> None:
    """What it shared it had no room of its own for."""
    world = World.of(pages=40, slots=16)
    first, second = (world.ask(0, TEXT, UNITS, [1, 1], room=3) for _ in range(2))
    for asked in (first, second):
        for unit in asked.sequence.timeline.units:
            asked.know(unit.name)
        whole(world, asked)
    second.size(0, 1, final=True)
    with pytest.raises(Overloaded) as caught:
        world.holdings.detach_moved(second.sequence)
    assert caught.value.reason == "KV_POOL_FULL" and caught.value.retryable
    world.end(second)
    world.check()
    assert min(world.holdings.free) >= 0


def test_what_somebody_holds_is_not_evicted_and_what_nobody_holds_goes_oldest_and_last_page_first() -> None:
    world = World.of(pages=7, slots=0)
    holder, old, new = (world.ask(0, [i] * 3, [], room=0) for i in (1, 2, 3))  # of 10 rows, two full pages of three
    for asked in (holder, old):
        whole(world, asked)
    world.end(old)
    assert (world.holdings.kept.pages, world.holdings.pages.free) == (2, 2)
    whole(world, new)
    assert (world.holdings.kept.pages, world.holdings.pages.free) == (1, 0)
    world.end(new)
    for number, spared in ((2, 4), (1, 8)):
        again = world.ask(0, [number] * 3, [], room=0)
        assert world.holdings.admit(again.sequence, again.need)
        assert again.sequence.spared == spared
        world.end(again)
    assert not world.holdings.admit(world.ask(0, [5] * 16, [], room=0).sequence, Room(5, 0))


def test_sixteen_questions_about_one_video_fit_where_its_units_fit_once() -> None:
    world = World.of(pages=100, slots=9)
    for number in range(16):
        asked = world.ask(0, TEXT, UNITS, room=3)
        for unit in range(len(UNITS)):
            asked.know(UnitName(0, unit))
        whole(world, asked)
        assert asked.sequence.attached_tokens == 9
        assert world.holdings.held.visual == 9, number
    stranger = world.ask(1, TEXT, UNITS, room=3)
    assert not world.holdings.admit(stranger.sequence, stranger.need)


def test_features_that_lie_over_placeholders_are_there_once_wherever_they_are_laid() -> None:
    holdings = Holdings(PageAllocator(20, PAGE), ExtentAllocator(4))

    def asked(text: list[int], tenant: int = 0) -> DecodeSequence:
        sequence = DecodeSequence(layout, Chain(TENANTS[tenant], PAGE), overlaid=True)
        sequence.extend([text, Slot(0)])
        sequence.size(0, SizedSlot([0, [7], 1], [(2, 2)] * 2, [0.0, 1.0], final=True))
        for unit in (0, 1):
            sequence.know(UnitName(0, unit), b"same" * 8)
        return sequence

    first, second, stranger = asked([1]), asked([1, 2, 3]), asked([1], tenant=1)
    assert holdings.admit(first, Room(4, 4))
    with holdings.filling(first, UnitName(0, 0), 2) as ((at, length),):
        assert length == 2
    assert holdings.hold_unit(first, UnitName(0, 1))
    assert not holdings.admit(stranger, Room(4, 4))
    assert holdings.admit(second, Room(4, 4)) and second.attached_tokens == 4
    for sequence, text in ((first, 1), (second, 3)):
        over = sequence.rows(len(sequence.timeline)).overlaid
        assert over is not None and over.tolist() == [-1] * text + [at, at + 1, -1, at, at + 1]
    assert holdings.held.visual == 2 and holdings.promised.visual == 0
    for sequence in (first, second):
        holdings.release(sequence)
    assert holdings.held.visual == 0 and holdings.free.visual == 4
    assert holdings.admit(stranger, Room(4, 4)) and not stranger.attached_tokens


@pytest.mark.parametrize("promised", [Room(0, 5), Room(3, 0)])
def test_what_is_only_kept_takes_room_like_anything_else(promised: Room) -> None:
    """It may be evicted for whoever was promised room before."""
    world = World.of(pages=6, slots=9)
    first = world.ask(0, TEXT, UNITS, room=0)
    whole(world, first)
    world.end(first)
    again, stranger = (world.ask(tenant, TEXT, UNITS, room=0) for tenant in (0, 1))
    for unit in again.sequence.timeline.units:
        again.know(unit.name)
    stranger.need = promised
    assert world.admit(stranger) and not world.admit(again)
    world.end(stranger)
    assert world.admit(again)
    assert again.sequence.attached_tokens == 9 and again.sequence.spared


def test_a_unit_that_cannot_be_filled_leaves_its_room_as_it_was() -> None:
    world = World.of(pages=8, slots=9)
    asked = world.ask(0, TEXT, UNITS, room=0)
    asked.admitted = world.holdings.admit(asked.sequence, asked.need)
    with pytest.raises(RuntimeError), world.holdings.filling(asked.sequence, UnitName(0, 0), 2):
        raise RuntimeError
    world.check()
    assert world.holdings.extents.free == 9 and not asked.sequence.attached(UnitName(0, 0))


def test_what_a_failed_sequence_has_computed_is_not_shared_when_it_gives_way() -> None:
    """Before its owner has looked at why it failed."""
    holdings = Holdings(PageAllocator(8, PAGE), ExtentAllocator(8))
    scheduler: Scheduler[DecodeSequence] = Scheduler(holdings, max_rows=8)
    first, second = (
        scheduler.seat(DecodeSequence(layout, Chain(tenant, PAGE)), wake=lambda: None) for tenant in TENANTS
    )
    for seat in (first, second):
        seat.sequence.extend([list(range(PAGE))])
        scheduler.enter(seat, Room(2, 0))
    scheduler.want(second, PAGE, draws=True, allowed=9)
    plan = scheduler.plan()
    assert plan is not None
    second.sequence.computed = PAGE
    scheduler.done(plan, [RuntimeError()], failed=True)
    tries = iter([False, True])
    scheduler.make_way(first, lambda: next(tries), lambda made: None)
    scheduler.plan()
    assert second.preempted and holdings.kept == (0, 0)
