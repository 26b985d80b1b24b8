"""Which units go through the model next: a fair queue, and passes packed from it.

Tenants share the model by patches, and so do the calls of a tenant among themselves (`chiasm.fairness`), after their
priority. A unit is wanted by every call that waits for it and leaves the queue for the first whose turn it is. So a
single picture waits for the passes that are under way and then goes, whatever lies in the queue for others.

It knows nothing of pixels or of what a pass does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from chiasm.fairness import Sharer, Sharers
from encoder_service.bounds import Bounds
from encoder_service.flights import Flight


@dataclass(eq=False, slots=True)
class Share:
    """One call among those who share the model.

    Attributes:
        tenant: for whom it is.
        priority: higher goes before other calls of the tenant.
        flights: what it wants, in order.
    """

    tenant: bytes
    priority: int
    arrival: int
    flights: dict[Flight, None] = field(default_factory=dict)

    @property
    def name(self) -> bytes:
        return self.arrival.to_bytes(8, "big")


@dataclass(eq=False, slots=True)
class Tenant:
    """One tenant while it wants something, or while an entry of it finds no room.

    Attributes:
        stuck: entries of it that find no room in the store. It has no turn until they do.
        calls: what its calls have had; `wanting` are those with something in the queue.
    """

    sharer: Sharer
    calls: Sharers = field(default_factory=Sharers)
    wanting: dict[Share, Sharer] = field(default_factory=dict)
    stuck: int = 0


class Batcher:
    """The queue. Used from one event loop."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._sharers = Sharers()
        self._tenants: dict[bytes, Tenant] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        """Units that wait."""
        return len(
            {flight for tenant in self._tenants.values() for share in tenant.wanting for flight in share.flights}
        )

    def share(self, tenant: bytes, priority: int = 0) -> Share:
        """A call that will want something. It takes nothing before it does."""
        return Share(tenant, priority, next(self._arrivals))

    def want(self, flight: Flight, share: Share) -> None:
        """A call wants a unit that is in the queue, or puts it there."""
        flight.wanted_by[share] = flight.wanted_by.get(share, 0) + 1
        if flight in share.flights:
            return
        tenant = self._tenant(share.tenant)
        if not share.flights:
            own = tenant.calls.enter(share.name)
            self._sharers.want(tenant.sharer)
            tenant.calls.want(own)
            tenant.wanting[share] = own
        share.flights[flight] = None

    def leave(self, flight: Flight, share: Share) -> bool:
        """A call wants a unit no more. Returns whether nobody does, and the unit has left the queue."""
        flight.wanted_by[share] -= 1
        if not flight.wanted_by[share]:
            self._remove(flight, share)
        return not flight.wanted_by

    def take(self) -> list[Flight]:
        """The units of the next pass, equal grids side by side. None where nobody has a turn."""
        taken: list[Flight] = []
        patches = 0
        while (turn := self._turn()) is not None:
            tenant, share = turn
            flight = next(iter(share.flights))
            of_unit = flight.unit.patches
            if taken and not self._bounds.fit(patches + of_unit, len(taken) + 1):
                break
            patches += of_unit
            tenant.sharer.served += of_unit
            tenant.wanting[share].served += of_unit
            flight.tenant = share.tenant
            for wanting in tuple(flight.wanted_by):
                self._remove(flight, wanting)
            taken.append(flight)
        return sorted(taken, key=lambda flight: flight.unit.grid)

    def hold(self, flight: Flight) -> None:
        """The entry of a unit that was taken finds no room: its tenant has no turn until `go_on`."""
        assert flight.tenant is not None
        self._tenant(flight.tenant).stuck += 1

    def go_on(self, flight: Flight) -> None:
        """It found room, or is given up. Once after each `hold`."""
        assert flight.tenant is not None
        tenant = self._tenants[flight.tenant]
        tenant.stuck -= 1
        self._forget(tenant)

    def _tenant(self, name: bytes) -> Tenant:
        """One that may have been forgotten: its last unit leaves the queue before the entry finds no room."""
        if name not in self._tenants:
            self._tenants[name] = Tenant(self._sharers.enter(name))
        return self._tenants[name]

    def _turn(self) -> tuple[Tenant, Share] | None:
        turns = [tenant for tenant in self._tenants.values() if tenant.wanting and not tenant.stuck]
        if not turns:
            return None
        tenant = min(turns, key=lambda one: (one.sharer.served, next(iter(one.wanting)).arrival))
        share = min(tenant.wanting, key=lambda one: (-one.priority, tenant.wanting[one].served, one.arrival))
        return tenant, share

    def _remove(self, flight: Flight, share: Share) -> None:
        del flight.wanted_by[share]
        del share.flights[flight]
        if share.flights:
            return
        tenant = self._tenants[share.tenant]
        own = tenant.wanting.pop(share)
        self._sharers.rest(tenant.sharer)
        tenant.calls.rest(own)
        tenant.calls.leave(own)
        self._forget(tenant)

    def _forget(self, tenant: Tenant) -> None:
        if not tenant.wanting and not tenant.stuck:
            del self._tenants[tenant.sharer.key]
            self._sharers.leave(tenant.sharer)
