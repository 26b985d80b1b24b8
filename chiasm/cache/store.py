"""Where entries are kept, as a protocol: the crossing between encoder and decoder.

A store keeps sealed bytes under keys. It verifies nothing and understands nothing: whoever reads does
(`chiasm.cache.entry`). A missing entry is None and never an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chiasm.cache.entry import EntryKey, Sealed


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts since the store was made, and what it holds now. Bytes are those charged against the budget."""

    entries: int
    bytes: int
    pinned_bytes: int
    budget: int
    puts: int
    hits: int
    misses: int
    evictions: int
    refusals: int


class EntryStore(Protocol):
    """All methods may be called from one event loop at a time; none blocks it for longer than a copy."""

    async def put(self, sealed: Sealed, key: EntryKey, *, lease: float) -> None:
        """Keeps an entry and pins it for `lease` seconds. An entry already there under that key is replaced.

        Raises Overloaded CACHE_FULL: retryable when pinned entries are in the way, not when it could never fit.
        """
        ...

    async def get(self, key: EntryKey, *, lease: float = 0.0) -> Sealed | None:
        """The entry, as the most recently used one, pinned for another `lease` seconds if that is more than 0."""
        ...

    async def release(self, key: EntryKey) -> None:
        """Takes one pin back before its lease ends. Unknown keys and pins already ended are nothing."""
        ...

    async def discard(self, key: EntryKey) -> None:
        """Forgets an entry that a reader found to be wrong, pinned or not."""
        ...

    async def flush(self) -> None:
        """Forgets every entry that is not pinned."""
        ...

    def stats(self) -> StoreStats: ...
