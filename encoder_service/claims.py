"""Who of several encoders makes an entry: the one that claims it, while the others look whether it is there yet.

Equal media usually meet at one encoder. Where they do not, because they came at once to two routers or one encoder was
full, a claim in the store that both share lets one of them wait for the other. It is advice: whoever waits too long,
or gets no answer, makes the entry itself, and two that make it make the same. It knows keys and the store, no model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from chiasm.cache.sealed import EntryKey
from chiasm.cache.store import EntryStore

T = TypeVar("T")

SECONDS = 2.0
"""That a claim lasts, and so what an encoder that dies costs those who wait for its entry."""

PATIENCE = 5.0
"""Seconds after which nobody is waited for any more."""

_FIRST, _LONGEST = 0.01, 0.1
"""Seconds between two looks; each wait is half as long again as the one before."""


class Claims:
    """Of one process. Belongs to one event loop."""

    def __init__(self, store: EntryStore, *, seconds: float = SECONDS, patience: float = PATIENCE) -> None:
        self.store = store
        self._seconds = seconds
        self._patience = patience
        self._asking: dict[EntryKey, asyncio.Future[bool]] = {}  # whether it is to be made here
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def wait(self, key: EntryKey, look: Callable[[], Awaitable[T | None]]) -> T | None:
        """What `look` finds, if somebody else makes the entry in time; None if the caller is to make it, and begins to
        before it awaits anything else.

        Of those in one process who ask for the same entry at a time, one claims it for all.
        """
        while (asked := self._asking.get(key)) is not None:
            await asyncio.wait([asked])
            if not asked.cancelled() and asked.result():
                return None
            if not asked.cancelled() and (found := await look()) is not None:
                return found
        self._asking[key] = asked = asyncio.get_running_loop().create_future()
        try:
            found = await self._claim(key, look)
            asked.set_result(found is None)
            return found
        finally:
            del self._asking[key]
            asked.cancel()  # if nothing came of it: another one claims

    def end(self, key: EntryKey) -> None:
        """The entry is there, or will not be made. Nobody waits for this to be told."""
        if self._closed:
            return
        task = asyncio.create_task(self.store.unclaim(key))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Ends what is being told. Claims that stay end by themselves."""
        self._closed = True
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _claim(self, key: EntryKey, look: Callable[[], Awaitable[T | None]]) -> T | None:
        end, pause, waited = time.monotonic() + self._patience, _FIRST, False
        while not await self.store.claim(key, self._seconds):
            if time.monotonic() >= end:
                return None
            await asyncio.sleep(pause)
            pause, waited = min(1.5 * pause, _LONGEST), True
            if (found := await look()) is not None:
                return found
        if not waited:
            return None
        # Who had the claim may have put the entry between our last look and our claim.
        try:
            found = await look()
        except BaseException:
            self.end(key)
            raise
        if found is not None:
            self.end(key)
        return found
