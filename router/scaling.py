"""How many workers a pool wants, by how long calls have waited there. Arithmetic on what was seen; it asks nobody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pool's workers say at one moment, and the router of whoever waits for one.

    Attributes:
        oldest_wait: seconds that the call has waited which waits longest.
        running: calls that are worked on.
        ready: workers that take calls.
    """

    oldest_wait: float
    running: int
    ready: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Between how many, and how soon.

    Attributes:
        least, most: workers of the pool. A `least` of 0 lets it rest.
        patience: seconds of the oldest wait beyond which there is one more.
        settle: seconds between two steps upwards, at least: a worker that was just asked for has helped nobody yet.
        calm: seconds without any wait, and with fewer calls than workers, after which there is one less.
    """

    least: int
    most: int
    patience: float = 1.0
    settle: float = 10.0
    calm: float = 120.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many workers are wanted, and since when things were as they are. Times are of one monotonic clock."""

    count: int
    changed: float
    calm_since: float

    @classmethod
    def first(cls, scale: Scale, now: float) -> Self:
        """At least one at the start, even where a pool may rest: what nobody ever served is not known."""
        return cls(max(1, scale.least), now, now)

    def after(self, scale: Scale, seen: Seen, now: float) -> Wanted:
        """What is wanted in view of what is seen."""
        waits = seen.oldest_wait > 0
        calm_since = now if waits or (seen.running >= self.count > 0) else self.calm_since
        count = self.count
        if count == 0:
            count = 1 if waits else 0
        elif seen.oldest_wait > scale.patience and now - self.changed >= scale.settle and seen.ready >= count:
            count += 1
        elif now - calm_since >= scale.calm:
            count -= 1
        count = min(max(count, scale.least), scale.most)
        if count == self.count:
            return replace(self, calm_since=calm_since)
        return Wanted(count, now, now)
