"""Units on their way into the store, each once however many wait for it. It knows who waits, and nothing of how a unit
is encoded or where it is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from chiasm.cache.form import Form
from chiasm.cache.place import Place
from chiasm.cache.sealed import EntryKey
from chiasm.cache.store import Lease
from chiasm.models.family import Grid

if TYPE_CHECKING:
    from encoder_service.batcher import Share


class Unit(NamedTuple):
    """One unit, ready for the model.

    Attributes:
        pixels: uint8 RGB (frames, 3, height, width) as it is encoded.
        form: of its entry.
        root: of the tenant, under which the key was made.
    """

    key: EntryKey
    pixels: Tensor
    grid: Grid
    form: Form
    root: bytes

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass(eq=False, slots=True)
class Waiter:
    """One who waits for a unit, with a pin of his own and a future of his own: whoever leaves touches nobody.

    Attributes:
        shared: he reads it on another node.
        place: where the entry lies, once it is there and pinned with `lease`.
        left: he waits no more, for whatever reason.
    """

    lease: Lease
    share: Share
    shared: bool
    place: asyncio.Future[Place]
    left: bool = False

    def fail(self, error: Exception) -> None:
        """Tells him that there is no entry, unless he was told something already."""
        if not self.place.done():
            self.place.set_exception(error)
            self.place.exception()  # seen, even if he is just leaving


@dataclass(eq=False, slots=True)
class Flight:
    """One unit between the first who wanted it and the store.

    Attributes:
        waiters: who waits for it, in the order they came; nobody, once all have left.
        wanted_by: while it is queued, the calls that want it, and how often each does.
        tenant: for whom it left the queue, by the name of its share.
    """

    unit: Unit
    waiters: list[Waiter] = field(default_factory=list)
    wanted_by: dict[Share, int] = field(default_factory=dict)
    tenant: bytes | None = None

    @property
    def queued(self) -> bool:
        return bool(self.wanted_by)

    def unsettled(self) -> Waiter | None:
        """The first who still waits to be told; who reads it on this node comes before who needs another store for
        it."""
        waiting = (waiter for waiter in self.waiters if not waiter.place.done())
        return min(waiting, key=lambda waiter: waiter.shared, default=None)

    def fail(self, error: Exception) -> None:
        """Tells everybody who waits."""
        for waiter in self.waiters:
            waiter.fail(error)


class Flights:
    """All flights, by key."""

    def __init__(self) -> None:
        self._flying: dict[EntryKey, Flight] = {}

    def __len__(self) -> int:
        return len(self._flying)

    def __iter__(self) -> Iterator[Flight]:
        return iter(tuple(self._flying.values()))

    def __contains__(self, key: EntryKey) -> bool:
        return key in self._flying

    def get(self, key: EntryKey) -> Flight | None:
        return self._flying.get(key)

    def begin(self, unit: Unit) -> Flight:
        assert unit.key not in self._flying, "a unit flies once"
        flight = self._flying[unit.key] = Flight(unit)
        return flight

    def end(self, flight: Flight) -> None:
        """The unit is in the store, or will not be: whoever comes now asks the store. Once is enough."""
        if self._flying.get(flight.unit.key) is flight:
            del self._flying[flight.unit.key]
