"""Who runs next: packs the next rows of all sequences of a model into steps, and says who has room and who must wait.

Continuous batching: a sequence joins the next step whenever it has rows to compute and leaves it whenever it has none.
A step takes first the sequences that compute one row, whose callers wait for the next token, and fills the rest of its
budget with pieces of prefills, cut wherever the budget ends. Units are attached in the same steps, within a budget of
their own. Who goes first is decided by what its tenant has had, then by priority, then by arrival: priorities order
the requests of a tenant, and reach no further.

A sequence is admitted with room for what is laid, not for what it may come to say. When the pages run out, somebody who
came late gives back all it holds and waits to be admitted again: nothing of it is lost, for its timeline says
what to compute, and its entries are still where they were.

It is counting throughout: sequences by name, rows, tokens and pages by number. It has seen no tensor, and what a token
means it does not know beyond whether it ends a sequence. Nothing here waits: `decoder_service.stepping` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from chiasm.errors import Overloaded
from decoder_service.fairness import Tenants
from decoder_service.room import Room
from decoder_service.seats import Attach, Outcome, Plan, S, Seat, Share, order, rank
from decoder_service.singles import Singles

S_contra = TypeVar("S_contra", bound=Hashable, contravariant=True)


class Accounts(Protocol[S_contra]):
    """Who holds what of the pools (`decoder_service.holdings`)."""

    def admit(self, sequence: S_contra, need: Room, *, spare: int) -> bool: ...
    def grow(self, rows: Iterable[tuple[S_contra, int]]) -> None:
        """Raises Overloaded, and nothing is changed, if there are no pages."""
        ...

    def share(self, sequence: S_contra) -> int:
        """Rows of it that need not be computed any more, because others have."""
        ...

    def slack(self, sequence: S_contra) -> int:
        """Rows that its pages hold beyond those that are computed."""
        ...

    def release(self, sequence: S_contra) -> None: ...


@dataclass(slots=True)
class StepCounts:
    """Since the scheduler was made.

    Attributes:
        rows: computed in all steps together.
        batches: sequences of each of the last thousand steps.
        preempted: sequences that lost their room.
    """

    steps: int = 0
    rows: int = 0
    preempted: int = 0
    batches: deque[int] = field(default_factory=lambda: deque(maxlen=1000))


class Scheduler(Generic[S]):
    """The plans of one model.

    Args:
        accounts: of the pools.
        max_rows: of one step, at most. It bounds how long a running answer waits for the prefill of another.
        max_units: attached in one step, at most; for the same reason.
        max_running: sequences that have room at the same time, at most.

    Attributes:
        counts: of steps, for those who watch.
        tenants: who shares.
    """

    def __init__(
        self, accounts: Accounts[S], *, max_rows: int, max_units: int = 64, max_running: int | None = None
    ) -> None:
        self.counts = StepCounts()
        self.max_rows = max_rows
        self.max_units = max_units
        self.max_running = max_running or max_rows
        self._accounts = accounts
        self.tenants = Tenants()
        self._arrived = 0
        self._entered: dict[Seat[S], None] = {}  # who waits for room
        self._running: dict[Seat[S], None] = {}  # who has room
        self._prefills: dict[Seat[S], None] = {}
        self._units: list[Attach[S]] = []
        self._freed = False  # somebody who waits may have room now
        self._ways: list[tuple[Seat[S], Callable[[], bool], Callable[[bool], None]]] = []
        self._planned: Plan[S] | None = None
        self._singles: Singles[S] = Singles()

    # -- what owners say of their sequences --------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that have room."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self._entered)

    @property
    def asking(self) -> int:
        """Sequences that are in the step that is running, or ask to be in the next."""
        asking = {*self._singles.seats, *self._prefills}
        if self._planned is not None:
            asking.update(self._planned.singles, (share.seat for share in self._planned.shares))
        return len(asking)

    def seat(
        self,
        sequence: S,
        *,
        wake: Callable[[], None],
        tenant: bytes = b"",
        priority: int = 0,
        stops: frozenset[int] = frozenset(),
    ) -> Seat[S]:
        """A place for a sequence that has just arrived. It ends with `leave`."""
        self._arrived += 1
        return Seat(sequence, wake, self.tenants.enter(tenant), priority, self._arrived, stops)

    def enter(self, seat: Seat[S], need: Room) -> None:
        """Lets a sequence wait for room, where there is none now. It is woken when it is `admitted`, or has an
        `error`."""
        assert not seat.admitted and seat.need is None, "it has room, or waits for it already"
        seat.preempted, seat.need = False, need
        self._entered[seat] = None
        if len(self._entered) == 1 and self._admits(seat, need):
            self._let_in(seat)
        else:
            self._freed = True

    def want(self, seat: Seat[S], rows: int, *, draws: bool, allowed: int = 0) -> None:
        """Says what is to be computed of a sequence that has room and is in no plan.

        Args:
            rows: that can be computed, one at least.
            draws: a token is drawn from the last of them, and then one from each row after it, `allowed` in all.
        """
        assert seat.admitted and rows > 0 and (not draws or allowed > 0), seat
        self.withdraw(seat)
        seat.rows, seat.draws, seat.allowed = rows, draws, allowed
        if rows == 1 and draws:
            self._join(seat)
        else:
            self._prefills[seat] = None

    def allow(self, seat: Seat[S], tokens: int) -> None:
        """Lets a sequence draw so many tokens behind those that are in `fresh`, if it is to draw any."""
        left = tokens - self.in_step(seat)
        if left <= 0:
            self.withdraw(seat)
        elif seat.place >= 0:
            self._singles.allow(seat, left)
        else:
            seat.allowed = tokens

    def in_step(self, seat: Seat[S]) -> bool:
        """Whether a sequence is in the step that is planned and not done."""
        return self._planned is not None and seat.step == self.counts.steps

    def withdraw(self, seat: Seat[S]) -> None:
        """Takes a sequence out of the steps that are not planned yet."""
        if seat.place >= 0:
            self._singles.part(seat)
        self._prefills.pop(seat, None)
        seat.rows = 0

    def attach(self, units: Iterable[Attach[S]]) -> None:
        """Asks for units to be attached to sequences that have room."""
        self._units.extend(units)

    def make_way(self, seat: Seat[S], fits: Callable[[], bool], settled: Callable[[bool], None]) -> None:
        """Lets those who are behind a sequence give way before the next step, the last first, until it `fits`: that
        takes the room, before somebody who has given way can take it back. `settled` is called with whether it did."""
        self._ways.append((seat, fits, settled))

    def retire(self, seat: Seat[S]) -> None:
        """Nothing more is computed of a sequence, and it waits for nothing. What it holds counts until it leaves: who
        needs room meanwhile may take it, and must not find that there is none."""
        self.withdraw(seat)
        self._drop_units(seat)
        self._entered.pop(seat, None)
        seat.need = None
        ways, self._ways = self._ways, [way for way in self._ways if way[0] is not seat]
        for asking, _, settled in ways:
            if asking is seat:
                settled(False)

    def leave(self, seat: Seat[S]) -> None:
        """Forgets a sequence, which holds nothing any more."""
        self.retire(seat)
        self._running.pop(seat, None)
        seat.admitted = False
        self.tenants.leave(seat.tenant)
        self._freed = True

    def fail_all(self, error: Exception) -> None:
        """Lets nobody go on."""
        for seat in (*self._entered, *self._running):
            self.withdraw(seat)
            self._drop_units(seat)
            seat.error = error
            seat.wake()
        self._entered.clear()
        self._planned = None

    def freed(self) -> None:
        """Something was given back to the pools, or is shared now."""
        self._freed = True

    # -- one step ----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan[S] | None:
        """The next step. None if there is nothing to do. Not while a step is running."""
        while self._ways:
            self._make_way(*self._ways.pop(0))
        if self._freed:
            self._admit()
        singles = self._take_singles()
        shares = self._take_shares(self.max_rows - len(singles))
        # Whoever has given way for somebody's pages is in no step.
        shares = [share for share in shares if share.seat.admitted]
        if self._freed:
            singles = [seat for seat in singles if seat.admitted and seat.error is None]
        plan = Plan(self._take_units(), shares, singles)
        if not any(plan):
            return None
        number = self.counts.steps
        for seat in singles:
            seat.step = number
        for share in shares:
            share.seat.step = number
        if plan.rows:
            self.counts.batches.append(len(singles) + len(shares))
        self._planned = plan
        return plan

    def done(
        self,
        plan: Plan[S],
        outcomes: Sequence[Outcome],
        *,
        failed: bool = False,
        ended: Collection[Seat[S]] = (),
    ) -> None:
        """Notes what a step has come to.

        Args:
            outcomes: of the singles in order, then of the shares.
            failed: there is a failure among them.
            ended: who draws no token behind this one, although it is none of its `stops`.
        """
        assert plan is self._planned, "another step is running"
        self._planned = None
        self.counts.steps += 1
        self.counts.rows += plan.rows
        singles, shares = outcomes[: len(plan.singles)], outcomes[len(plan.singles) :]
        ends = [*ended]
        for seat, token in zip(plan.singles, singles, strict=True):
            seat.fresh.append(token)
            if token in seat.stops:
                ends.append(seat)
        for share, token in zip(plan.shares, shares, strict=True):
            self._done_share(share, token)
        for seat in ends:
            self.withdraw(seat)
        if failed:
            for seat, outcome in zip((*plan.singles, *(share.seat for share in plan.shares)), outcomes, strict=True):
                if isinstance(outcome, Exception):
                    seat.fresh.remove(outcome)
                    seat.error = outcome
                    self.withdraw(seat)

    def _done_share(self, share: Share[S], outcome: Outcome) -> None:
        seat = share.seat
        seat.tenant.served += share.rows
        if outcome is not None:
            seat.fresh.append(outcome)
            seat.allowed -= 1
        if seat not in self._prefills:
            return  # its owner has taken it out meanwhile
        seat.rows -= share.rows
        if not seat.rows:
            del self._prefills[seat]
            if share.draws and outcome not in seat.stops and seat.allowed > 0:
                self._join(seat)

    # -- what goes into it -------------------------------------------------------------------------------------------

    def _take_units(self) -> list[Attach[S]]:
        if len(self._units) > self.max_units:
            self._units.sort(key=lambda unit: order(unit.seat))
        units, self._units = self._units[: self.max_units], self._units[self.max_units :]
        return units

    def _take_singles(self) -> list[Seat[S]]:
        seats, short, spent = self._singles.take(self.max_rows)
        try:
            self._accounts.grow([(seat.sequence, 1) for seat in short])
        except Overloaded:
            # There are not enough pages for all of them: one after the other, and somebody gives way.
            short = [seat for seat in short if seat.admitted and self._grow(seat, 1)]
        for seat in short:
            if seat.place >= 0:
                self._singles.refill(seat, self._accounts.slack(seat.sequence) - 1)
        for seat in spent:
            self.withdraw(seat)
        return seats

    def _take_shares(self, budget: int) -> list[Share[S]]:
        shares: list[Share[S]] = []
        if not self._prefills:
            return shares
        for seat in sorted(self._prefills, key=order):
            if budget <= 0:
                break
            if not seat.admitted:
                continue
            seat.rows -= self._accounts.share(seat.sequence)
            if seat.rows <= 0:  # others have computed all that it wanted
                self.withdraw(seat)
                seat.wake()
                continue
            rows = min(seat.rows, budget)
            if self._grow(seat, rows):
                budget -= rows
                shares.append(Share(seat, rows, seat.draws and rows == seat.rows))
        return shares

    def _join(self, seat: Seat[S]) -> None:
        seat.rows = 1
        self._singles.join(seat, slack=self._accounts.slack(seat.sequence))

    # -- room --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Lets in whoever has room, one after the other: who does not fit holds up those behind."""
        self._freed = False
        while self._entered:
            seat = min(self._entered, key=order)
            assert seat.need is not None, "it waits"
            lower = sorted((one for one in self._tenants_own(seat) if one.priority < seat.priority), key=rank)
            while not self._admits(seat, seat.need):
                if not lower:
                    return
                self._preempt(lower.pop())
            self._let_in(seat)

    def _admits(self, seat: Seat[S], need: Room) -> bool:
        """Each that runs may need a page any time, and must not give way for want of it at once."""
        running = len(self._running)
        return running < self.max_running and self._accounts.admit(seat.sequence, need, spare=running)

    def _let_in(self, seat: Seat[S]) -> None:
        del self._entered[seat]
        seat.need, seat.admitted = None, True
        self._running[seat] = None
        seat.wake()

    def _grow(self, seat: Seat[S], rows: int) -> bool:
        """Gives a sequence pages for its next rows, if need be those of others. False if it has given way itself, or
        has failed because there is nobody else."""
        while True:
            try:
                self._accounts.grow([(seat.sequence, rows)])
            except Overloaded as error:
                if len(self._running) == 1:
                    self.withdraw(seat)
                    seat.error = error
                    self._freed = True
                    seat.wake()
                    return False
                victim = self._last()
                self._preempt(victim)
                if victim is seat:
                    return False
            else:
                return True

    def _make_way(self, seat: Seat[S], fits: Callable[[], bool], settled: Callable[[bool], None]) -> None:
        while seat.admitted and not fits():
            victim = self._last()
            if victim is seat:
                settled(False)
                return
            self._preempt(victim)
        settled(seat.admitted)

    def _last(self) -> Seat[S]:
        """Who gives way: of the tenant of whom one came last, the last of the lowest priority."""
        return max(self._tenants_own(max(self._running, key=lambda seat: seat.arrival)), key=rank)

    def _tenants_own(self, seat: Seat[S]) -> Iterable[Seat[S]]:
        return (one for one in self._running if one.tenant is seat.tenant)

    def _preempt(self, seat: Seat[S]) -> None:
        """Takes back all that a sequence holds. Its owner enters it anew."""
        self.withdraw(seat)
        self._drop_units(seat)
        del self._running[seat]
        self._accounts.share(seat.sequence)  # it may find it again
        self._accounts.release(seat.sequence)
        seat.admitted, seat.preempted = False, True
        self.counts.preempted += 1
        self._freed = True
        seat.wake()

    def _drop_units(self, seat: Seat[S]) -> None:
        dropped = [unit for unit in self._units if unit.seat is seat]
        self._units = [unit for unit in self._units if unit.seat is not seat]
        for unit in dropped:
            unit.settled(False)
