"""Secrets, from files that only their owner may read."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from chiasm.settings.refusal import SettingsError

_MOST_BYTES = 4096


def read_secret(path: Path) -> bytes:
    """The 32 bytes that a file holds as 64 hex digits.

    Raises SettingsError for a file that cannot be read, that others than its owner may read, or that holds anything
    else. What it holds is never shown.
    """
    text = _private(path, f"openssl rand -hex 32 > {path} && chmod 600 {path}").strip()
    where = str(path)
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise SettingsError(
            f"a secret must be 64 hex digits, the file has {len(text)} characters",
            where,
            f"openssl rand -hex 32 > {path}",
        )
    return bytes.fromhex(text)


def read_password(path: Path) -> str:
    """What a file holds, without the end of its line. Raises SettingsError as `read_secret` does, and where that is
    nothing."""
    text = _private(path, "write it there, and let nobody else read it").removesuffix("\n").removesuffix("\r")
    if not text:
        raise SettingsError("a password is empty", str(path), "write it there")
    return text


def _private(path: Path, fix: str) -> str:
    """What a file holds, if only its owner may read it, and if it is text of a length that secrets have."""
    where = str(path)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            held = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"a secret cannot be read: {error.strerror}", where, fix) from None
    if mode & 0o077:
        raise SettingsError(f"a secret has mode {mode:04o}: others may use it", where, f"chmod 600 {path}")
    if len(held) > _MOST_BYTES:
        raise SettingsError(f"a secret has more than {_MOST_BYTES} bytes", where, fix)
    try:
        return held.decode("utf-8")
    except UnicodeDecodeError:
        raise SettingsError("a secret is not text in UTF-8", where, fix) from None
