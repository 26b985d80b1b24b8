"""The calls of a worker: how many it works on, how many wait and for how much, and which it refuses. It knows nothing
of what they do.

A call waits from the moment it comes, and runs from when it `begin`s to when it `finish`es; one that finds all it needs
finishes without having begun. A call that runs must not wait for one that has not begun, or two could wait for each
other for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from chiasm.errors import DeadlineExceeded, Overloaded
from chiasm.fairness import Sharer, Sharers

RETRY_SECONDS: Final = 1.0
"""After which a caller that was refused may try again. What it waited for is then done, or somebody else's turn."""


class Turns:
    """Used from one event loop.

    Args:
        max_waiting: calls that may wait; a further one is refused.
        max_running: calls that may run at a time, the others wait for their turn: the tenant that has had less goes
            first, and of its calls the one that came first. None leaves it to whatever else bounds them.
        max_cost: of the calls that wait; while they cost so much, a further one is refused. What a call costs is known
            when it has come in, so the last one may go beyond it, however large it is. None for no bound.
        clock: seconds, monotonic.

    Attributes:
        running: calls that have begun.
        cost: of all calls that have not finished, as `Turn.weigh` was told.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        max_running: int | None = None,
        max_cost: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_waiting >= 1
        assert max_running is None or max_running >= 1
        self.max_waiting = max_waiting
        self.max_running = max_running
        self.max_cost = max_cost
        self.running = 0
        self.cost = 0
        self._clock = clock
        self._since: dict[Turn, float] = {}  # when each that waits came, in order
        self._line: dict[Turn, asyncio.Future[None]] = {}  # those of them that would begin
        self._sharers = Sharers()

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._since)

    @property
    def waiting_cost(self) -> int:
        """What they cost, as far as is known."""
        return sum(turn.cost for turn in self._since)

    @property
    def oldest_wait(self) -> float:
        """Seconds that the call has waited which waits longest; 0 if none does."""
        return self._clock() - next(iter(self._since.values())) if self._since else 0.0

    @contextmanager
    def enter(self, seconds: float | None = None) -> Iterator[Turn]:
        """Counts a call while the block lasts. Raises Overloaded QUEUE_FULL.

        Args:
            seconds: until its caller has left. It does not begin after that.
        """
        if self.waiting >= self.max_waiting:
            raise _full(f"{self.waiting} calls wait, {self.max_waiting} may", self.waiting, self.max_waiting)
        if self.max_cost is not None and (cost := self.waiting_cost) >= self.max_cost:
            raise _full(f"calls that cost {cost} wait, {self.max_cost} may", cost, self.max_cost)
        turn = Turn(self, None if seconds is None else self._clock() + seconds)
        self._since[turn] = self._clock()
        try:
            yield turn
        finally:
            turn.finish()

    async def _begin(self, turn: Turn) -> None:
        turn.check()
        sharer = self._sharers.enter(turn.tenant)
        try:
            if self._line or not self._has_place:
                await self._wait(turn, sharer)
            else:
                self._let_begin(turn, sharer)
        finally:
            self._sharers.leave(sharer)

    async def _wait(self, turn: Turn, sharer: Sharer) -> None:
        turn.sharer = sharer
        place = self._line[turn] = asyncio.get_running_loop().create_future()
        self._sharers.want(sharer)
        try:
            await place
        finally:
            self._line.pop(turn, None)
            self._sharers.rest(sharer)

    @property
    def _has_place(self) -> bool:
        return self.max_running is None or self.running < self.max_running

    def _let_begin(self, turn: Turn, sharer: Sharer) -> None:
        del self._since[turn]
        self.running += 1
        turn.running = True
        if not turn.begun:
            turn.begun = True
            sharer.served += max(turn.cost, 1)

    def _give_places(self) -> None:
        """Lets those begin whose turn it is. One whose caller has left meanwhile is told so and takes no place."""
        while self._line and self._has_place:
            turn = min(self._line, key=lambda one: (one.sharer.served, self._since[one]))
            place = self._line.pop(turn)
            if place.done():  # it leaves at this moment
                continue
            try:
                turn.check()
            except DeadlineExceeded as error:
                place.set_exception(error)
            else:
                self._let_begin(turn, turn.sharer)
                place.set_result(None)

    def _step_aside(self, turn: Turn) -> None:
        self._since[turn] = self._clock()
        self._finish()

    def _finish(self) -> None:
        self.running -= 1
        self._give_places()


class Turn:
    """One call that was let in.

    Attributes:
        tenant: for whom it is; calls of tenants take turns.
        cost: what it is to cost, in whatever unit all calls of these turns have; 0 while that is not known.
        running: it has begun, and has not finished.
        begun: it has run, and was counted for its tenant.
    """

    sharer: Sharer

    def __init__(self, turns: Turns, until: float | None) -> None:
        self.tenant = b""
        self.cost = 0
        self.running = False
        self.begun = False
        self._turns = turns
        self._until = until
        self._finished = False

    def weigh(self, cost: int, tenant: bytes = b"") -> None:
        """Says what the call costs and for whom it is, before it begins."""
        if not self._finished:
            self._turns.cost += cost - self.cost
        self.cost, self.tenant = cost, tenant

    def check(self) -> None:
        """Raises DeadlineExceeded if its caller has left: nothing is begun for nobody."""
        if self._until is not None and self._turns._clock() >= self._until:
            raise DeadlineExceeded("the deadline passed while the call waited for its turn", stage="queue")

    async def begin(self) -> None:
        """Waits until the call may run. Raises DeadlineExceeded, as `check`."""
        await self._turns._begin(self)

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """Leaves its place to others while the block waits for the caller, and waits for its turn again behind it."""
        running, self.running = self.running, False
        if running:
            self._turns._step_aside(self)
        yield
        if running:
            await self.begin()

    def finish(self) -> None:
        """The call has done its work, even if it goes on waiting for its caller. May be called twice."""
        if not self._finished:
            self._finished = True
            self._turns.cost -= self.cost
        if self.running:
            self.running = False
            self._turns._finish()
        else:
            self._turns._since.pop(self, None)


def _full(what: str, waiting: int, limit: int) -> Overloaded:
    return Overloaded("QUEUE_FULL", what, retry_after=RETRY_SECONDS, facts={"waiting": waiting, "limit": limit})
