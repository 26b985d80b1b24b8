"""Writing to a slow store behind a fast one's back: what waits is bounded in bytes, and what is too much is dropped.

It knows how large a write is and how to make it, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from chiasm.cache.sealed import EntryKey


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
        self._waiting: OrderedDict[EntryKey, tuple[int, Callable[[], Awaitable[object]]]] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()
        self._making: dict[EntryKey, asyncio.Future[None]] = {}  # under which something is being written
        self.bytes = 0
        self.dropped = 0

    def add(self, key: EntryKey, nbytes: int, write: Callable[[], Awaitable[object]]) -> None:
        """Has something written soon, in place of what still waits under the same key, and after what is being written
        there; or drops it."""
        self.forget(key)
        if self.bytes + nbytes > self._budget:
            self.dropped += 1
            return
        self.bytes += nbytes
        self._waiting[key] = (nbytes, write)
        if len(self._running) < self._writers:
            task = asyncio.create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def forget(self, key: EntryKey) -> None:
        """Takes back what still waits under a key."""
        nbytes, _ = self._waiting.pop(key, (0, None))
        self.bytes -= nbytes

    def clear(self) -> None:
        """Takes back all that waits."""
        for key in list(self._waiting):
            self.forget(key)

    async def written(self, key: EntryKey) -> None:
        """Returns when what is being written under a key, if anything is, has been."""
        if (made := self._making.get(key)) is not None:
            await asyncio.wait([made])

    async def arrived(self, key: EntryKey) -> None:
        """Returns when nothing waits and nothing is being written under a key."""
        while key in self._waiting or key in self._making:
            if self._making:
                await asyncio.wait(list(self._making.values()), return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(0)  # a writer has just been made for it

    async def paused(self) -> None:
        """Returns when what is being written now has been."""
        if self._making:
            await asyncio.wait(list(self._making.values()))

    async def settled(self) -> None:
        """Returns when nothing waits and nothing is being written."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Drops what waits and what is being written."""
        self.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while (key := next((key for key in self._waiting if key not in self._making), None)) is not None:
                nbytes, write = self._waiting.pop(key)
                self._making[key] = made = asyncio.get_running_loop().create_future()
                try:
                    await write()
                finally:
                    self.bytes -= nbytes
                    del self._making[key]
                    made.set_result(None)
        finally:  # at once: whoever adds something next makes another writer for it
            task = asyncio.current_task()
            assert task is not None
            self._running.discard(task)
