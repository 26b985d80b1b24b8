"""Generators that run ahead of who reads them, and tasks that are waited for to their end.

Nothing here knows what is generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    """Follows the last item."""

    error: Exception | None


async def ahead(source: AsyncGenerator[T, None], *, items: int) -> AsyncGenerator[T, None]:
    """The items of `source`, which runs in a task of its own and ahead of its reader by at most `items`.

    What `source` raises is raised behind its last item. Leaving this generator cancels `source` and waits for its end.
    """
    made: asyncio.Queue[T | _End] = asyncio.Queue(items)

    async def run() -> None:
        end = _End(None)
        try:
            async with aclosing(source):
                async for item in source:
                    await made.put(item)
        except Exception as error:
            end = _End(error)
        await made.put(end)

    running = asyncio.create_task(run())
    try:
        while not isinstance(item := await made.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
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
