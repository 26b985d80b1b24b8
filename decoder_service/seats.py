"""What a scheduler and the owners of its sequences tell each other: seats, units to attach, and the plan of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from chiasm.fairness import Sharer
from decoder_service.room import Room
from decoder_service.states import Gathering, State

S = TypeVar("S", bound=Hashable)

Outcome: TypeAlias = int | State | Gathering | Exception | None
"""Of a sequence in a step: the token drawn or the state taken, all states once they are gathered, None where none of it
was to be, or why it failed."""


@dataclass(eq=False, slots=True)
class Seat(Generic[S]):
    """A sequence and what the scheduler knows of it.

    Attributes:
        wake: called when there is something to look at here.
        priority: higher goes before others of the tenant.
        arrival: counted; earlier goes first.
        stops: tokens after which it draws no other.
        need: room that it waits for; None when it does not wait.
        admitted: it has room.
        preempted: it had room, and has lost all it held. It is to be entered again.
        rows: to be computed.
        draws: a token is drawn from the last of them, or its state is taken, which counts as one.
        allowed: tokens that may be drawn before its owner allows more.
        fresh: tokens drawn that its owner has not taken yet. (Between a step and its end a failure may be among them.)
        error: why it cannot go on.
        step: the last one it was in.
    """

    sequence: S
    wake: Callable[[], None]
    tenant: Sharer
    priority: int
    arrival: int
    stops: frozenset[int] = frozenset()
    need: Room | None = None
    admitted: bool = False
    preempted: bool = False
    rows: int = 0
    draws: bool = False
    allowed: int = 0
    fresh: list[Outcome] = field(default_factory=list)
    error: Exception | None = None
    wanting: bool = False  # counted as `Sharer.wanting`
    step: int = -1
    turn: int = 0  # when it last took one of the places that there were too few of
    place: int = -1  # among those that draw a token a step; -1: not there


def order(seat: Seat[S]) -> tuple[int, int, int]:
    """The lowest goes first: by what its tenant has had, then by priority, then by arrival."""
    return (seat.tenant.served, -seat.priority, seat.arrival)


def rank(seat: Seat[S]) -> tuple[int, int]:
    """Of a tenant's sequences the highest gives way first."""
    return (-seat.priority, seat.arrival)


@dataclass(eq=False, slots=True)
class Attach(Generic[S]):
    """A unit to be attached to a sequence in a step. `settled` is called with whether it was, or why not."""

    seat: Seat[S]
    work: Callable[[], None]
    settled: Callable[[bool | Exception], None]


class Share(NamedTuple, Generic[S]):
    """A sequence's next rows in a step, and whether a token is drawn from the last."""

    seat: Seat[S]
    rows: int
    draws: bool


class Plan(NamedTuple, Generic[S]):
    """One step.

    Attributes:
        units: attached before anything is computed.
        shares: of prefills.
        singles: sequences that compute one row and draw a token from it.
    """

    units: list[Attach[S]]
    shares: list[Share[S]]
    singles: list[Seat[S]]

    @property
    def rows(self) -> int:
        return len(self.singles) + sum(share.rows for share in self.shares)
