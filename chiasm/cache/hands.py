"""Threads for what takes a millisecond or two and is not to stop an event loop: an entry that is copied or digested.

asyncio's own hand-over makes three futures, shielded, and goes through the loop as often. Here it is one queue and one
future, in half the time. It knows nothing of entries.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

_MOST: Final = 8
"""Threads: what copies and digests is soon as fast as the memory."""


async def by_hand(work: Callable[[], T]) -> T:
    """What `work` returns or raises in a thread. It is always waited for: whoever is cancelled meanwhile leaves when it
    has ended, so that what it reads and writes may go then."""
    made: list[T] = []

    def kept() -> None:
        made.append(work())

    loop = asyncio.get_running_loop()
    ended = _Ended(loop=loop)
    _queue(os.getpid()).put((kept, ended, loop))
    error = await ended
    if error is not None:
        raise error
    return made[0]


class _Ended(asyncio.Future[BaseException | None]):
    """That a work has ended, and with what error. Nothing ends it sooner: a task that is cancelled while it waits for
    this hears of it afterwards."""

    def cancel(self, msg: object = None) -> bool:
        return False


_Handed: TypeAlias = tuple[Callable[[], None], _Ended, asyncio.AbstractEventLoop]


@cache
def _queue(process: int) -> SimpleQueue[_Handed]:
    """Of one process: its threads are not in a fork of it."""
    queue: SimpleQueue[_Handed] = SimpleQueue()
    for number in range(min(_MOST, os.cpu_count() or 1)):
        threading.Thread(target=_serve, args=(queue,), name=f"chiasm-hand-{number}", daemon=True).start()
    return queue


def _serve(queue: SimpleQueue[_Handed]) -> None:
    while True:
        work, ended, loop = queue.get()
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop was closed, and nobody waits
            loop.call_soon_threadsafe(ended.set_result, error)
        del work, ended, loop, error  # while it waits for the next, it keeps nothing alive
