"""Where entries are kept, as a protocol: the crossing between encoder and decoder.

A store keeps sealed bytes under keys. It verifies nothing and understands nothing: whoever reads does
(`chiasm.cache.entry`). A missing entry is None and never an error.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class Lease(NamedTuple):
    """A pin with an end: 16 random bytes that name it, and seconds from when it is taken."""

    id: bytes
    seconds: float

    @classmethod
    def of(cls, seconds: float) -> Lease:
        """A lease with a new name."""
        return cls(secrets.token_bytes(16), seconds)


class EntryStore(Protocol):
    """All methods may be called from one event loop at a time; none blocks it for longer than a copy."""

    async def put(self, sealed: Sealed, key: EntryKey, *, lease: Lease | None = None) -> None:
        """Keeps an entry, pinned while `lease` lasts. One already there under that key is replaced and keeps its pins.

        Raises Overloaded CACHE_FULL: retryable when pinned entries are in the way, not when it could never fit.
        """
        ...

    async def get(self, key: EntryKey, *, lease: Lease | None = None) -> Sealed | None:
        """The entry, as the most recently used one, pinned while `lease` lasts beside the pins it has."""
        ...

    async def release(self, key: EntryKey, lease_id: bytes) -> None:
        """Takes a pin back before its end. Doing so twice, or for an entry that is gone, does nothing."""
        ...

    async def discard(self, key: EntryKey) -> None:
        """Forgets an entry that a reader found to be wrong, pinned or not."""
        ...

    async def flush(self) -> None:
        """Forgets every entry that is not pinned."""
        ...

    def stats(self) -> StoreStats: ...
