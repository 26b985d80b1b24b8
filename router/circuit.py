"""A worker that says it is well and breaks every call: given a rest, then one call, then a longer rest.

It knows outcomes and a clock, no worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

BROKEN: Final = 3
"""Calls that break in a row, with none that ends well between them, after which a worker rests."""

FIRST_REST: Final = 1.0
"""Seconds; each later rest is twice as long, up to the longest."""

LONGEST_REST: Final = 60.0


class Circuit:
    """Of one life of a worker. A call that its caller gave up says nothing.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._broken = 0
        self._rest = FIRST_REST
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether it has broken so many calls that it is given one at a time, at most."""
        return self._broken >= BROKEN

    @property
    def resting(self) -> float:
        """Seconds for which it is given none."""
        return max(self._until - self._clock(), 0.0) if self.open else 0.0

    def takes(self, running: int) -> bool:
        """Whether it may be given a call.

        Args:
            running: calls that it has.
        """
        return not self.open or (not self.resting and not running)

    def broke(self) -> None:
        """A call to it broke. Several that break while it rests had begun before and are one."""
        if self.resting:
            return
        self._broken += 1
        if self.open:
            self._until = self._clock() + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)

    def passed(self) -> None:
        """A call to it ended well."""
        self._broken, self._rest = 0, FIRST_REST
