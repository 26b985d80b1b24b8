"""How the units of one medium are shared out among encoders. It knows numbers of units and of encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A rule.

    Attributes:
        encoders: that one medium may be given to at a time.
        least: units that are worth another encoder, which gets all bytes and decodes every frame up to its last.
        turn: units that one encoder makes before it is another's turn; as many as a call has in flight.
    """

    encoders: int = 1
    least: int = 16
    turn: int = 8

    def shares(self, units: Sequence[int]) -> list[list[int]]:
        """The share of each encoder; one has all of a short medium.

        They take turns, so that the first units are there first and all encoders decode at one pace. The shares depend
        on the units and on how many encoders there are, so those of equal media are equal and meet.
        """
        count = max(min(self.encoders, len(units) // self.least), 1)
        return [[unit for at, unit in enumerate(units) if at // self.turn % count == rank] for rank in range(count)]
