"""Ctrl-C and SIGTERM for a command that has processes to end: the first is a wish, the second is an order.

Knows signals and a task.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Signals that came while a command runs.

    Attributes:
        hurry: called by every signal but the first: ends at once what was being ended in order.
        came: whether one came.
    """

    def __init__(self) -> None:
        self.hurry: Callable[[], None] = lambda: None
        self.came = False


def run(work: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    """Runs a command to its end. The first signal cancels it, and it undoes what it did. Main thread only.

    Raises KeyboardInterrupt if a signal ended it, and what it raises.
    """
    interrupts = Interrupts()

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"

        def interrupt() -> None:
            if interrupts.came:
                interrupts.hurry()
            else:
                interrupts.came = True
                task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, interrupt)
        try:
            return await work(interrupts)
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if interrupts.came:
            raise KeyboardInterrupt from None
        raise
