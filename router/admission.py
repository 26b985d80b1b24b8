"""Whether a request is taken now: decided by counting, before anything is done for it.

Costs are in tokens, estimated from the request alone. What a worker finds to be too much it refuses itself
(`chiasm.rpc.turns`); here is decided for the system as a whole, so that what is taken is answered in time whatever
else is asked. It knows no worker.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from chiasm.errors import DeadlineExceeded, InvalidRequest, Overloaded
from chiasm.rpc.cost import BYTES_PER_TOKEN, answer_tokens
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.memory import REQUESTS, UPLOADS, Memory
from router.pace import Pace
from router.tenants import Account, Tenant

BYTES_PER_VISUAL_TOKEN: Final = 256
"""Of a compressed picture, about: one of 640x640 has 100 KB and 400 tokens."""

MEDIUM_TOKENS: Final = 1024
"""What a medium is taken to have whose bytes are not with the request."""

SHARE: Final = 8
"""A tenant may have so many times what is free, where there are several. One alone then has eight ninths of all, and
there is always room for one more ("Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", Choudhury and
Hahne, 1998)."""

FEW: Final = 4
"""Requests that may wait whatever is foretold of their wait: what is foretold for few is mostly chance."""

RETRY_SECONDS: Final = 1.0
"""At least, until a refused request may come again."""


def cost_of(request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest | rpb.EstimateRequest) -> int:
    """Tokens of prompt, media and answers, about."""
    prompt = request.prompt
    ids = sum(len(part.tokens.ids) for part in prompt.plain.parts)
    text = (prompt.ByteSize() - ids) // BYTES_PER_TOKEN
    answer = answer_tokens(request.sampling) if isinstance(request, rpb.GenerateRequest) else 0
    return text + ids + sum(map(_medium, request.media)) + answer


def _medium(medium: pb.Media) -> int:
    size = medium.ByteSize() if medium.WhichOneof("source") != "handle" else 0
    return max(size // BYTES_PER_VISUAL_TOKEN, 1) if size else MEDIUM_TOKENS


def check_fits(request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest, context_limit: int) -> None:
    """Refuses what no worker can ever run, whatever its text and media come to.

    Raises InvalidRequest CONTEXT_LENGTH_EXCEEDED.
    """
    ids = sum(len(part.tokens.ids) for part in request.prompt.plain.parts)
    answer = (request.sampling.max_tokens or 1) if isinstance(request, rpb.GenerateRequest) else 0
    needed = ids + answer
    if needed > context_limit:
        raise InvalidRequest(
            "CONTEXT_LENGTH_EXCEEDED",
            f"the ids of the prompt{' and the answer' * bool(answer)} need {needed} positions, "
            f"the context has {context_limit}",
            facts={"needed": needed, "limit": context_limit, "fits_with": ""},
        )


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What is in flight at a time.

    Attributes:
        requests: of all tenants.
        cost: of those, in tokens. A request that costs more by itself is taken while there is no other.
        wait: seconds to a first token that are foretold, at most.
        memory: bytes of this process, of which it refuses the last twentieth. None for no bound.
    """

    requests: int = 1024
    cost: int = 1 << 24
    wait: float = 30.0
    memory: int | None = None


class Admission:
    """The requests of one router.

    Args:
        several: there are several tenants, and none may have all there is.
        memory: by default of `limits`.
        clock: seconds, monotonic.

    Attributes:
        requests, cost: in flight.
    """

    def __init__(
        self,
        limits: AdmissionLimits | None = None,
        *,
        several: bool = False,
        memory: Memory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or AdmissionLimits()
        self.requests = 0
        self.cost = 0
        self._several = several
        self._memory = memory or Memory(self.limits.memory, clock=clock)
        self._clock = clock
        self._pace = Pace(clock=clock)
        self._waiting = 0
        self._accounts: dict[str, Account] = {}

    def __len__(self) -> int:
        """Tenants of whom anything is remembered."""
        return len(self._accounts)

    def check_upload(self) -> None:
        """Raises Overloaded MEMORY_FULL while there is no memory for an upload."""
        self._memory.check(UPLOADS)

    @contextmanager
    def admit(self, tenant: Tenant, cost: int, *, seconds: float, waits: bool = True) -> Iterator[Admitted]:
        """Takes a request while the block lasts.

        Args:
            cost: in tokens (`cost_of`).
            seconds: to its deadline.
            waits: for a first token, or for a vector. One that asks for neither, or that has it and goes on, is only
                counted: its wait is not foretold, and nobody's from it.

        Raises DeadlineExceeded if there is no time left, and Overloaded, with a time to try again: MEMORY_FULL,
        TENANT_QUOTA, QUEUE_FULL for what is in flight, TOO_LATE for a request that would wait longer than it may.
        """
        if seconds <= 0:
            raise DeadlineExceeded("the deadline passed before the request was taken", stage="queue")
        account = self._accounts.setdefault(tenant.name, Account(clock=self._clock))
        try:
            self._memory.check(REQUESTS)
            account.check(tenant.quota, cost)
            self._check_bounds(account, cost)
            if waits:
                self._check_wait(account, seconds)
            account.spend(tenant.quota, cost)
            self._count(account, 1, cost)
            admitted = Admitted(self, account, cost, waits=waits)
            try:
                yield admitted
            finally:
                self._count(account, -1, -cost)
                admitted.end()
        finally:
            if account.idle(tenant.quota):
                self._accounts.pop(tenant.name, None)

    def _check_bounds(self, account: Account, cost: int) -> None:
        limits = self.limits
        if self.requests >= limits.requests:
            raise _full("requests are in flight", self.requests, limits.requests)
        if self.cost and self.cost + cost > limits.cost:
            raise _full("tokens are in flight", self.cost, limits.cost)
        if not self._several:
            return
        if account.requests >= SHARE * (limits.requests - self.requests):
            raise _full("requests of this tenant are in flight", account.requests, limits.requests)
        if account.cost and account.cost + cost > SHARE * (limits.cost - self.cost):
            raise _full("tokens of this tenant are in flight", account.cost, limits.cost)

    def _check_wait(self, account: Account, seconds: float) -> None:
        """Workers serve tenants in turn, so one that has less than its part of what waits does not wait for all."""
        if self._waiting < FEW:
            return
        wait, allowed = self._pace.wait, min(self.limits.wait, seconds)
        waiting = sum(1 for one in self._accounts.values() if one.waiting or one is account)
        if wait <= allowed or account.waiting * waiting < self._pace.waiting:
            return
        # The hint is drawn, so that those who were refused together do not come back together.
        raise Overloaded(
            "TOO_LATE",
            f"a first token is {wait:.2f} s away, {allowed:.2f} s are allowed",
            retry_after=max(wait - allowed, RETRY_SECONDS) * random.uniform(1.0, 1.5),
            facts={"wait": round(wait, 2), "limit": round(allowed, 2)},
        )

    def _count(self, account: Account, requests: int, cost: int) -> None:
        self.requests += requests
        self.cost += cost
        account.requests += requests
        account.cost += cost

    def _wait_for(self, account: Account, requests: int, cost: int) -> None:
        self._waiting += requests
        account.waiting += cost


class Admitted:
    """One request that was taken."""

    def __init__(self, admission: Admission, account: Account, cost: int, *, waits: bool) -> None:
        self._admission = admission
        self._account = account
        self._cost = cost
        self._waits = waits
        if waits:
            admission._wait_for(account, 1, cost)
            admission._pace.came(cost)

    def began(self) -> None:
        """Its answer has begun. May be said again."""
        if self._waits:
            self._waits = False
            self._admission._pace.began(self._cost)
            self._admission._wait_for(self._account, -1, -self._cost)

    def end(self) -> None:
        if self._waits:
            self._waits = False
            self._admission._pace.left(self._cost)
            self._admission._wait_for(self._account, -1, -self._cost)


def _full(what: str, got: int, limit: int) -> Overloaded:
    return Overloaded(
        "QUEUE_FULL", f"{got} {what}, of {limit}", retry_after=RETRY_SECONDS, facts={"waiting": got, "limit": limit}
    )
