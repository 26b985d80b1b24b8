"""Secrets, from files that only their owner may read."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from chiasm.settings.refusal import SettingsError


def read_secret(path: Path) -> bytes:
    """The 32 bytes that a file holds as 64 hex digits.

    Raises SettingsError for a file that cannot be read, that others than its owner may read, or that holds anything
    else. What it holds is never shown.
    """
    where = str(path)
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1024).strip()
    except OSError as error:
        raise SettingsError(
            f"a secret cannot be read: {error.strerror}", where, f"openssl rand -hex 32 > {path} && chmod 600 {path}"
        ) from None
    if mode & 0o077:
        raise SettingsError(f"a secret has mode {mode:04o}: others may use it", where, f"chmod 600 {path}")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise SettingsError(
            f"a secret must be 64 hex digits, the file has {len(text)} characters",
            where,
            f"openssl rand -hex 32 > {path}",
        )
    return bytes.fromhex(text)
