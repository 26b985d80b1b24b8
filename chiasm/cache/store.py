"""Where entries are kept, as a protocol: the crossing between encoder and decoder.

A store keeps sealed bytes under keys. It verifies nothing and understands nothing: whoever reads does
(`chiasm.cache.entry`). A missing entry is None and never an error.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from chiasm.cache.place import Place
from chiasm.cache.sealed import EntryKey, Sealable, Sealed
from chiasm.errors import Overloaded


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


NOBODY: Final = bytes(8)
"""The owner of what is charged to no tenant."""


class Lease(NamedTuple):
    """A pin with an end: 16 random bytes that name it, and seconds from when it is taken."""

    id: bytes
    seconds: float

    @classmethod
    def of(cls, seconds: float) -> Lease:
        """A lease with a new name."""
        return cls(secrets.token_bytes(16), seconds)


class Pinned(NamedTuple):
    """What a store says of an entry that it has just pinned: its header, and where it lies."""

    header: bytes
    place: Place


class EntryStore(Protocol):
    """All methods may be called from one event loop at a time; none blocks it for longer than a small copy."""

    async def put(
        self,
        entry: Sealable,
        key: EntryKey,
        *,
        lease: Lease | None = None,
        owner: bytes = NOBODY,
        shared: bool = False,
    ) -> Place:
        """Keeps an entry, pinned while `lease` lasts. One already there under that key is replaced and hands its pins
        on; while it is pinned it stays until its successor is there, so there has to be room for both.

        Args:
            owner: whose share of the store it is charged to (`chiasm.cache.tenant.owner`).
            shared: its reader is on a node that shares a store with this one, and can read it there when this returns.
                Otherwise other nodes may be able to a little later.

        Raises Overloaded CACHE_FULL: retryable when pinned entries are in the way, not when it could never fit;
        SHARED_STORE likewise, for one that is to be shared and cannot be written to where nodes share it; and what
        `Sealable.copy_into` raises. Then nothing is there, nor is what was there replaced.
        """
        ...

    async def pin(self, key: EntryKey, lease: Lease, *, owner: bytes = NOBODY, shared: bool = False) -> Pinned | None:
        """Pins an entry while `lease` lasts, beside the pins it has, as the most recently used one. Whatever its size,
        no payload is touched, unless it has to be moved: for `shared`, as of `put`, or from a store that nodes share.
        Then it is charged to `owner`.

        Raises Overloaded CACHE_FULL if no more pins can be kept.
        """
        ...

    async def claim(self, key: EntryKey, seconds: float) -> bool:
        """Whether the caller is the one to make an entry: nobody else, on any node that shares a store with this one,
        has claimed it within `seconds`. Who is told no looks for the entry now and then, and claims again.

        A claim ends with `unclaim` or by itself, and is nothing but advice: two that make the same entry make it right.
        """
        ...

    async def unclaim(self, key: EntryKey) -> None:
        """Ends this process's claim: the entry is there, or will not be made."""
        ...

    async def get(self, key: EntryKey, place: Place | None = None, *, owner: bytes = NOBODY) -> Sealed | None:
        """The entry, as the most recently used one: where it was announced to lie, or wherever it lies if no place is
        given. A place that is not in this store is a miss. What has to be moved is charged to `owner`."""
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


def full(needed: int, budget: int) -> Overloaded:
    """The refusal of an entry: for now, or for good if it is larger than the whole store."""
    return Overloaded(
        "CACHE_FULL",
        f"an entry of {needed} bytes does not fit: budget {budget}, the rest is in use",
        retry_after=None if needed > budget else 0.1,
        facts={"needed": needed, "budget": budget},
    )
