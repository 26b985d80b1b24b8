"""Two sides timed in turn, so that whatever else the machine does meets both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def alternate(
    a: Callable[[], object],
    b: Callable[[], object],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median seconds of both, taken in the order A B B A.

    Args:
        clock: `time.process_time` counts what this process computes in all its threads, and not what it waits for.
    """
    taken: dict[Callable[[], object], list[float]] = {a: [], b: []}
    a(), b()
    for _ in range(rounds):
        for one in (a, b, b, a):
            began = clock()
            one()
            taken[one].append(clock() - began)
    return statistics.median(taken[a]), statistics.median(taken[b])
