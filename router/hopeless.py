"""Why workers of a pool will not come, told as a process tells why it did not start. Words only."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final

from chiasm.settings import three_lines
from router.membership import Hopeless

ATTEMPTS: Final = 3
"""Deaths of a pool's workers, none of whom was ever ready, after which they are given up."""


def hopeless(pool: str, why: str, code: int | None, tail: Sequence[str], *, deaths: int) -> Hopeless:
    """What the worker said last, if it said what cannot be; else how it ended.

    Args:
        pool: role and model.
        why: how the last one ended.
        code: its exit status, minus the signal that killed it; None if that is not known.
        tail: its last lines.
    """
    if (told := three_lines(tail)) is not None:
        what, where, fix = told
        return Hopeless(what, f"{pool} · {where}", fix)
    fix = "read its last lines in the log (`died`)"
    if code == -signal.SIGKILL:
        fix = "give it more memory: the kernel kills what takes too much"
    return Hopeless(f"{deaths} workers died before one was ready; the last: {why}", pool, fix)
