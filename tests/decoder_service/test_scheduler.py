"""Plans: who runs with whom, who goes first, who has room, and who gives way. Everything here is numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.errors import Overloaded
from decoder_service.room import Room
from decoder_service.scheduler import Scheduler
from decoder_service.seats import Attach, Outcome, Plan, Seat

PAGE = 4
STOP = 99


class Pages:
    """Pages of one pool, and who has how many; every sequence has computed as many rows as the tests say."""

    def __init__(self, total: int = 1000) -> None:
        self.total = total
        self.held: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()
        self.promised: Counter[str] = Counter()
        self.spared: Counter[str] = Counter()  # rows that the next `share` finds

    @property
    def free(self) -> int:
        names = {*self.held, *self.promised}
        return self.total - sum(max(self.held[name], self.promised[name]) for name in names)

    def admit(self, sequence: str, need: Room, *, spare: int) -> bool:
        if need.pages + spare > self.free:
            return False
        self.promised[sequence] = need.pages
        return True

    def grow(self, rows: Iterable[tuple[str, int]]) -> None:
        for name, more in rows:
            wanted = -(-(self.computed[name] + more) // PAGE)
            if wanted - max(self.held[name], self.promised[name]) > self.free:
                raise Overloaded("KV_POOL_FULL", "full", retry_after=0.1)
            self.held[name] = max(self.held[name], wanted)

    def share(self, sequence: str) -> int:
        spared = self.spared.pop(sequence, 0)
        self.computed[sequence] += spared
        return spared

    def slack(self, sequence: str) -> int:
        return self.held[sequence] * PAGE - self.computed[sequence]

    def release(self, sequence: str) -> None:
        for counter in (self.held, self.computed, self.promised):
            del counter[sequence]


class Planned(NamedTuple):
    """A plan as names and numbers; of single rows only the names."""

    singles: list[str]
    shares: list[tuple[str, int]]


class Table:
    """A scheduler with a model that draws the number of its step."""

    def __init__(self, *, pages: int = 1000, max_rows: int = 16, max_units: int = 4, max_running: int = 64) -> None:
        self.pages = Pages(pages)
        self.scheduler: Scheduler[str] = Scheduler(
            self.pages, max_rows=max_rows, max_units=max_units, max_running=max_running
        )
        self.seats: dict[str, Seat[str]] = {}
        self.woken: Counter[str] = Counter()
        self.steps: list[Planned] = []

    def enter(self, name: str, *, rows: int = 1, priority: int = 0, tenant: str = "") -> Seat[str]:
        seat = self.scheduler.seat(
            name,
            wake=lambda: self.woken.update([name]),
            tenant=tenant.encode(),
            priority=priority,
            stops=frozenset([STOP]),
        )
        self.seats[name] = seat
        self.scheduler.enter(seat, Room(-(-(rows + 1) // PAGE), 0))
        return seat

    def ask(self, name: str, *, rows: int = 1, tokens: int = 100, priority: int = 0, tenant: str = "") -> Seat[str]:
        """Enters, and wants a prompt of so many rows and so many tokens after it. It must have room at once."""
        seat = self.enter(name, rows=rows, priority=priority, tenant=tenant)
        assert seat.admitted
        self.scheduler.want(seat, rows, draws=tokens > 0, allowed=tokens)
        return seat

    def plan(self) -> Plan[str] | None:
        plan = self.scheduler.plan()
        if plan is not None:
            shares = [(share.seat.sequence, share.rows) for share in plan.shares]
            self.steps.append(Planned([seat.sequence for seat in plan.singles], shares))
        return plan

    def done(self, plan: Plan[str], *, drawn: Outcome = None) -> None:
        token = len(self.steps) if drawn is None else drawn
        for name, rows in [(seat.sequence, 1) for seat in plan.singles] + self.steps[-1].shares:
            self.pages.computed[name] += rows
        outcomes: list[Outcome] = [token for _ in plan.singles]
        outcomes += [token if share.draws else None for share in plan.shares]
        self.scheduler.done(plan, outcomes)

    def step(self, *, drawn: Outcome = None) -> Planned | None:
        plan = self.plan()
        if plan is None:
            return None
        self.done(plan, drawn=drawn)
        return self.steps[-1]

    def run(self) -> list[Planned]:
        """Steps until there is nothing to do."""
        while self.step() is not None:
            assert len(self.steps) < 1000
        return self.steps


def test_sequences_that_ask_together_share_every_step() -> None:
    table = Table()
    names = [f"s{i}" for i in range(8)]
    for name in names:
        table.ask(name, tokens=5)
    assert table.run() == [(names, [])] * 5
    counts = table.scheduler.counts
    assert (counts.steps, counts.rows, list(counts.batches)) == (5, 40, [8] * 5)
    assert all(table.seats[name].fresh == [1, 2, 3, 4, 5] for name in names)


def test_a_sequence_that_joins_runs_with_those_that_run_already() -> None:
    table = Table()
    table.ask("first", tokens=3)
    plan = table.plan()
    assert plan is not None
    table.ask("later", tokens=2)
    table.done(plan)
    assert [step.singles for step in table.run()] == [["first"], ["first", "later"], ["first", "later"]]


def test_single_rows_go_first_and_prefills_fill_the_rest_in_order_of_arrival() -> None:
    table = Table(max_rows=8)
    for name, rows in (("long", 12), ("short", 3), ("running", 1)):
        table.ask(name, rows=rows, tokens=1)
    assert table.run() == [(["running"], [("long", 7)]), ([], [("long", 5), ("short", 3)])]


def test_a_long_prefill_starves_no_running_answer_and_keeps_its_place() -> None:
    table = Table(max_rows=8)
    table.ask("old", rows=21, tokens=0)
    table.ask("new", rows=14, tokens=0)
    table.ask("running", tokens=5)
    assert table.run() == [(["running"], [(name, 7)]) for name in ("old", "old", "old", "new", "new")]


def test_a_token_is_drawn_only_from_the_last_row_and_the_next_ones_follow_by_themselves() -> None:
    table = Table(max_rows=8)
    seat = table.ask("long", rows=12, tokens=3)
    assert table.run() == [([], [("long", 8)]), ([], [("long", 4)]), (["long"], []), (["long"], [])]
    assert seat.fresh == [2, 3, 4] and not seat.rows


def test_a_sequence_that_draws_its_end_draws_no_more() -> None:
    table = Table()
    stays, ends = table.ask("stays", tokens=4), table.ask("ends", rows=2, tokens=4)
    table.step(drawn=STOP)
    table.run()
    assert ends.fresh == [STOP] and stays.fresh == [STOP]
    assert len(table.steps) == 1


def test_what_is_allowed_counts_from_what_was_drawn_also_while_a_step_runs() -> None:
    table = Table()
    seat = table.ask("s", tokens=2)
    plan = table.plan()
    assert plan is not None
    table.scheduler.allow(seat, 3)  # of which the step that runs draws one
    table.done(plan)
    table.run()
    assert len(seat.fresh) == 3
    seat.fresh = []
    table.scheduler.want(seat, 1, draws=True, allowed=5)
    plan = table.plan()
    assert plan is not None
    table.scheduler.allow(seat, 1)
    table.done(plan)
    assert table.step() is None and len(seat.fresh) == 1


def test_who_leaves_or_is_withdrawn_is_in_no_later_step_and_its_last_token_is_not_lost() -> None:
    table = Table()
    stays, leaves, waits = (table.ask(name, tokens=3) for name in ("stays", "leaves", "waits"))
    plan = table.plan()
    assert plan is not None
    table.scheduler.leave(leaves)
    table.scheduler.withdraw(waits)
    table.done(plan)
    assert waits.fresh == [1]
    table.step()
    table.scheduler.want(waits, 1, draws=True, allowed=1)
    table.run()
    assert [step.singles for step in table.steps] == [["stays", "leaves", "waits"], ["stays"], ["stays", "waits"]]
    assert waits.fresh == [1, 3] and len(stays.fresh) == 3


def test_more_answers_than_a_step_holds_take_turns() -> None:
    table = Table(max_rows=2)
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        table.ask(name, tokens=4)
    ran = [name for step in table.run() for name in step.singles]
    assert len(table.steps) == 10
    assert all(Counter(ran[: 5 * turn]) == dict.fromkeys(names, turn) for turn in range(1, 5)), ran


def test_answers_that_fill_every_step_leave_an_eighth_of_it_to_prompts() -> None:
    table = Table(max_rows=16)
    for i in range(20):
        table.ask(f"s{i}", tokens=9)
    table.ask("prompt", rows=5, tokens=0)
    steps = [table.step() for _ in range(4)]
    assert [len(step.singles) for step in steps if step] == [14, 14, 14, 16]
    assert [step.shares for step in steps if step] == [[("prompt", 2)], [("prompt", 2)], [("prompt", 1)], []]


def test_where_a_step_cannot_hold_all_a_tenant_with_many_gets_no_more_than_one_with_few() -> None:
    table = Table(max_rows=4)
    for i in range(8):
        table.ask(f"many{i}", tokens=100, tenant="many")
    for i in range(4):
        table.ask(f"few{i}", tokens=100, tenant="few")
    for _ in range(40):
        table.step()
    served = Counter(name[:3] for step in table.steps for name in step.singles)
    assert served == {"man": 80, "few": 80}


def test_prefills_of_a_tenant_that_had_less_go_first_and_nobody_saves_up() -> None:
    table = Table(max_rows=8)
    for i in range(4):
        table.ask(f"a{i}", rows=8, tokens=0, tenant="a")
    table.step()
    table.step()
    table.ask("b0", rows=8, tokens=0, tenant="b")  # lifted to what a had: it is equal now, and came later
    table.ask("b1", rows=8, tokens=0, tenant="b")
    order = [step.shares[0][0] for step in table.run()]
    assert order == ["a0", "a1", "a2", "b0", "a3", "b1"]


def test_a_higher_priority_goes_first() -> None:
    table = Table(max_rows=4)
    table.ask("low", rows=8, tokens=0)
    table.ask("high", rows=8, tokens=0, priority=1)
    assert [step.shares for step in table.run()] == [[("high", 4)]] * 2 + [[("low", 4)]] * 2


def test_no_more_units_are_attached_in_a_step_than_may_be_and_those_of_the_first_come_first() -> None:
    table = Table(max_units=4)
    first, second = table.ask("first", tokens=3), table.ask("second", tokens=3)
    settled: list[str] = []

    def attach(seat: Seat[str], count: int) -> None:
        table.scheduler.attach(
            Attach(seat, lambda: None, lambda done: settled.append(f"{seat.sequence} {done}")) for _ in range(count)
        )

    attach(second, 5)
    attach(first, 2)
    taken = []
    while (plan := table.plan()) is not None:
        taken.append([unit.seat.sequence for unit in plan.units])
        assert len(plan.singles) == 2, "they ride in the steps of those who draw"
        table.done(plan)
    assert taken == [["first", "first", "second", "second"], ["second", "second", "second"], []]
    attach(first, 1)
    table.scheduler.leave(first)
    assert settled == ["first False"] and table.plan() is None


def test_who_finds_no_room_waits_and_is_let_in_in_order() -> None:
    table = Table(pages=8)
    holder = table.enter("holder", rows=5 * PAGE)
    large, small = table.enter("large", rows=3 * PAGE), table.enter("small", rows=1)
    seats = (holder, large, small)
    assert [seat.admitted for seat in seats] == [True, False, False]
    assert table.step() is None
    assert [seat.admitted for seat in seats] == [True, False, False], "nobody is let in before the one that came first"
    table.scheduler.leave(holder)
    table.pages.release("holder")
    assert table.step() is None
    assert [seat.admitted for seat in seats] == [False, True, True]
    assert table.woken == {"holder": 1, "large": 1, "small": 1}


def test_no_more_run_than_may_run() -> None:
    table = Table(max_running=2)
    seats = [table.enter(f"s{i}") for i in range(4)]
    assert [seat.admitted for seat in seats] == [True, True, False, False]
    table.scheduler.leave(seats[0])
    table.step()
    assert [seat.admitted for seat in seats[1:]] == [True, True, False]


def test_when_the_pages_run_out_the_last_gives_way_and_goes_on_where_it_was() -> None:
    table = Table(pages=5)
    old, new = table.ask("old", rows=4, tokens=8), table.ask("new", rows=4, tokens=8)
    while table.step() is not None and not table.scheduler.preempted:
        pass
    assert (old.admitted, new.admitted, new.preempted) == (True, False, True)
    assert table.pages.held["new"] == 0
    assert table.woken["new"] >= 2, "it is told"
    drawn = len(new.fresh)
    assert 0 < drawn < 8
    table.scheduler.enter(new, Room(-(-(4 + drawn + 1) // PAGE), 0))
    table.run()
    assert len(old.fresh) == 8
    if not new.admitted:
        table.scheduler.leave(old)
        table.pages.release("old")
        table.step()
    table.scheduler.want(new, 4 + drawn, draws=True, allowed=8 - drawn)
    table.run()
    assert len(new.fresh) == 8 and table.scheduler.preempted == 1


def test_a_lower_priority_gives_way_to_one_that_comes_later() -> None:
    table = Table(pages=8)
    low, high = table.ask("low", rows=16, tokens=4), table.enter("high", rows=16, priority=1)
    assert table.plan() is None, "before the first step of the one that gives way"
    assert (low.preempted, high.admitted) == (True, True)
    table.scheduler.enter(low, Room(5, 0))
    equal = table.enter("equal", rows=16, priority=1)
    table.step()
    assert [seat.admitted for seat in (low, equal, high)] == [False, False, True]


def test_a_priority_does_not_reach_over_to_another_tenant() -> None:
    table = Table(pages=8, max_rows=8)
    low = table.ask("low", rows=16, tokens=0, tenant="a")
    high = table.enter("high", rows=16, tenant="b", priority=9)
    assert table.step() == ([], [("low", 8)])
    assert (low.admitted, high.admitted) == (True, False)
    own = table.enter("own", rows=16, tenant="a", priority=1)
    table.step()
    assert (low.admitted, high.admitted, own.admitted) == (True, False, False), "who had less comes first"


def test_a_sequence_that_fits_nowhere_fails_alone() -> None:
    table = Table(pages=2)
    seat = table.ask("s", rows=6, tokens=10)
    table.run()
    assert isinstance(seat.error, Overloaded) and len(seat.fresh) == 3
    assert not table.scheduler.asking


def test_a_failure_is_that_sequence_s_own() -> None:
    table = Table()
    good, bad = table.ask("good", tokens=2), table.ask("bad", tokens=2)
    prefill = table.ask("prefill", rows=3, tokens=0)
    plan = table.plan()
    assert plan is not None
    errors = [ValueError("bad"), ValueError("prefill")]
    table.scheduler.done(plan, [1, errors[0], errors[1]], failed=True)
    assert (bad.error, prefill.error) == (errors[0], errors[1])
    assert not bad.fresh and good.fresh == [1]
    assert table.step() == (["good"], [])


def test_rows_that_others_have_computed_are_left_out() -> None:
    table = Table()
    spared, all_spared = table.ask("spared", rows=10, tokens=1), table.ask("all", rows=8, tokens=0)
    table.pages.spared.update({"spared": 8, "all": 8})
    assert table.run() == [([], [("spared", 2)])]
    assert spared.fresh == [1] and table.woken["all"] == 2 and not all_spared.rows


asks = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 14), st.integers(1, 20), st.integers(0, 2), st.sampled_from("xyz")),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(asked=asks, pages=st.integers(9, 30), max_rows=st.integers(1, 9))
def test_whoever_asks_gets_every_token_once_whatever_gives_way(
    asked: list[tuple[int, int, int, int, str]], pages: int, max_rows: int
) -> None:
    """Of each: steps after which it comes, rows, tokens, priority, tenant."""
    table = Table(pages=pages, max_rows=max_rows)
    waiting = {f"s{i}": ask for i, ask in enumerate(asked)}
    running: dict[str, tuple[int, int]] = {}
    for turn in range(3000):
        for name in [name for name, ask in waiting.items() if ask[0] <= turn]:
            _, rows, tokens, priority, tenant = waiting.pop(name)
            running[name] = rows, tokens
            table.enter(name, rows=rows, priority=priority, tenant=tenant)
        for name, (rows, tokens) in list(running.items()):
            seat = table.seats[name]
            assert seat.error is None
            drawn = len(seat.fresh)
            if drawn == tokens:
                table.scheduler.leave(seat)
                table.pages.release(name)
                del running[name]
            elif seat.preempted:
                table.scheduler.enter(seat, Room(-(-(rows + drawn + 1) // PAGE), 0))
            elif seat.admitted and not seat.rows:
                rest = rows + drawn - table.pages.computed[name]
                table.scheduler.want(seat, rest, draws=True, allowed=tokens - drawn)
        step = table.step()
        if step is not None:
            assert len(step.singles) + sum(rows for _, rows in step.shares) <= max_rows
        assert sum(table.pages.held.values()) <= pages
        if not (waiting or running):
            break
    assert not running and not waiting
    assert not table.pages.held and not table.scheduler.running and not table.scheduler.asking


def test_a_tenant_that_is_silent_saves_nothing_up_and_leaves_no_gift_to_others() -> None:
    table = Table(max_rows=8)
    idle = table.enter("idle", tenant="idle")
    table.scheduler.want(idle, 1, draws=False)
    table.step()
    for i in range(5):
        table.ask(f"busy{i}", rows=8, tokens=0, tenant="busy")
    table.step()
    table.step()
    table.ask("new", rows=8, tokens=0, tenant="new")
    table.scheduler.want(idle, 8, draws=False)
    order = [step.shares[0][0] for step in table.run()[3:]]
    assert order == ["idle", "busy2", "new", "busy3", "busy4"], "nobody had less than another, so they come by arrival"
    served = {seat.tenant.key: seat.tenant.served for seat in table.seats.values()}
    assert max(served.values()) - min(served.values()) <= 24, "they were lifted to who was busy"


@pytest.mark.parametrize("tenants", [1, 3])
def test_tenants_who_are_gone_are_forgotten(tenants: int) -> None:
    table = Table()
    for i in range(9):
        table.ask(f"s{i}", tokens=2, tenant=f"t{i % tenants}")
    table.run()
    for seat in table.seats.values():
        table.scheduler.leave(seat)
    assert not len(table.scheduler.tenants)


@pytest.mark.parametrize("gone", [False, True])
def test_who_is_about_to_give_back_its_pages_still_counts(gone: bool) -> None:
    """Until it has left, somebody who needs a page waits for it and does not fail for being alone."""
    table = Table(pages=3)
    ending = table.ask("ending", rows=PAGE - 1, tokens=9)
    other = table.ask("other", rows=1, tokens=20)
    for _ in range(2):
        table.step()
    table.scheduler.retire(ending)
    if gone:
        table.scheduler.leave(ending)  # and has given nothing back
    for _ in range(8):
        table.step()
    assert (other.error is not None) is gone


def test_who_retires_gets_no_room_any_more() -> None:
    table = Table()
    settled: list[bool] = []
    first = table.ask("first")
    table.ask("last")
    table.scheduler.make_way(first, lambda: pytest.fail("it has left"), settled.append)
    table.scheduler.retire(first)
    table.step()
    assert settled == [False] and table.scheduler.preempted == 0
