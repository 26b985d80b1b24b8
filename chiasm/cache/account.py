"""What a writer has put into a store that forgets by itself, by owner, as far as it can be there still.

The store that nodes share knows no owners, and its writers no common book. Each keeps its own: what it wrote within
the time that entries are kept, as if none of it had gone before. It knows no entry and no store.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

_SPANS = 64
"""Parts of the time that are forgotten as a whole, so that the book stays small however much is written."""


class Account:
    """Bytes and entries written within a time.

    Args:
        seconds: how long what is written counts; up to a sixty-fourth more.
        budget: bytes of one owner; None for no bound.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float, budget: int | None, clock: Callable[[], float]) -> None:
        self._span = seconds / _SPANS
        self._budget = budget
        self._clock = clock
        self._spans: deque[tuple[int, Counter[bytes], Counter[bytes]]] = deque()  # number, bytes and entries by owner
        self._bytes: Counter[bytes] = Counter()
        self._entries: Counter[bytes] = Counter()

    def take(self, owner: bytes, nbytes: int) -> bool:
        """Enters one entry of so many bytes, unless its owner would then have more than the budget."""
        number = self._forget()
        if self._budget is not None and self._bytes[owner] + nbytes > self._budget:
            return False
        if not self._spans or self._spans[-1][0] != number:
            self._spans.append((number, Counter(), Counter()))
        _, sizes, counts = self._spans[-1]
        for book, added in ((sizes, nbytes), (self._bytes, nbytes), (counts, 1), (self._entries, 1)):
            book[owner] += added
        return True

    def give_back(self, owner: bytes, nbytes: int) -> None:
        """Strikes out an entry that was taken just now, and is not there after all."""
        for _, sizes, counts in reversed(self._spans):
            if sizes[owner] >= nbytes and counts[owner]:
                for book, added in ((sizes, nbytes), (self._bytes, nbytes), (counts, 1), (self._entries, 1)):
                    book[owner] -= added
                return

    @property
    def bytes(self) -> int:
        """Of all owners."""
        self._forget()
        return self._bytes.total()

    @property
    def entries(self) -> int:
        """Of all owners."""
        self._forget()
        return self._entries.total()

    def _forget(self) -> int:
        """Drops what counts no more. Returns the number of the span that is now."""
        number = int(self._clock() / self._span)
        while self._spans and self._spans[0][0] < number - _SPANS:
            _, sizes, counts = self._spans.popleft()
            self._bytes -= sizes  # an owner that has nothing left is dropped
            self._entries -= counts
        return number
