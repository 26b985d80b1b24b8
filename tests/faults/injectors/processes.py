"""Processes that are killed, and processes that stand still."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.faults.injectors import proved, proved_soon
from tests.waiting import alive


def state(pid: int) -> str:
    """As the kernel says it in one letter: `T` is stopped, `S` sleeps, `R` runs. Empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Kill:
    """SIGKILL. Whoever started the process reaps it, and starts it again."""

    def __init__(self, pid: int, *, seconds: float = 10.0) -> None:
        self._pid = pid
        self._seconds = seconds

    def inject(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def verify(self) -> None:
        proved_soon(lambda: not alive(self._pid), f"process {self._pid} still lives", seconds=self._seconds)

    def end(self) -> None:
        """Nothing brings it back here."""


class Stop:
    """SIGSTOP until the end."""

    def __init__(self, pid: int, *, seconds: float = 10.0) -> None:
        self._pid = pid
        self._seconds = seconds

    def inject(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def verify(self) -> None:
        proved_soon(lambda: state(self._pid) in ("T", ""), f"process {self._pid} goes on", seconds=self._seconds)
        proved(state(self._pid) == "T", f"there is no process {self._pid}")

    def end(self) -> None:
        if alive(self._pid):
            os.kill(self._pid, signal.SIGCONT)
            proved_soon(lambda: state(self._pid) != "T", f"process {self._pid} stands still", seconds=10)
