"""Who may keep a process busy: so many jobs at a time, and no job keeps others waiting because its reader takes long.

A job whose reader takes its time with a frame has a process that does nothing. If others wait, one of them has its turn
meanwhile, and it waits for a turn again when its reader comes back. How many stand by like that is bounded, because
each keeps its process. It knows neither processes nor media.
"""

from __future__ import annotations

import asyncio


class Places:
    """Used from one event loop.

    Args:
        turns: jobs that work at a time; further ones wait, first come first served.
        standing: jobs that may stand by without a turn.
    """

    def __init__(self, turns: int, standing: int) -> None:
        self._turns = asyncio.Semaphore(turns)
        self._most_standing = standing
        self._standing = 0
        self._waiting = 0
        self._lenders: dict[Place, None] = {}  # with a turn that they do not need now

    async def _acquire(self) -> None:
        self._waiting += 1
        try:
            self._lend()
            await self._turns.acquire()
        finally:
            self._waiting -= 1

    def _lend(self) -> None:
        """Whoever has a turn and waits for its reader gives it to one who waits for a turn."""
        if self._waiting and self._lenders and self._standing < self._most_standing and self._turns.locked():
            place = next(iter(self._lenders))
            del self._lenders[place]
            place._has_turn = False
            self._standing += 1
            self._turns.release()

    def _rise(self) -> None:
        self._standing -= 1
        self._lend()


class Place:
    """One job's."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._has_turn = False
        self._taken = False

    async def take(self) -> None:
        """Waits for a turn."""
        await self._places._acquire()
        self._has_turn = self._taken = True

    def stand_by(self) -> None:
        """The reader has something to do: others may have the turn."""
        self._places._lenders[self] = None
        self._places._lend()

    async def go_on(self) -> None:
        """The reader is back. Waits for a turn if somebody else has got it."""
        self._places._lenders.pop(self, None)
        if not self._has_turn:
            await self._places._acquire()
            self._has_turn = True
            self._places._rise()

    def keep(self) -> None:
        """The reader will not come back: whatever the place has is its own until `end`."""
        self._places._lenders.pop(self, None)

    def end(self) -> None:
        """Gives back what it has. Once, if it was taken."""
        self.keep()
        if not self._taken:
            return
        self._taken = False
        if self._has_turn:
            self._has_turn = False
            self._places._turns.release()
        else:
            self._places._rise()
