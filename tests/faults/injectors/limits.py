"""Limits of a running process: open files, memory, processes. All are the kernel's, and undone at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
from pathlib import Path

import pytest

from tests.faults.injectors import proved, proved_soon

CGROUPS = Path("/sys/fs/cgroup")


def open_files(pid: int) -> int:
    """Descriptors that a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class FewFiles:
    """No file can be opened beyond `spare` more than are open now, and no connection taken.

    `verify` sees that the kernel has the limit. Whether it is met shows `exhausted`: every number below it is in use.
    """

    def __init__(self, pid: int, *, spare: int = 0) -> None:
        self._pid = pid
        self._spare = spare
        self._limit = 0
        self._before: tuple[int, int] | None = None

    def inject(self) -> None:
        used = {int(name) for name in os.listdir(f"/proc/{self._pid}/fd")}
        # The limit is of numbers: those below the largest that are free can be had too.
        free = [number for number in range(len(used) + self._spare + 1) if number not in used]
        self._limit = free[self._spare]
        self._before = resource.prlimit(self._pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self._pid, resource.RLIMIT_NOFILE, (self._limit, self._before[1]))

    def verify(self) -> None:
        soft = resource.prlimit(self._pid, resource.RLIMIT_NOFILE)[0]
        proved(self._before is not None and soft == self._limit, f"{self._pid} may open {soft} files")

    def exhausted(self) -> bool:
        """Whether not one more can be opened."""
        used = {int(name) for name in os.listdir(f"/proc/{self._pid}/fd")}
        return used >= set(range(self._limit))

    def end(self) -> None:
        if self._before is not None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self._pid, resource.RLIMIT_NOFILE, self._before)


class _Group:
    """A cgroup of version 1 with some processes in it. They go back where they were at the end."""

    def __init__(self, controller: str, *pids: int) -> None:
        root = CGROUPS / controller
        self.path = root / f"chiasm-{secrets.token_hex(4)}"
        self._pids = pids
        self._homes: dict[int, Path] = {}
        self._controller = controller

    def make(self) -> None:
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup of version 1 can be made here for {self._controller}: {error.strerror}")
        for pid in self._pids:
            self._homes[pid] = self._home(pid)
            (self.path / "cgroup.procs").write_text(str(pid))

    def _home(self, pid: int) -> Path:
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if self._controller in controllers.split(","):
                return CGROUPS / self._controller / path.lstrip("/")
        raise AssertionError(f"{pid} has no {self._controller}")

    def number(self, name: str) -> int:
        """A file of one number, or the last number of a file of words."""
        return int((self.path / name).read_text().split()[-1])

    def write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def remove(self) -> None:
        if not self.path.exists():
            return
        home = next(iter(self._homes.values()), CGROUPS / self._controller)
        for pid in map(int, (self.path / "cgroup.procs").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                (self._homes.get(pid, home) / "cgroup.procs").write_text(str(pid))
        proved_soon(self._removed, f"{self.path} is in use", seconds=10)

    def _removed(self) -> bool:
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True


class LittleMemory:
    """A process and its children may have `nbytes` of memory, counted from what they touch from now on.

    `verify` is for when they had reason to touch more: the kernel has refused it.
    """

    def __init__(self, pid: int, nbytes: int, *, seconds: float = 10.0) -> None:
        self._group = _Group("memory", pid)
        self._seconds = seconds
        self._nbytes = nbytes

    def inject(self) -> None:
        self._group.make()
        self._group.write("memory.limit_in_bytes", self._nbytes)

    @property
    def used(self) -> int:
        """Bytes now."""
        return self._group.number("memory.usage_in_bytes")

    def verify(self) -> None:
        proved_soon(
            lambda: self._group.number("memory.failcnt"),
            "nobody wanted more memory than there is",
            seconds=self._seconds,
        )

    def end(self) -> None:
        self._group.remove()


class FewProcesses:
    """A process may start no thread and no process beyond `spare` more than it has.

    `verify` is for when it had reason to: the kernel has refused one.
    """

    def __init__(self, pid: int, *, spare: int = 0, seconds: float = 10.0) -> None:
        self._group = _Group("pids", pid)
        self._seconds = seconds
        self._spare = spare

    def inject(self) -> None:
        self._group.make()
        self._group.write("pids.max", self._group.number("pids.current") + self._spare)

    def verify(self) -> None:
        proved_soon(lambda: self._group.number("pids.events"), "nobody wanted another process", seconds=self._seconds)

    def end(self) -> None:
        self._group.remove()
