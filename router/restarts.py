"""When what has died is started again. Arithmetic on times; it starts nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited before the next start.

    Attributes:
        first, longest: seconds before it; doubled with every death between the two.
        steady: seconds of having been ready after which the delay begins anew.
    """

    first: float = 0.2
    longest: float = 30.0
    steady: float = 30.0


@dataclass(frozen=True, slots=True)
class Deaths:
    """What has died so far, in one place.

    Attributes:
        count: all deaths, for people.
        row: deaths since one was last steady.
        not_before: when the next may start, on the clock that `after` is told.
    """

    count: int = 0
    row: int = 0
    not_before: float = float("-inf")

    def after(self, patience: Patience, *, lived: float, now: float) -> Deaths:
        """With one more death, of something that had been ready for `lived` seconds."""
        row = 1 if lived >= patience.steady else self.row + 1
        delay = min(patience.first * 2 ** min(row - 1, 30), patience.longest)
        return Deaths(self.count + 1, row, max(self.not_before, now + delay))
