"""What one run of the three processes shares: sockets, secrets and the arena, in a folder that only its owner enters.

The folder lies in memory, so that no secret is ever on a disk, and goes with the run. One that a killed supervisor left
is removed by the next. Knows files, not processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

IN = Path("/dev/shm")
"""Where Linux has files in memory."""

_PREFIX = "chiasm-"
_LOCK = "lock"
_ARENA = "arena"


class RunFolder:
    """A folder of mode 0700, removed when its context is left.

    Attributes:
        path: the folder.
        workers_secret, tenants_secret: files of mode 0600 with 32 random bytes each, as 64 hex digits.
        arena: where the arena goes; nothing is there yet.
    """

    def __init__(self, parent: Path = IN) -> None:
        """Makes the folder. Raises OSError if `parent` cannot be written to; then nothing is left there."""
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # 0700
        self._lock = -1
        try:
            self._lock = _locked(self.path)
            self.workers_secret = self._secret("workers.secret")
            self.tenants_secret = self._secret("tenants.secret")
        except BaseException:
            self.remove()
            raise
        self.arena = self.path / _ARENA

    def socket(self, name: str) -> str:
        """The address of a socket in the folder, as a server takes it."""
        return f"unix:{self.path / name}.sock"

    def remove(self) -> None:
        """Removes it with everything in it. Twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _secret(self, name: str) -> Path:
        path = self.path / name
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        return path


def sweep(parent: Path = IN) -> list[Path]:
    """Removes this user's run folders whose supervisor is dead, and returns them.

    A supervisor holds a lock on a file of its folder; the kernel drops it at its death.
    """
    swept = []
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        # An OSError: it is locked, somebody else's, or was removed meanwhile.
        with contextlib.suppress(OSError), open(os.open(lock, os.O_RDWR | os.O_NOFOLLOW)) as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
                swept.append(lock.parent)
    return swept


def arenas(parent: Path = IN) -> list[Path]:
    """The arenas of this user's systems that run: those whose supervisor lives."""
    found = []
    for lock in sorted(parent.glob(f"{_PREFIX}*/{_LOCK}")):
        with contextlib.suppress(OSError), open(os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(lock.parent / _ARENA)
    return found


def _locked(folder: Path) -> int:
    # Locked before it has its name: a sweep that sees the name sees the lock.
    unnamed = folder / f".{_LOCK}"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    return lock
