"""Lists of bytes as one string that no other list has: what keys and digests are made of. It knows no secret."""

from __future__ import annotations

from collections.abc import Sequence


def framed(parts: Sequence[bytes]) -> bytes:
    """Every part after its length, so that no two lists read the same."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def u32(value: int) -> bytes:
    """A count or a code, in four bytes."""
    return int(value).to_bytes(4, "little")
