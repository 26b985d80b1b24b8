"""`chiasm serve digits` in a process of its own, followed by its log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHIASM = [sys.executable, "-c", "from chiasm.cli import main; main()"]


def chiasm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [*CHIASM, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **environment},
    )


class Served:
    """A running `chiasm serve … --json-log`.

    Attributes:
        records: its log so far.
        odd: lines of its standard error that are no JSON, and all of its standard output.
    """

    def __init__(self, *arguments: str) -> None:
        command = [*CHIASM, "serve", "--json-log", "--arena-bytes", "32MiB", *arguments]
        self.records: list[dict[str, Any]] = []
        self.odd: list[str] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._news = threading.Condition()
        self._open = 2
        self._readers = [
            threading.Thread(target=self._read, args=(stream,)) for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def target(self) -> str:
        return str(self.until("serve", "ready")["target"])

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.until("encoder-0", "ready")["target"].removeprefix("unix:")).parent

    def pid(self, role: str) -> int:
        """The process of a role, by what it said last."""
        return int([said["pid"] for said in self.of(role, "starting")][-1])

    def of(self, role: str, event: str) -> list[dict[str, Any]]:
        return [said for said in list(self.records) if said.get("role") == role and said["event"] == event]

    def until(self, role: str, event: str, count: int = 1, *, seconds: float = 40) -> dict[str, Any]:
        """The record with which a role has said something so many times."""
        with self._news:
            said = self._news.wait_for(lambda: len(self.of(role, event)) >= count or self._open == 0, timeout=seconds)
            found = self.of(role, event)
        assert said and len(found) >= count, f"{role} did not say {event} {count} times: {self.records} {self.odd}"
        return found[count - 1]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it and returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            code = self.process.wait(40)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join()
        return code

    def _read(self, stream: Any) -> None:
        with stream:
            for line in stream:
                with self._news:
                    try:
                        self.records.append(json.loads(line))
                    except ValueError:
                        self.odd.append(line)
                    self._news.notify_all()
        with self._news:
            self._open -= 1
            self._news.notify_all()


def processes(word: str) -> list[int]:
    """The processes whose command line holds a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds; the test's own time limit bounds it."""
    while not holds():
        time.sleep(0.02)


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """A model that is served while the block runs."""
    served = Served(*arguments)
    try:
        assert served.target
        yield served
    finally:
        served.stop()
