"""Who has room in the pools, who waits for it, and who gives way.

A sequence is admitted with room for what is laid, not for what it may come to say. When the pages run out, somebody who
came late gives back all it holds and waits to be admitted again: nothing of it is lost, for its timeline says what to
compute, and its entries are still where they were.

All of it is counting: sequences by name, rows and pages by number. It knows no step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from chiasm.errors import Overloaded
from decoder_service.room import Room
from decoder_service.seats import S, Seat, order, rank

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


class Rooms(Generic[S]):
    """Of one model's pools. Whoever has room may lose it in `settle` and `grow`, which are for between two steps.

    Args:
        accounts: of the pools.
        max_running: sequences that have room at the same time, at most.
        stop: takes a sequence out of the steps to come.

    Attributes:
        entered: who waits for room.
        running: who has room.
        freed: somebody who waits may have room now.
        ways: who needs others to give way, as `Scheduler.make_way` has it.
        preempted: sequences that had to give way so far.
    """

    def __init__(self, accounts: Accounts[S], *, max_running: int, stop: Callable[[Seat[S]], None]) -> None:
        self.max_running = max_running
        self.entered: dict[Seat[S], None] = {}
        self.running: dict[Seat[S], None] = {}
        self.freed = False
        self.ways: list[tuple[Seat[S], Callable[[], bool], Callable[[bool], None]]] = []
        self.preempted = 0
        self._accounts = accounts
        self._stop = stop

    def enter(self, seat: Seat[S], need: Room) -> None:
        """Lets a sequence wait for room, where there is none now."""
        assert not seat.admitted and seat.need is None, "it has room, or waits for it already"
        seat.preempted, seat.need = False, need
        self.entered[seat] = None
        if len(self.entered) == 1 and self._admits(seat, need):
            self._let_in(seat)
        else:
            self.freed = True

    def retire(self, seat: Seat[S]) -> None:
        """A sequence waits for nothing any more, and nobody gives way for it."""
        self.entered.pop(seat, None)
        seat.need = None
        ways, self.ways = self.ways, [way for way in self.ways if way[0] is not seat]
        for asking, _, settled in ways:
            if asking is seat:
                settled(False)

    def leave(self, seat: Seat[S]) -> None:
        """Forgets a sequence, which holds nothing any more."""
        self.running.pop(seat, None)
        seat.admitted = False
        self.freed = True

    def settle(self) -> None:
        """Lets those give way who have to, and lets those in who have room."""
        while self.ways:
            self._make_way(*self.ways.pop(0))
        if self.freed:
            self._admit()

    def _admit(self) -> None:
        """Lets in whoever has room, one after the other: who does not fit holds up those behind."""
        self.freed = False
        while self.entered:
            seat = min(self.entered, key=order)
            assert seat.need is not None, "it waits"
            lower = sorted((one for one in self._tenants_own(seat) if one.priority < seat.priority), key=rank)
            while not self._admits(seat, seat.need):
                if not lower:
                    return
                self._preempt(lower.pop())
            self._let_in(seat)

    def _admits(self, seat: Seat[S], need: Room) -> bool:
        """Each that runs may need a page any time, and must not give way for want of it at once."""
        running = len(self.running)
        return running < self.max_running and self._accounts.admit(seat.sequence, need, spare=running)

    def _let_in(self, seat: Seat[S]) -> None:
        del self.entered[seat]
        seat.need, seat.admitted = None, True
        self.running[seat] = None
        seat.wake()

    def grow(self, seat: Seat[S], rows: int) -> bool:
        """Gives a sequence pages for its next rows, if need be those of others. False if it has given way itself, or
        has failed because there is nobody else."""
        while True:
            try:
                self._accounts.grow([(seat.sequence, rows)])
            except Overloaded as error:
                if len(self.running) == 1:
                    self._stop(seat)
                    seat.error = error
                    self.freed = True
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
        return max(self._tenants_own(max(self.running, key=lambda seat: seat.arrival)), key=rank)

    def _tenants_own(self, seat: Seat[S]) -> Iterable[Seat[S]]:
        return (one for one in self.running if one.tenant is seat.tenant)

    def _preempt(self, seat: Seat[S]) -> None:
        """Takes back all that a sequence holds. Its owner enters it anew."""
        self._stop(seat)
        del self.running[seat]
        if seat.error is None:  # nobody shares what led to one
            self._accounts.share(seat.sequence)  # it may find it again
        self._accounts.release(seat.sequence)
        seat.admitted, seat.preempted = False, True
        self.preempted += 1
        self.freed = True
        seat.wake()
