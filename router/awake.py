"""Time as one sees it who may be stopped: seconds of others' silence count only while this process was there to hear.

A controller that stood still for a minute has heard nobody for a minute, and must not take all its workers for dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Awake:
    """Seconds that this process was awake.

    Args:
        most: seconds between two looks at it; what is more was a pause.
        clock: for tests.
    """

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._looked = clock()
        self._awake = 0.0

    def now(self) -> float:
        at = self._clock()
        self._awake += min(at - self._looked, self._most)
        self._looked = at
        return self._awake
