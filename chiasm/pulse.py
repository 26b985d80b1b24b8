"""Whether threads get on with what they are given.

A thread that has nothing to do says nothing and is well. One that has something, and has finished nothing for longer
than any piece of work may take, hangs; how busy it is makes no difference. It knows times, and no work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Pulse:
    """Of one kind of work. May be asked and told from any thread.

    Args:
        name: for people, for example `model`.
        clock: seconds, monotonic.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._pending = 0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """Since a piece of work was finished, or the first one was given; 0 while there is none."""
        with self._lock:
            return self._clock() - self._since if self._pending else 0.0

    def given(self) -> None:
        with self._lock:
            if not self._pending:
                self._since = self._clock()
            self._pending += 1

    def done(self) -> None:
        with self._lock:
            self._pending -= 1
            self._since = self._clock()


class PulsedThreads(ThreadPoolExecutor):
    """Threads whose work has a pulse. Work that is taken back before it began counts as done.

    Args:
        count: of threads.
        name: of them, and of the pulse.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self.pulse = Pulse(name)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        self.pulse.given()
        try:
            future = super().submit(fn, *args, **kwargs)
        except BaseException:
            self.pulse.done()
            raise
        future.add_done_callback(lambda _: self.pulse.done())
        return future


class Standing(NamedTuple):
    """How a process stands, as it tells those who ask.

    Attributes:
        missing: what it lacks to take anything new, for people.
        stalled: a thread hangs, and with it whatever the process has.
    """

    missing: Sequence[str] = ()
    stalled: bool = False
