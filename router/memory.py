"""How much memory this process has, and from when on it takes less in, in stages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from chiasm.errors import Overloaded

UPLOADS: Final = 0.92
"""Of the limit: from here on no upload begins, which is what takes most."""

REQUESTS: Final = 0.95
"""Of the limit: from here on no request begins."""

SECONDS: Final = 1.0
"""Between two looks."""


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """Looks at most once a second.

    Args:
        limit: bytes. None looks never and refuses nothing.
        read: bytes that the process has.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        limit: int | None,
        *,
        read: Callable[[], int] = resident_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._read = read
        self._clock = clock
        self._has = 0
        self._until = -SECONDS

    def check(self, share: float) -> None:
        """Raises Overloaded MEMORY_FULL if the process has more than that share of its limit."""
        if self._limit is None:
            return
        now = self._clock()
        if now >= self._until:
            self._has, self._until = self._read(), now + SECONDS
        if self._has > share * self._limit:
            raise Overloaded(
                "MEMORY_FULL",
                "this server has as much in memory as it may for now",
                retry_after=2.0,
                facts={"share": round(self._has / self._limit, 3), "limit": share},
            )
