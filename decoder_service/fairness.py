"""Who has been served how much, so that a tenant who had less goes before one who had more.

A counter for each tenant, in rows computed, as the virtual token counter of Sheng et al. ("Fairness in Serving Large
Language Models", OSDI 2024) has it: a tenant who comes, or comes back, is lifted to the least of those who are there,
so that nobody saves up by staying away. It knows no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Tenant:
    """One who shares.

    Attributes:
        served: rows computed for it, and what it was lifted by.
        present: sequences it has.
    """

    key: bytes
    served: int = 0
    present: int = 0


class Tenants:
    """All who share."""

    def __init__(self) -> None:
        self._tenants: dict[bytes, Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def enter(self, key: bytes) -> Tenant:
        """The tenant of one more sequence."""
        tenant = self._tenants.setdefault(key, Tenant(key))
        if not tenant.present:
            tenant.served = max(tenant.served, self._least())
        tenant.present += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One sequence less. Those who are gone are remembered while they have had more than somebody who is there."""
        tenant.present -= 1
        if not tenant.present:
            least = self._least()
            present = any(other.present for other in self._tenants.values())
            self._tenants = {
                key: other
                for key, other in self._tenants.items()
                if other.present or (present and other.served > least)
            }

    def _least(self) -> int:
        return min((tenant.served for tenant in self._tenants.values() if tenant.present), default=0)
