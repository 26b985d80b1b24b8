"""Waiting for what another task, thread or process does, where there is no event to wait for.

Every wait has an end, so that a test that waits in vain says where.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path


async def until(holds: Callable[[], bool], *, seconds: float = 30.0) -> None:
    """Waits until something is so."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(*pids: int) -> None:
    """Waits until processes have ended."""
    await until(lambda: not any(alive(pid) for pid in pids))
