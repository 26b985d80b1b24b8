"""Those who draw a token a step, in a table: what is counted of each of them in every step is counted of all at once.

With hundreds of sequences that is what keeps a step's plan short (`benchmarks scheduler_step`). It knows no budget but
the number it is asked for, and no pages: it says who is short of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np

from chiasm.fairness import Sharer
from decoder_service.seats import S, Seat


class Taken(NamedTuple, Generic[S]):
    """Who is in a step.

    Attributes:
        short: those among them whose pages do not hold the row.
        spent: those among them who may draw no further token.
    """

    seats: list[Seat[S]]
    short: list[Seat[S]]
    spent: list[Seat[S]]


class Singles(Generic[S]):
    """The table. Whoever leaves it gives its place to the last."""

    def __init__(self) -> None:
        self._seats: list[Seat[S]] = []
        self._slack = np.zeros(16, dtype=np.int64)  # rows that their pages still hold
        self._left = np.zeros(16, dtype=np.int64)  # tokens that they may still draw
        self._turn = 0
        self._charge: dict[Sharer, int] = {}  # how many of them each tenant has

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def seats(self) -> Sequence[Seat[S]]:
        return self._seats

    def join(self, seat: Seat[S], *, slack: int) -> None:
        place = seat.place = len(self._seats)
        if place == len(self._slack):
            self._slack, self._left = (np.concatenate([one, one]) for one in (self._slack, self._left))
        self._seats.append(seat)
        self._slack[place], self._left[place] = slack, seat.allowed
        self._charge[seat.tenant] = self._charge.get(seat.tenant, 0) + 1

    def part(self, seat: Seat[S]) -> None:
        place, last = seat.place, self._seats.pop()
        if last is not seat:
            self._seats[place], last.place = last, place
            for one in (self._slack, self._left):
                one[place] = one[len(self._seats)]
        seat.place = -1
        self._charge[seat.tenant] -= 1
        if not self._charge[seat.tenant]:
            del self._charge[seat.tenant]

    def allow(self, seat: Seat[S], tokens: int) -> None:
        self._left[seat.place] = tokens

    def refill(self, seat: Seat[S], slack: int) -> None:
        """Says anew how many rows its pages hold."""
        self._slack[seat.place] = slack

    def take(self, most: int) -> Taken[S]:
        """The next row of each, of `most` in their order where there are more; their tenants are charged."""
        count = len(self._seats)
        if not count:
            return Taken([], [], [])
        places: slice | list[int] = slice(count)
        if count <= most:
            seats = self._seats.copy()
            for tenant, number in self._charge.items():
                tenant.served += number
        else:
            seats = sorted(self._seats, key=_turn)[:most]
            places = [seat.place for seat in seats]
            for seat in seats:
                seat.tenant.served += 1
                self._turn += 1
                seat.turn = self._turn
        self._slack[places] -= 1
        self._left[places] -= 1
        short, spent = (self._slack[:count] < 0).nonzero()[0], (self._left[:count] <= 0).nonzero()[0]
        return Taken(seats, [self._seats[i] for i in short.tolist()], [self._seats[i] for i in spent.tolist()])


def _turn(seat: Seat[S]) -> tuple[int, int, int, int]:
    """The order of seats, and of those of a tenant who has waited longest."""
    return (seat.tenant.served, -seat.priority, seat.turn, seat.arrival)
