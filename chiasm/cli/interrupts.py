"""Ctrl-C, SIGTERM and a closed terminal, for a command that has processes to end.

The first signal is a wish, the second an order. Knows signals and a task.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Signals that came while a command runs.

    Attributes:
        hurry: called by every signal but the first: ends at once what was being ended in order.
    """

    def __init__(self) -> None:
        self.hurry: Callable[[], object] = lambda: None
        self._came = 0
        self._cancel: Callable[[], object] = lambda: None

    async def until_interrupted(self, work: Coroutine[Any, Any, T]) -> T:
        """Does the work in a task that the first signal cancels."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._came:
            task.cancel()
        return await task

    def __bool__(self) -> bool:
        return self._came > 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came += 1
        if self._came == 1:
            self._cancel()
        else:
            self.hurry()


def run(work: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    """Runs a command to its end. The first signal cancels it, and it undoes what it did. Main thread only.

    A signal that was ignored when the command began, as `nohup` asks for, stays ignored.

    Raises KeyboardInterrupt if a signal ended it, and what it raises.
    """
    interrupts = Interrupts()
    # Before there is a loop: a signal never meets one that is half made.
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupts) for number in heard}
    try:
        return asyncio.run(interrupts.until_interrupted(work(interrupts)))
    except asyncio.CancelledError:
        if interrupts:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
