"""An entry as stores keep it: bytes under a key, which nobody believes before `chiasm.cache.entry` has looked at them.

No torch: stores, and what only counts or clears them, need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from chiasm.cache.columns import Array

EntryKey: TypeAlias = bytes
"""32 bytes."""

TAG_BYTES: Final = 32

SMALL: Final = 256 << 10
"""Bytes that are copied or sealed where they are asked for, in some 50 µs; more go to a thread, which costs more."""


class Sealable(Protocol):
    """What is put into a store: an entry that has its tag, or one that gets it while it is put (`Sealing`)."""

    @property
    def header(self) -> bytes: ...

    @property
    def payload(self) -> memoryview: ...

    @property
    def tag_bytes(self) -> int: ...

    @property
    def size(self) -> int:
        """Bytes a store is charged for it."""
        ...

    def copy_into(self, place: Array) -> bytes:
        """Copies the payload to where it is kept, uint8 in one row, and returns the tag. What lies there is nothing
        before this has returned.

        Raises ServerError NONFINITE for a payload that must not be kept.
        """
        ...

    async def sealed(self) -> Sealed:
        """With its tag, where it lies. Raises as `copy_into`."""
        ...


@dataclass(frozen=True, slots=True)
class Sealed:
    """Packed header, payload bytes, tag over both. Believed by nobody before `open_entry`."""

    header: bytes
    payload: memoryview
    tag: bytes

    @property
    def tag_bytes(self) -> int:
        return len(self.tag)

    @property
    def size(self) -> int:
        """Bytes a store is charged for it."""
        return len(self.header) + self.payload.nbytes + self.tag_bytes

    def copy_into(self, place: Array) -> bytes:
        """As `Sealable.copy_into`; raises nothing."""
        place[:] = np.frombuffer(self.payload, np.uint8)
        return self.tag

    async def sealed(self) -> Sealed:
        return self
