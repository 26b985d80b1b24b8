"""Who may keep a process busy: so many jobs at a time, and no job keeps others waiting because its reader takes long.

A long job gives what it makes to a reader piece by piece. While the reader takes its time its process does nothing, so
if others wait, one of them has its turn, and it waits for a turn again when its reader comes back. Each long job keeps
its process meanwhile, so they are bounded by themselves; short ones, which wait for nobody, never wait for that bound.
It knows neither processes nor media.
"""

from __future__ import annotations

import asyncio


class Places:
    """Used from one event loop.

    Args:
        turns: jobs that work at a time; further ones wait, first come first served.
        long: long jobs at a time, those that wait for a turn or for their reader included.
    """

    def __init__(self, turns: int, long: int) -> None:
        self._turns = asyncio.Semaphore(turns)
        self._rooms = asyncio.Semaphore(long)
        self._waiting = 0  # for a turn
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
        if self._waiting and self._lenders and self._turns.locked():
            place = next(iter(self._lenders))
            del self._lenders[place]
            place._has_turn = False
            self._turns.release()


class Place:
    """One job's.

    Args:
        long: whether it may `stand_by`.
    """

    def __init__(self, places: Places, *, long: bool) -> None:
        self._places = places
        self._long = long
        self._has_room = False
        self._has_turn = False

    async def take(self) -> None:
        """Waits for a turn. Whoever is cancelled has nothing to give back."""
        if self._long:
            await self._places._rooms.acquire()
            self._has_room = True
        try:
            await self._places._acquire()
        except BaseException:
            self.end()
            raise
        self._has_turn = True

    def stand_by(self) -> None:
        """The reader has something to do: others may have the turn."""
        assert self._long, "a short job waits for nobody"
        self._places._lenders[self] = None
        self._places._lend()

    async def go_on(self) -> None:
        """The reader is back. Waits for a turn if somebody else has got it."""
        self.keep()
        if not self._has_turn:
            await self._places._acquire()
            self._has_turn = True

    def keep(self) -> None:
        """The reader takes no time any more: a turn that was not lent is the job's own until `end`."""
        self._places._lenders.pop(self, None)

    def end(self) -> None:
        """Gives back what it has. May be called twice."""
        self.keep()
        if self._has_turn:
            self._has_turn = False
            self._places._turns.release()
        if self._has_room:
            self._has_room = False
            self._places._rooms.release()
