"""Small arenas for tests, exact to the byte, and entries that are only bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from chiasm.cache.ledger import Ledger
from chiasm.cache.region import HEADER_BYTES, Region
from chiasm.cache.sealed import EntryKey, Sealed

KIB = 1024


def region_bytes(capacity: int) -> int:
    """The size of a region that holds `capacity` bytes of entries, up to 15 MiB."""
    return HEADER_BYTES + Ledger(memoryview(bytearray(1 << 20))).offset + capacity


def small_region(path: Path, capacity: int) -> Region:
    return Region.create(path, region_bytes(capacity))


def key(name: str) -> EntryKey:
    return blake3(name.encode()).digest()


def entry(size: int, fill: int = 0) -> Sealed:
    """Any bytes: a store understands none of them. `size` is what it is charged."""
    return Sealed(bytes([fill]) * 10, memoryview(bytes([fill]) * (size - 30)), bytes([fill]) * 20)


def same(sealed: Sealed | None, other: Sealed) -> bool:
    return sealed is not None and (sealed.header, bytes(sealed.payload), sealed.tag) == (
        other.header,
        bytes(other.payload),
        other.tag,
    )


def at(step: str, does: Callable[[], object]) -> Callable[[str], None]:
    """A `Step` that does something at one step, once."""
    waiting = [step]

    def told(name: str) -> None:
        if waiting == [name]:
            waiting.clear()
            does()

    return told


def dies(signal: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signal)
