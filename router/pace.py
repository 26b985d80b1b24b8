"""How soon a request would have its first token, told from how soon others had theirs. It knows costs and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

HALF_LIFE: Final = 10.0
"""Seconds, of those in which anybody waited, after which what was seen weighs half."""

SURE: Final = 8
"""Requests that must have begun before anything is foretold. They count for good: where all stand still, it is to be
known how long that takes."""


class Pace:
    """Little's law: whoever comes waits as long as what waits before it takes to begin. The pace is what began while
    anybody waited, by the time in which anybody waited, so that hours of rest say nothing.

    Args:
        clock: seconds, monotonic.

    Attributes:
        waiting: cost of the requests that wait for their first token.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting = 0
        self._clock = clock
        self._at = clock()
        self._seconds = 0.0
        self._begun = 0.0  # cost
        self._count = 0

    def came(self, cost: int) -> None:
        self._pass()
        self.waiting += cost

    def began(self, cost: int) -> None:
        """A request has its first token."""
        self._pass()
        self.waiting -= cost
        self._begun += cost
        self._count += 1

    def left(self, cost: int) -> None:
        """A request has ended without one. What it took of the workers is not known."""
        self._pass()
        self.waiting -= cost

    @property
    def rate(self) -> float | None:
        """Cost that begins in a second, if enough was seen."""
        self._pass()
        return self._begun / self._seconds if self._count >= SURE and self._seconds > 0 else None

    @property
    def wait(self) -> float:
        """Seconds that whoever comes now is to wait; 0 while too little was seen to tell."""
        rate = self.rate
        return 0.0 if not rate else self.waiting / rate

    def _pass(self) -> None:
        """Counts the time since it was last asked."""
        now = self._clock()
        if self.waiting:
            passed = now - self._at
            kept = 0.5 ** (passed / HALF_LIFE)
            self._seconds = self._seconds * kept + passed
            self._begun *= kept
        self._at = now
