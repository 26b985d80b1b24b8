"""The breaker: a few failures in a row and nobody calls, until a probe is answered; then one failure is enough."""

from __future__ import annotations

import asyncio

from chiasm.cache.breaker import Breaker, State
from tests.waiting import until


class Probes:
    """Answered when told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> bool:
        self.asked += 1
        await self.gate.wait()
        return self.answers


def failing(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.failed()


async def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker(Probes(), failures=3)
    failing(breaker, 2)
    breaker.succeeded()
    failing(breaker, 2)
    assert breaker.closed
    failing(breaker, 1)
    assert (breaker.state, breaker.opened) == (State.OPEN, 1)
    await breaker.close()


async def test_one_probe_at_a_time_is_made_until_one_is_answered() -> None:
    probes = Probes()
    breaker = Breaker(probes, failures=1, pause=0.001, longest=0.002)
    probes.gate.clear()
    failing(breaker, 3)
    await until(lambda: breaker.state is State.HALF_OPEN)
    assert not breaker.closed
    failing(breaker, 3)  # of calls that began before
    breaker.succeeded()
    assert (breaker.state, probes.asked, breaker.opened) == (State.HALF_OPEN, 1, 1)
    probes.gate.set()
    await until(lambda: probes.asked > 3)
    assert not breaker.closed
    probes.answers = True
    await until(lambda: breaker.closed)


async def test_after_a_probe_the_first_failure_opens_it_again_until_a_call_succeeded() -> None:
    probes = Probes()
    probes.answers = True
    breaker = Breaker(probes, failures=3, pause=0.001)
    failing(breaker, 3)
    await until(lambda: breaker.closed)
    failing(breaker, 1)
    assert breaker.opened == 2
    await until(lambda: breaker.closed)
    breaker.succeeded()
    failing(breaker, 2)
    assert breaker.closed
    await breaker.close()


async def test_who_waits_for_it_to_close_waits_until_so_long_after_it_opened() -> None:
    probes = Probes()
    breaker = Breaker(probes, failures=1, pause=0.01)
    assert not await breaker.mended(10.0), "it was never open"
    breaker.failed()
    assert not await breaker.mended(0.05)
    assert not await breaker.mended(0.05), "the time counts from when it opened, for all who wait"
    probes.answers = True
    assert await breaker.mended(30.0) and breaker.closed
    await breaker.close()
