"""A circuit breaker: whoever calls something that does not answer is told so at once, until it answers again.

Closed, calls are made. After some failures in a row it is open: nobody calls, and nobody waits. Every now and then it
is half open, while one probe is on its way; the first that succeeds closes it, on trial: the next failure opens it
again, and for longer. It knows no server and no call, only how they ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import StrEnum


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Belongs to one event loop. Probes are made by a task of its own, so that no caller pays for them.

    Args:
        probe: asks for as little as possible. Says whether it was answered; raises nothing.
        failures: in a row, that open it.
        pause: seconds before the first probe; each further one waits twice as long, until a call succeeds.
        longest: seconds between two probes at most.

    Attributes:
        state: as it is.
        opened: how often it opened.
    """

    def __init__(
        self, probe: Callable[[], Awaitable[bool]], *, failures: int = 3, pause: float = 0.25, longest: float = 5.0
    ) -> None:
        self._probe = probe
        self._limit = failures
        self._first_pause = self._pause = pause
        self._longest = longest
        self._failures = 0
        self._probing: asyncio.Task[None] | None = None
        self.state = State.CLOSED
        self.opened = 0
        self._since = 0.0  # when it opened, by the loop's clock
        self._mended = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether calls are to be made."""
        return self.state is State.CLOSED

    def succeeded(self) -> None:
        """A call was answered. Of one that began before it opened, nothing is concluded."""
        if self.closed:
            self._failures = 0
            self._pause = self._first_pause

    def failed(self) -> bool:
        """A call was not answered. Returns whether that opened it."""
        if not self.closed:
            return False
        self._failures += 1
        if self._failures < self._limit:
            return False
        self.state = State.OPEN
        self.opened += 1
        self._since = asyncio.get_running_loop().time()
        self._mended.clear()
        self._probing = asyncio.create_task(self._recover())
        return True

    async def mended(self, seconds: float) -> bool:
        """Waits for one that is open to close, until so many seconds after it opened. Returns whether it was open and
        is closed: a call that was not made may be made now."""
        if self.closed:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._since + seconds):
                await self._mended.wait()
        return self.closed

    async def close(self) -> None:
        """Ends the probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _recover(self) -> None:
        while True:
            self.state = State.OPEN
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, self._longest)
            self.state = State.HALF_OPEN
            if await self._probe():
                break
        self._failures = self._limit - 1
        self.state = State.CLOSED
        self._mended.set()
