"""An entry as stores keep it: bytes under a key, which nobody believes before `chiasm.cache.entry` has looked at them.

No torch: stores, and what only counts or clears them, need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

EntryKey: TypeAlias = bytes
"""32 bytes."""

TAG_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Sealed:
    """Packed header, payload bytes, tag over both. Believed by nobody before `open_entry`."""

    header: bytes
    payload: memoryview
    tag: bytes

    @property
    def size(self) -> int:
        """Bytes a store is charged for it."""
        return len(self.header) + self.payload.nbytes + len(self.tag)
