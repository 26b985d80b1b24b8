"""Generators that run ahead of who reads them, and tasks that are waited for to their end.

Nothing here knows what is generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class Bell:
    """Wakes the one task that waits for it. An `asyncio.Event` has room for many, and many calls have one and wait."""

    __slots__ = ("_rung", "_waits")

    def __init__(self) -> None:
        self._rung = False
        self._waits: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._rung = True
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    def hush(self) -> None:
        """What it was rung for is looked at from now on."""
        self._rung = False

    async def wait(self) -> None:
        """Until it is rung; not at all if it was since it was hushed."""
        if self._rung:
            return
        self._waits = asyncio.get_running_loop().create_future()
        try:
            await self._waits
        finally:
            self._waits = None


async def ahead(source: AsyncGenerator[T, None], *, items: int) -> AsyncGenerator[T, None]:
    """The items of `source`, which runs in a task of its own and ahead of its reader by at most `items`.

    What `source` raises is raised behind its last item. Leaving this generator cancels `source` and waits for its end.
    """
    made: list[T] = []
    more, fewer = Bell(), Bell()

    async def run() -> None:
        async with aclosing(source):
            async for item in source:
                while len(made) == items:
                    fewer.hush()
                    await fewer.wait()
                made.append(item)
                more.ring()

    def over(task: asyncio.Task[None]) -> None:
        more.ring()
        if not task.cancelled():
            task.exception()  # now it is no news, for a reader who leaves before

    running = asyncio.create_task(run())
    running.add_done_callback(over)
    try:
        while made or not running.done():
            if not made:
                more.hush()
                await more.wait()
                continue
            item = made.pop(0)
            fewer.ring()
            yield item
        running.result()
    finally:
        running.cancel()
        await ended(running)


async def ended(task: asyncio.Task[None]) -> None:
    """Waits until a task has ended, also when the caller is cancelled meanwhile: it is so after the wait."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
