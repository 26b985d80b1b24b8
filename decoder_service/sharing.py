"""Things that several hold at once, found by what they are: kept while anybody holds them, and longer where there is
room.

It counts holders and remembers who was left alone first. It does not know what it keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(eq=False, slots=True)
class Lent(Generic[K, V]):
    """One thing, and how many hold it. `size` is what it takes of its pool."""

    key: K
    value: V
    size: int
    holders: int = 1


class Shared(Generic[K, V]):
    """Things of one pool by key. What nobody holds stays until room is needed, and what was left first goes first.

    Args:
        give_back: takes a thing back into its pool, once nobody holds it and nobody will find it again.
    """

    def __init__(self, give_back: Callable[[V], None]) -> None:
        self._give_back = give_back
        self._found: dict[K, Lent[K, V]] = {}
        self._unheld: OrderedDict[K, Lent[K, V]] = OrderedDict()  # as they were left
        self.unheld_size = 0
        """Of the pool: what could be evicted."""

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: K) -> Lent[K, V] | None:
        return self._found.get(key)

    def add(self, key: K, value: V, size: int) -> Lent[K, V]:
        """Lets others find what its maker holds. There is nothing under that key."""
        assert key not in self._found, f"{key!r} is there already"
        self._found[key] = lent = Lent(key, value, size)
        return lent

    def hold(self, lent: Lent[K, V]) -> Lent[K, V]:
        """One more holder of what was found."""
        if not lent.holders:
            del self._unheld[lent.key]
            self.unheld_size -= lent.size
        lent.holders += 1
        return lent

    def release(self, lent: Lent[K, V]) -> None:
        """One holder less. The last one leaves it to be found, or to the pool if it was forgotten."""
        assert lent.holders, f"{lent.key!r} is held by nobody"
        lent.holders -= 1
        if lent.holders:
            return
        if self._found.get(lent.key) is lent:
            self._unheld[lent.key] = lent
            self.unheld_size += lent.size
        else:
            self._give_back(lent.value)

    def forget(self, lent: Lent[K, V]) -> None:
        """Nobody finds it any more. Whoever holds it keeps it."""
        if self._found.get(lent.key) is not lent:
            return
        del self._found[lent.key]
        if not lent.holders:
            del self._unheld[lent.key]
            self.unheld_size -= lent.size
            self._give_back(lent.value)

    def evict(self) -> bool:
        """Gives the pool back what was left alone first. False if everything is held."""
        for lent in self._unheld.values():
            self.forget(lent)
            return True
        return False

    def flush(self) -> None:
        """Forgets everything."""
        for lent in list(self._found.values()):
            self.forget(lent)
