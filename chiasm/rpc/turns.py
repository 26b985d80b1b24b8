"""The calls of a worker: how many it works on, how many wait, and which it refuses. It knows nothing of what they do.

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

from chiasm.errors import Overloaded

RETRY_SECONDS: Final = 1.0
"""After which a caller that was refused may try again. What it waited for is then done, or somebody else's turn."""


class Turns:
    """Used from one event loop.

    Args:
        max_waiting: calls that may wait; a further one is refused.
        max_running: calls that may run at a time, the others wait for their turn, first come first served. None leaves
            it to whatever else bounds them.
        clock: seconds, monotonic.
    """

    def __init__(
        self, *, max_waiting: int, max_running: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert max_waiting >= 1
        assert max_running is None or max_running >= 1
        self.max_waiting = max_waiting
        self.max_running = max_running
        self.running = 0
        """Calls that have begun."""
        self._places = None if max_running is None else asyncio.Semaphore(max_running)
        self._clock = clock
        self._since: dict[Turn, float] = {}  # when each that waits came, in order

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._since)

    @property
    def oldest_wait(self) -> float:
        """Seconds that the call has waited which waits longest; 0 if none does."""
        return self._clock() - next(iter(self._since.values())) if self._since else 0.0

    @contextmanager
    def enter(self) -> Iterator[Turn]:
        """Counts a call while the block lasts. Raises Overloaded QUEUE_FULL."""
        if self.waiting >= self.max_waiting:
            raise Overloaded(
                "QUEUE_FULL",
                f"{self.waiting} calls wait, {self.max_waiting} may",
                retry_after=RETRY_SECONDS,
                facts={"waiting": self.waiting, "limit": self.max_waiting},
            )
        turn = Turn(self)
        self._since[turn] = self._clock()
        try:
            yield turn
        finally:
            turn.finish()

    async def _begin(self, turn: Turn) -> None:
        if self._places is not None:
            await self._places.acquire()
        del self._since[turn]
        self.running += 1

    def _step_aside(self, turn: Turn) -> None:
        self._finish()
        self._since[turn] = self._clock()

    def _finish(self) -> None:
        self.running -= 1
        if self._places is not None:
            self._places.release()


class Turn:
    """One call that was let in."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._running = False

    async def begin(self) -> None:
        """Waits until the call may run."""
        await self._turns._begin(self)
        self._running = True

    @asynccontextmanager
    async def aside(self) -> AsyncIterator[None]:
        """Leaves its place to others while the block waits for the caller, and waits for its turn again behind it."""
        running, self._running = self._running, False
        if running:
            self._turns._step_aside(self)
        yield
        if running:
            await self.begin()

    def finish(self) -> None:
        """The call has done its work, even if it goes on waiting for its caller. May be called twice."""
        if self._running:
            self._running = False
            self._turns._finish()
        else:
            self._turns._since.pop(self, None)
