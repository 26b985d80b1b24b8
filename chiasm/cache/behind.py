"""Writing to a slow store behind a fast one's back: what waits is bounded in bytes, and what is too much is dropped.

It knows how large a write is and how to make it, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from chiasm.cache.sealed import EntryKey


class _Write(NamedTuple):
    nbytes: int
    make: Callable[[], Awaitable[object]]
    over: asyncio.Future[None]  # cancelled, however it ended


class Behind:
    """Belongs to one event loop.

    Args:
        budget: bytes of writes that wait or are being made, at most.
        writers: writes that are made at a time.

    Attributes:
        bytes: that wait or are being written.
        dropped: writes for which there was no room.
    """

    def __init__(self, budget: int, *, writers: int = 2) -> None:
        self._budget = budget
        self._writers = writers
        self._waiting: OrderedDict[EntryKey, _Write] = OrderedDict()
        self._writing: dict[EntryKey, _Write] = {}  # the last that was begun under each key
        self._running: set[asyncio.Task[None]] = set()
        self.bytes = 0
        self.dropped = 0

    def add(self, key: EntryKey, nbytes: int, write: Callable[[], Awaitable[object]]) -> None:
        """Has something written soon, in place of what still waits under the same key; or drops it."""
        self.forget(key)
        if self.bytes + nbytes > self._budget:
            self.dropped += 1
            return
        self.bytes += nbytes
        self._waiting[key] = _Write(nbytes, write, asyncio.get_running_loop().create_future())
        if len(self._running) < self._writers:
            task = asyncio.create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def forget(self, key: EntryKey) -> None:
        """Takes back what still waits under a key."""
        write = self._waiting.pop(key, None)
        if write is not None:
            self.bytes -= write.nbytes
            write.over.cancel()

    async def written(self, key: EntryKey) -> None:
        """Returns when nothing waits and nothing is being written under a key."""
        while (write := self._waiting.get(key) or self._writing.get(key)) is not None:
            await asyncio.wait([write.over])

    async def settled(self) -> None:
        """Returns when nothing waits and nothing is being written."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Drops what waits and what is being written."""
        for key in tuple(self._waiting):
            self.forget(key)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            key, write = self._waiting.popitem(last=False)
            self._writing[key] = write
            try:
                await write.make()
            finally:
                self.bytes -= write.nbytes
                write.over.cancel()
                if self._writing.get(key) is write:
                    del self._writing[key]
