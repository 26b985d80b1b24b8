"""For whom a request is: a name, the secret of its entries, and how much it may ask for.

Who a caller is is found out elsewhere. There is one tenant while there are no keys (`chiasm.cache.tenant.LOCAL`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from chiasm.errors import Overloaded


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may ask for, beside all others. None is no bound.

    Attributes:
        requests: in flight at a time.
        cost: of those, in tokens.
        cost_per_minute: that begins, in the long run; a minute's worth may come at once.
    """

    requests: int | None = None
    cost: int | None = None
    cost_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """One who shares the system with others.

    Attributes:
        name: by which workers share themselves out. It is told to them and to nobody else.
        root: under which its entries are kept, 32 bytes.
    """

    name: str
    root: bytes = field(repr=False)
    quota: Quota = Quota()


class Account:
    """What a tenant has in flight.

    Args:
        clock: seconds, monotonic.

    Attributes:
        requests, cost: in flight.
        waiting: cost of those that have no answer yet.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = 0
        self.cost = 0
        self.waiting = 0
        self._clock = clock
        self._spent = 0.0  # of the minute's worth, as of `_at`
        self._at = clock()

    def check(self, quota: Quota, cost: int) -> None:
        """Raises Overloaded TENANT_QUOTA if one more request would be more than the tenant may have."""
        if quota.requests is not None and self.requests >= quota.requests:
            raise _over("requests in flight", self.requests, quota.requests, 1.0)
        if quota.cost is not None and self.cost and self.cost + cost > quota.cost:
            raise _over("tokens in flight", self.cost + cost, quota.cost, 1.0)
        if quota.cost_per_minute is not None:
            spent = self._spent_now(quota.cost_per_minute)
            if spent and spent + cost > quota.cost_per_minute:
                excess = min(spent + cost - quota.cost_per_minute, spent)
                wait = 60 * excess / quota.cost_per_minute
                raise _over("tokens a minute", round(spent + cost), quota.cost_per_minute, wait)

    def spend(self, quota: Quota, cost: int) -> None:
        if quota.cost_per_minute is not None:
            self._spent = self._spent_now(quota.cost_per_minute) + cost
            self._at = self._clock()

    def idle(self, quota: Quota) -> bool:
        """There is nothing to remember of it."""
        return not self.requests and not (quota.cost_per_minute and self._spent_now(quota.cost_per_minute))

    def _spent_now(self, per_minute: int) -> float:
        return max(self._spent - (self._clock() - self._at) * per_minute / 60, 0.0)


def _over(what: str, got: int, limit: int, seconds: float) -> Overloaded:
    return Overloaded(
        "TENANT_QUOTA", f"{got} {what}, {limit} are allowed", retry_after=seconds, facts={"got": got, "limit": limit}
    )
