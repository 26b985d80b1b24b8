"""An event loop in a thread of its own, for callers that have none.

The synchronous client runs everything here, so it works inside notebooks and other programs whose own loop is busy.
Knows coroutines, not requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from chiasm.errors import Cancelled

T = TypeVar("T")

CANCEL_SECONDS = 5.0
"""How long a caller who was interrupted waits for the work to be undone."""


class LoopThread:
    """A running event loop. Any thread may use it, several at a time."""

    def __init__(self, name: str = "chiasm-client") -> None:
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=_serve, args=(ready,), name=name, daemon=True)
        self._thread.start()
        self._loop, self._stop = ready.result()

    def is_current(self) -> bool:
        """Whether the calling thread is the loop's own."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end and returns its result.

        An exception in the waiting thread, as Ctrl-C raises one, cancels the coroutine and waits until it has ended.

        Raises what the coroutine raises; Cancelled if it was cancelled; RuntimeError if the loop was stopped.
        """
        assert not self.is_current(), "the loop would wait for itself"
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            task = self._loop.create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(lambda done: _settle(outcome, done))

        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("the client is closed")
        try:
            self._loop.call_soon_threadsafe(start)
            return outcome.result()
        except BaseException:
            if not outcome.done() and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                wait([outcome], timeout=CANCEL_SECONDS)
            raise

    def stop(self) -> None:
        """Cancels what still runs and ends the thread. Twice is fine."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


def _settle(outcome: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        outcome.set_exception(Cancelled("the call was cancelled"))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _serve(ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    asyncio.run(main())
