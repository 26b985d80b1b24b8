"""A file system in memory that is as small as a test wants, where mounting is permitted."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Path]:
    """Mounts a tmpfs of a size, as `mount` writes it, on a new folder. Skips the test where that is not permitted."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def free(path: Path) -> int:
    """Bytes that are free where a path lies."""
    found = os.statvfs(path)
    return found.f_bfree * found.f_frsize


def fill(path: Path) -> None:
    """Takes all that is free."""
    with (path / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    assert free(path) == 0
