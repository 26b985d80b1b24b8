"""Who has been served how much, so that one who had less goes before one who had more.

A counter for each who shares, a tenant or one call of a tenant, in whatever is shared out: rows, patches. It is the
virtual token counter of Sheng et al. ("Fairness in Serving Large Language Models", OSDI 2024): one who begins to want
something, or wants something again, is lifted to the least of those who do, so that nobody saves up by staying away or
by being silent. It knows neither sequences nor units.
"""

from __future__ import annotations

from dataclasses import dataclass

REMEMBERED = 1024
"""How many without a seat are remembered, because they have had more than somebody who wants something."""


@dataclass(eq=False, slots=True)
class Sharer:
    """One who shares.

    Attributes:
        served: what it has had, and what it was lifted by.
        seats: what it has that may want something: sequences, calls.
        wanting: how much of it wants something now.
    """

    key: bytes
    served: int = 0
    seats: int = 0
    wanting: int = 0


class Sharers:
    """All who share."""

    def __init__(self) -> None:
        self._sharers: dict[bytes, Sharer] = {}

    def __len__(self) -> int:
        return len(self._sharers)

    def enter(self, key: bytes) -> Sharer:
        """The one who has one more seat."""
        one = self._sharers.setdefault(key, Sharer(key))
        one.seats += 1
        return one

    def leave(self, one: Sharer) -> None:
        """One seat less."""
        one.seats -= 1
        if one.seats:
            return
        wanting = [other.served for other in self._sharers.values() if other.wanting]
        gone = [other for other in self._sharers.values() if not other.seats]
        ahead = [other for other in gone if wanting and other.served > min(wanting)]
        ahead.sort(key=lambda other: -other.served)
        for other in {*gone}.difference(ahead[:REMEMBERED]):
            del self._sharers[other.key]

    def want(self, one: Sharer) -> None:
        """One more of its own wants something."""
        if not one.wanting:
            wanting = [other.served for other in self._sharers.values() if other.wanting]
            one.served = max(one.served, min(wanting, default=0))
        one.wanting += 1

    def rest(self, one: Sharer) -> None:
        """One less."""
        one.wanting -= 1
