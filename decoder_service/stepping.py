"""The loop that computes what the scheduler plans: one step after the other, as long as there is anything to do.

A step is planned as soon as the one before it is done. What its tokens mean is looked at by their owners while the next
one is computed. It knows neither requests nor tensors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Generic, NamedTuple

from chiasm.errors import ServerError, Unavailable
from decoder_service.scheduler import Scheduler
from decoder_service.seats import Attach, Outcome, Plan, S, Seat

_log = logging.getLogger(__name__)


class Result(NamedTuple, Generic[S]):
    """What a step came to.

    Attributes:
        units: of each, None if it was attached, or why not.
        outcomes: of the singles, then of the shares.
        failed: there is a failure among the outcomes.
        ended: who draws no token behind the one drawn.
    """

    units: Sequence[Exception | None]
    outcomes: Sequence[Outcome]
    failed: bool
    ended: Collection[Seat[S]]


class Stepping(Generic[S]):
    """Runs a scheduler's plans. Used from one event loop.

    Args:
        compute: a step. It answers for each sequence, and does not raise.
    """

    def __init__(self, scheduler: Scheduler[S], compute: Callable[[Plan[S]], Awaitable[Result[S]]]) -> None:
        self.scheduler = scheduler
        self._compute = compute
        self._runner: asyncio.Task[None] | None = None
        self._done: asyncio.Future[None] | None = None  # of the step that is running
        self._closed = False

    @property
    def running(self) -> bool:
        """There is something to do, or a step runs."""
        return self._runner is not None and not self._runner.done()

    def poke(self) -> None:
        """There may be something to do."""
        if self._closed:
            raise ending()
        if not self.running:
            self._runner = asyncio.create_task(self._run())

    async def attach(self, seat: Seat[S], works: Sequence[Callable[[], None]]) -> bool:
        """Attaches units in the next steps. False if the sequence gave way before all were. Raises what one raised."""
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        left = len(works)

        def settle(outcome: bool | Exception) -> None:
            nonlocal left
            left -= 1
            if settled.done():
                return
            if isinstance(outcome, Exception):
                settled.set_exception(outcome)
            elif not outcome or not left:
                settled.set_result(outcome)

        if not (works and seat.admitted):
            return seat.admitted
        self.scheduler.attach(Attach(seat, work, settle) for work in works)
        self.poke()
        return await settled

    async def make_way(self, seat: Seat[S], fits: Callable[[], bool]) -> bool:
        """Whether enough of those behind a sequence have given way for it (`Scheduler.make_way`)."""
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.scheduler.make_way(seat, fits, lambda made: None if settled.done() else settled.set_result(made))
        self.poke()
        return await settled

    @asynccontextmanager
    async def apart(self, seat: Seat[S]) -> AsyncIterator[None]:
        """While the block runs the sequence is in no step, and may be changed. What it wanted is to be said anew."""
        self.scheduler.withdraw(seat)
        while self._done is not None and self.scheduler.in_step(seat):
            await asyncio.shield(self._done)
        yield

    async def close(self) -> None:
        """Fails whoever waits, and waits for the step that is running."""
        self._closed = True
        self.scheduler.fail_all(ending())
        if self._runner is not None:
            await self._runner

    async def _run(self) -> None:
        plan = None
        try:
            while (plan := self.scheduler.plan()) is not None:
                self._done = asyncio.get_running_loop().create_future()
                try:
                    await self._step(plan)
                finally:
                    self._done.set_result(None)
                    self._done = None
        except Exception:
            # A broken promise of ours. Whoever waits must not wait for ever.
            _log.exception("a step broke")
            self.scheduler.give_up(plan, ServerError("STEP_BROKEN", "the step that was running broke"))

    async def _step(self, plan: Plan[S]) -> None:
        result = await self._compute(plan)
        self.scheduler.done(plan, result.outcomes, failed=result.failed, ended=result.ended)
        for unit, error in zip(plan.units, result.units, strict=True):
            unit.settled(True if error is None else error)
        for seat in plan.singles:
            seat.wake()
        for share in plan.shares:
            share.seat.wake()


def ending() -> Unavailable:
    return Unavailable("DRAINING", "the worker is ending", retry_after=1.0)
