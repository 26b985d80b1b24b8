"""Who has been served how much, so that a tenant who had less goes before one who had more.

A counter for each tenant, in rows computed, as the virtual token counter of Sheng et al. ("Fairness in Serving Large
Language Models", OSDI 2024) has it: a tenant who begins to want something, or wants something again, is lifted to the
least of those who do, so that nobody saves up by staying away or by being silent. It knows no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

REMEMBERED = 1024
"""Tenants without sequences that are remembered because they have had more than somebody who wants something."""


@dataclass(eq=False, slots=True)
class Tenant:
    """One who shares.

    Attributes:
        served: rows computed for it, and what it was lifted by.
        seats: sequences it has.
        wanting: those of them that wait for room or for a step.
    """

    key: bytes
    served: int = 0
    seats: int = 0
    wanting: int = 0


class Tenants:
    """All who share."""

    def __init__(self) -> None:
        self._tenants: dict[bytes, Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def enter(self, key: bytes) -> Tenant:
        """The tenant of one more sequence."""
        tenant = self._tenants.setdefault(key, Tenant(key))
        tenant.seats += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One sequence less."""
        tenant.seats -= 1
        if tenant.seats:
            return
        wanting = [other.served for other in self._tenants.values() if other.wanting]
        gone = [one for one in self._tenants.values() if not one.seats]
        ahead = sorted((one for one in gone if wanting and one.served > min(wanting)), key=lambda one: -one.served)
        for one in {*gone}.difference(ahead[:REMEMBERED]):
            del self._tenants[one.key]

    def want(self, tenant: Tenant) -> None:
        """One more of its sequences wants something."""
        if not tenant.wanting:
            wanting = [other.served for other in self._tenants.values() if other.wanting]
            tenant.served = max(tenant.served, min(wanting, default=0))
        tenant.wanting += 1

    def rest(self, tenant: Tenant) -> None:
        """One less."""
        tenant.wanting -= 1
