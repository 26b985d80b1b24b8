"""Who runs next: packs the next rows of all sequences of a model into steps.

Continuous batching: a sequence joins the next step whenever it has rows to compute and leaves it whenever it has none.
A step takes first the sequences that compute one row, whose callers wait for the next token, and fills the rest of its
budget, an eighth of it at least, with pieces of prefills, cut wherever the budget ends. Units are attached in the same
steps, within a budget of their own. Who goes first is decided by what its tenant has had, then by priority, then by
arrival: priorities order the requests of a tenant, and reach no further.

Who has room, and who must give it back when the pages run out, is for `decoder_service.rooms`.

It is counting throughout: sequences by name, rows, tokens and pages by number. It has seen no tensor, and what a token
means it does not know beyond whether it ends a sequence. Nothing here waits: `decoder_service.stepping` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from chiasm.errors import Overloaded
from chiasm.fairness import Sharers
from decoder_service.room import Room
from decoder_service.rooms import Accounts, Rooms
from decoder_service.seats import Attach, Outcome, Plan, S, Seat, Share, order
from decoder_service.singles import Singles


@dataclass(slots=True)
class StepCounts:
    """Since the scheduler was made.

    Attributes:
        rows: computed in all steps together.
        batches: sequences of each of the last thousand steps.
    """

    steps: int = 0
    rows: int = 0
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
        self._accounts = accounts
        self.tenants = Sharers()
        self._arrived = 0
        self._rooms = Rooms(accounts, max_running=max_running or max_rows, stop=self._stop)
        self._prefills: dict[Seat[S], None] = {}
        self._units: list[Attach[S]] = []
        self._planned: Plan[S] | None = None
        self._singles: Singles[S] = Singles()

    # -- what owners say of their sequences --------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that have room."""
        return len(self._rooms.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self._rooms.entered)

    @property
    def preempted(self) -> int:
        """Sequences that had to give way, since it was made."""
        return self._rooms.preempted

    @property
    def max_running(self) -> int:
        return self._rooms.max_running

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
        self._rooms.enter(seat, need)
        self._note(seat)

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
        self._note(seat)

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
        self._note(seat)

    def attach(self, units: Iterable[Attach[S]]) -> None:
        """Asks for units to be attached to sequences that have room."""
        self._units.extend(units)

    def make_way(self, seat: Seat[S], fits: Callable[[], bool], settled: Callable[[bool], None]) -> None:
        """Lets those who are behind a sequence give way before the next step, the last first, until it `fits`: that
        takes the room, before somebody who has given way can take it back. `settled` is called with whether it did."""
        self._rooms.ways.append((seat, fits, settled))

    def retire(self, seat: Seat[S]) -> None:
        """Nothing more is computed of a sequence, and it waits for nothing. What it holds counts until it leaves: who
        needs room meanwhile may take it, and must not find that there is none."""
        self._stop(seat)
        self._rooms.retire(seat)
        self._note(seat)

    def leave(self, seat: Seat[S]) -> None:
        """Forgets a sequence, which holds nothing any more."""
        self.retire(seat)
        self._rooms.leave(seat)
        self.tenants.leave(seat.tenant)

    def fail_all(self, error: Exception) -> None:
        """Lets nobody go on."""
        for seat in (*self._rooms.entered, *self._rooms.running):
            self.retire(seat)
            seat.error = error
            seat.wake()

    def give_up(self, plan: Plan[S] | None, error: Exception) -> None:
        """The step that was running came to nothing, and nobody goes on."""
        self._planned = None
        self.fail_all(error)
        for unit in () if plan is None else plan.units:
            unit.settled(error)

    def freed(self) -> None:
        """Something was given back to the pools, or is shared now."""
        self._rooms.freed = True

    # -- one step ----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan[S] | None:
        """The next step. None if there is nothing to do. Not while a step is running."""
        self._rooms.settle()
        # However many draw, prompts get on: else those who have room would wait for those who have no end.
        singles = self._take_singles(self.max_rows - (max(1, self.max_rows // 8) if self._prefills else 0))
        shares = self._take_shares(self.max_rows - len(singles))
        # Whoever has given way for somebody's pages is in no step.
        shares = [share for share in shares if share.seat.admitted]
        if self._rooms.freed:
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
            self._note(seat)

    # -- what goes into it -------------------------------------------------------------------------------------------

    def _take_units(self) -> list[Attach[S]]:
        if len(self._units) > self.max_units:
            self._units.sort(key=lambda unit: order(unit.seat))
        units, self._units = self._units[: self.max_units], self._units[self.max_units :]
        return units

    def _take_singles(self, most: int) -> list[Seat[S]]:
        seats, short, spent = self._singles.take(most)
        try:
            self._accounts.grow([(seat.sequence, 1) for seat in short])
        except Overloaded:
            # There are not enough pages for all of them: one after the other, and somebody gives way.
            short = [seat for seat in short if seat.admitted and self._rooms.grow(seat, 1)]
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
            if self._rooms.grow(seat, rows):
                budget -= rows
                shares.append(Share(seat, rows, seat.draws and rows == seat.rows))
        return shares

    def _note(self, seat: Seat[S]) -> None:
        """Whether a sequence wants anything may have changed."""
        wanting = bool(seat.rows) or seat.need is not None
        if wanting != seat.wanting:
            seat.wanting = wanting
            (self.tenants.want if wanting else self.tenants.rest)(seat.tenant)

    def _join(self, seat: Seat[S]) -> None:
        seat.rows = 1
        self._singles.join(seat, slack=self._accounts.slack(seat.sequence))

    def _stop(self, seat: Seat[S]) -> None:
        """Nothing of a sequence is in the steps that are not planned yet."""
        self.withdraw(seat)
        dropped = [unit for unit in self._units if unit.seat is seat]
        self._units = [unit for unit in self._units if unit.seat is not seat]
        for unit in dropped:
            unit.settled(False)
