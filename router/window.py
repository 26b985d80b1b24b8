"""What waits between a decoder and a client: so many events, so many bytes, and for so long. It knows neither of them.

A client that reads more slowly than its decoder draws is waited for until it has read half of what waits. One that does
not read is let go, and what waited for it with it: it holds a seat in a decoder that others want.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

from chiasm.errors import ServerError

EVENTS: Final = 256
"""Events that wait for a client at most, beside the one that is put last."""

BYTES: Final = 1 << 20
"""And their bytes."""

PATIENCE: Final = 30.0
"""Seconds that a client is given to make room."""


def slow_consumer(seconds: float) -> ServerError:
    """How a request ends whose client does not read."""
    return ServerError(
        "SLOW_CONSUMER",
        f"nothing was read for {seconds:g} s of what waited",
        code="ABORTED",
        facts={"seconds": seconds},
    )


E = TypeVar("E", bound=Message)


class Window(Generic[E]):
    """A queue with one reader and one writer at a time.

    Args:
        events, size: more than so many events, or bytes of them, do not wait.
        patience: seconds to wait for room.
    """

    def __init__(self, *, events: int = EVENTS, size: int = BYTES, patience: float = PATIENCE) -> None:
        self._events = events
        self._size = size
        self._patience = patience
        self._waiting: deque[tuple[E, int]] = deque()
        self._bytes = 0
        self._there = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._over = False
        self._error: Exception | None = None

    async def put(self, event: E) -> None:
        """Adds an event, then waits until there is room for another. Whoever is cancelled meanwhile has added it.

        Raises ServerError SLOW_CONSUMER if no room is made in time.
        """
        if self._over:
            return  # nobody reads any more
        size = event.ByteSize()
        self._waiting.append((event, size))
        self._bytes += size
        self._there.set()
        if len(self._waiting) < self._events and self._bytes < self._size:
            return
        self._room.clear()
        try:
            async with asyncio.timeout(self._patience):
                await self._room.wait()
        except TimeoutError:
            raise slow_consumer(self._patience) from None

    async def get(self) -> E | None:
        """The next event; None behind the last. Raises what `end` was given, behind the events before it."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            self._there.clear()
            await self._there.wait()
        event, size = self._waiting.popleft()
        self._bytes -= size
        if 2 * len(self._waiting) <= self._events and 2 * self._bytes <= self._size:
            self._room.set()
        return event

    def end(self, error: Exception | None = None, *, at_once: bool = False) -> None:
        """Nothing more comes, because of an error if there is one; `at_once` what waits is not told either. The first
        end is the one that counts."""
        if self._over:
            return
        self._over, self._error = True, error
        if at_once:
            self._waiting.clear()
            self._bytes = 0
        self._there.set()
        self._room.set()
