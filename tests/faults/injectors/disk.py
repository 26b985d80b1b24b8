"""Disks that are full: a small file system that is filled, and writes of one process that fail."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.faults.injectors import needed, proved, proved_soon
from tests.mounts import fill, free


class FullDisk:
    """Takes all that is free on the file system of a folder, which is a small one (`tests.mounts.tmpfs`)."""

    LARGEST = 1 << 30

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def inject(self) -> None:
        proved(free(self._folder) <= self.LARGEST, f"{self._folder} is on a file system that others use")
        fill(self._folder)

    def verify(self) -> None:
        probe = self._folder / "probe"
        try:
            probe.write_bytes(bytes(1 << 16))
        except OSError as error:
            proved(error.errno == errno.ENOSPC, f"{self._folder}: {error}")
        else:
            proved(False, f"{self._folder} takes more")
        finally:
            probe.unlink(missing_ok=True)

    def end(self) -> None:
        (self._folder / "filling").unlink(missing_ok=True)


class FailingCalls:
    """System calls of a process that fail, all of them: strace attached to it, which `verify` reads.

    Args:
        call: for example `write`.
        error: for example `ENOSPC`.
        path: only calls on this file.
        seconds: in which one must have failed.
    """

    def __init__(self, pid: int, call: str, error: str, *, path: Path, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._pid = pid
        self._call, self._error = call, error
        self._path = path
        self._told = tempfile.NamedTemporaryFile(prefix="strace-")  # noqa: SIM115 - closed at the end
        self._tracer: subprocess.Popen[bytes] | None = None

    def inject(self) -> None:
        self._tracer = subprocess.Popen(
            [needed("strace"), "-qq", "-f", "-p", str(self._pid), "-P", str(self._path), "-e", f"trace={self._call}",
             "-e", f"inject={self._call}:error={self._error}", "-o", self._told.name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        proved_soon(self._attached, f"{self._pid} is not traced", seconds=10)

    def _attached(self) -> bool:
        assert self._tracer is not None
        proved(self._tracer.poll() is None, f"strace cannot trace {self._pid}")
        threads = [thread.name for thread in Path(f"/proc/{self._pid}/task").iterdir()]
        return all(f"TracerPid:\t{self._tracer.pid}" in self._status(thread) for thread in threads)

    def _status(self, thread: str) -> str:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{self._pid}/task/{thread}/status").read_text()
        return f"TracerPid:\t{self._tracer and self._tracer.pid}"  # it has ended

    def verify(self) -> None:
        proved_soon(
            lambda: f"{self._error} " in (told := Path(self._told.name).read_text()) and "(INJECTED)" in told,
            f"no {self._call} failed",
            seconds=self._seconds,
        )

    def end(self) -> None:
        if self._tracer is not None and self._tracer.poll() is None:
            os.kill(self._tracer.pid, signal.SIGINT)  # it lets its process go
            self._tracer.wait(10)
        self._told.close()
