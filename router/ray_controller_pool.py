"""One pool of workers over Ray: watches each, replaces what dies or stands still, and goes towards what is wanted.

What is decided is decided elsewhere, by arithmetic (`scaling`, `restarts`, `rolling`); here it is done. Workers are
seen as the router sees them, by `Info`, and besides by what their actors report. It knows actors, and nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

from router.awake import Awake
from router.hopeless import ATTEMPTS, hopeless
from router.membership import Hopeless
from router.ray_controller_actors import Actors, Gone, Named, Unheard
from router.ray_controller_worker import Worker
from router.ray_plan import Plan, Pool
from router.restarts import Deaths
from router.rolling import step
from router.scaling import Seen, Wanted

_log = logging.getLogger(__name__)

PARTING: Final = 1.0
"""Seconds between a worker's being taken from the membership and its being told to drain: the router hears of it."""

REMOVING: Final = 7.0
"""Seconds that each worker has to end when all end: their router has drained."""

FOREVER: Final = 86_400.0
"""Seconds that an actor may wait for a node that has room for it."""

REFUSED: Final = 2
"""Exit status of a worker that was asked for what cannot be: it will not be otherwise the next time."""


class WorkerPool:
    """Workers of one kind.

    Args:
        changed: called when `targets`, `asleep` or `hopeless` answers otherwise.
    """

    def __init__(self, plan: Plan, pool: Pool, actors: Actors, changed: Callable[[], None]) -> None:
        self.pool = pool
        self.hopeless: Hopeless | None = None
        self._plan = plan
        self._actors = actors
        self._changed = changed
        self._workers: dict[str, Worker] = {}
        self._awake = Awake(2 * plan.beat)
        self._deaths = Deaths()
        self._served = False  # a worker of it was ready
        self._wanted = Wanted.first(pool.scale, time.monotonic())
        self._placing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None

    def adopt(self, name: Named, actor: Any) -> None:
        """Takes over an actor that is there. One that still waits for a node will be placed again, which costs nothing;
        taken for one that waits, one that stands still would hold its place for ever."""
        _log.info("adopted", extra={"worker": str(name), "pool": self._label})
        worker = Worker(name, actor, self._awake, adopted=True)
        worker.placed.set()
        self._watch(worker)
        self._wanted = Wanted.first(self.pool.scale, time.monotonic(), there=len(self._workers))

    def targets(self) -> Iterator[str]:
        for worker in self._workers.values():
            if worker.takes_calls and worker.target:
                yield worker.target

    @property
    def asleep(self) -> bool:
        return self._wanted.count == 0

    def move(self, waits: Mapping[str, float]) -> None:
        """One step: called at every beat. Raises what nobody foresaw in anything that was begun: the next controller
        finds all as it is.

        Args:
            waits: seconds that requests have waited at the router for a worker, by model.
        """
        if self._fault is not None:
            raise self._fault
        now, awake = time.monotonic(), self._awake.now()
        there = list(self._workers.values())
        self._want([worker for worker in there if worker.takes_calls], waits, now)
        for worker in there:
            if worker.state == "starting" and worker.placed.is_set() and awake - worker.since > self._plan.start:
                self._lose(worker, f"it was not ready after {self._plan.start:g} s")
        steps = step([worker.standing(self.pool.print) for worker in self._workers.values()], self._wanted.count)
        placing = self._placing is not None and not self._placing.done()
        if steps.start and not placing and now >= self._deaths.not_before:
            self._placing = self._begin(self._place())
        if steps.wake is not None:
            woken = self._workers[steps.wake]
            woken.leaving = woken.adopted = False
            woken.become("starting", "")
            woken.ending = self._begin(self._start(woken))
        for name, goes in ((steps.rest, False), (steps.drain, True)):
            if name is not None:
                self._let_go(self._workers[name], goes=goes)
        for name in steps.remove:
            self._let_go(self._workers[name], goes=True)

    async def close(self, *, remove: bool) -> None:
        """Ends watching. Removes the workers too, if it is so wished: all at once, each given a moment to end."""
        if self._placing is not None:  # what the control store has been asked for comes, whoever waits for it
            await asyncio.wait([self._placing], timeout=REMOVING / 4)
        workers = list(self._workers.values())
        if remove:
            await asyncio.gather(*(self._end(worker, parting=0.0, seconds=REMOVING) for worker in workers))
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in workers))

    # -- all of them -------------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"{self.pool.role} {self.pool.model}"

    def _want(self, ready: Sequence[Worker], waits: Mapping[str, float], now: float) -> None:
        oldest = max((worker.oldest_wait for worker in ready), default=waits.get(self.pool.model, 0.0))
        seen = Seen(oldest, sum(worker.running for worker in ready), len(ready))
        before, self._wanted = self._wanted, self._wanted.after(self.pool.scale, seen, now)
        if before.count != self._wanted.count:
            _log.info("scaling", extra={"pool": self._label, "workers": self._wanted.count, "wait": round(oldest, 3)})
            self._changed()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()

    # -- one worker --------------------------------------------------------------------------------------------------

    async def _place(self) -> None:
        try:
            name, actor = await self._actors.place(self.pool)
        except (*Unheard, ValueError) as error:
            self._count_death(0.0)
            _log.warning("not placed", extra={"pool": self._label, "error": str(error)})
            return
        _log.info("placed", extra={"worker": str(name), "pool": self._label})
        worker = Worker(name, actor, self._awake)
        self._watch(worker)
        worker.ending = self._begin(self._start(worker))

    async def _start(self, worker: Worker) -> None:
        """An actor that is nowhere yet keeps the call until it is."""
        try:
            await self._actors.ask(worker.actor, "start", seconds=FOREVER)
        except Gone:
            pass  # whoever watches it finds out
        except Unheard as error:
            if str(worker.name) in self._workers:
                self._lose(worker, f"its process could not be started: {str(error).strip().splitlines()[-1:]}")
        worker.since = worker.heard = self._awake.now()
        worker.placed.set()

    def _watch(self, worker: Worker) -> None:
        self._workers[str(worker.name)] = worker
        worker.watching = self._begin(self._keep_watching(worker))

    async def _keep_watching(self, worker: Worker) -> None:
        await worker.placed.wait()
        while str(worker.name) in self._workers:
            try:
                report = await self._actors.ask(worker.actor, "report", seconds=self._plan.silence)
            except Gone as error:
                self._died(worker, next(iter(str(error).splitlines()), "it is gone"))
                return
            except Unheard as error:
                silent = self._awake.now() - worker.heard
                if silent > self._plan.silence:
                    self._lose(worker, f"its actor has not answered for {silent:.1f} s: {type(error).__name__}")
                    return
                await asyncio.sleep(self._plan.beat)
                continue
            worker.heard = self._awake.now()
            if report["state"] == "ended":
                why = f"its process ended with exit status {report['code']}"
                self._lose(worker, why, code=report["code"], tail=report["tail"])
                return
            await self._hear(worker, report)
            silent = self._awake.now() - worker.said
            if worker.state == "ready" and silent > self._plan.silence:
                self._lose(worker, f"it has not said who it is for {silent:.1f} s")
                return
            await asyncio.sleep(self._plan.beat)

    async def _hear(self, worker: Worker, report: Mapping[str, Any]) -> None:
        state, target = report["state"], report["target"]
        if state == "resting":
            if not worker.leaving and not worker.adopted:
                return  # it has been placed, and told to start
            worker.running, worker.oldest_wait = 0, 0.0
        if state in ("ready", "draining") and target:
            await worker.ask(self.pool.role, target, seconds=min(5.0, self._plan.silence))
        if state == "draining" and not worker.leaving:
            self._let_go(worker, goes=False)  # whoever told it to is not there any more
        if (worker.state, worker.target) != (state, target):
            worker.become(state, target)
            if state == "ready":
                self._served, self.hopeless = True, None
            where = {"target": target, "node": report["node"], "pid": report["pid"]}
            _log.info(f"worker {state}", extra={"worker": str(worker.name), "pool": self._label, **where})
            self._changed()

    def _died(self, worker: Worker, why: str, *, code: int | None = None, tail: Sequence[str] = ()) -> None:
        """Forgets a worker. If nobody asked for its end, another takes its place when that is due."""
        if self._workers.pop(str(worker.name), None) is None:
            return  # that was told before
        self._begin(worker.close())
        if not worker.goes:
            now = self._awake.now()
            delay = self._count_death(now - worker.ready_since if worker.ready_since is not None else 0.0)
            facts = {"worker": str(worker.name), "why": why, "deaths": self._deaths.count, "again_in": delay}
            _log.warning("died", extra={**facts, "tail": list(tail)[-3:]})
            if not self._served and (self._deaths.count >= ATTEMPTS or code == REFUSED):
                self.hopeless = hopeless(self._label, why, code, tail, deaths=self._deaths.count)
        self._changed()

    def _count_death(self, lived: float) -> float:
        """Of a worker that was ready for so many seconds. Returns seconds until the next may start."""
        now = time.monotonic()
        self._deaths = self._deaths.after(self._plan.patience, lived=lived, now=now)
        return round(max(0.0, self._deaths.not_before - now), 3)

    def _lose(self, worker: Worker, why: str, *, code: int | None = None, tail: Sequence[str] = ()) -> None:
        """Gives a worker up that is there and of no use."""
        self._died(worker, why, code=code, tail=tail)
        self._begin(self._actors.kill(worker.actor))

    def _let_go(self, worker: Worker, *, goes: bool) -> None:
        worker.leaving, worker.goes = True, goes
        self._changed()
        seconds = self.pool.drain + self._plan.drain
        worker.ending = self._begin(self._end(worker, seconds=seconds) if goes else self._rest(worker, seconds))

    async def _rest(self, worker: Worker, seconds: float) -> None:
        await asyncio.sleep(PARTING)
        try:
            await self._actors.stop(worker.actor, seconds=seconds)
        except Gone:
            pass  # whoever watches it finds out
        except Unheard as error:
            if str(worker.name) in self._workers:
                self._lose(worker, f"it did not end when it was to rest: {type(error).__name__}")

    async def _end(self, worker: Worker, *, seconds: float, parting: float = PARTING) -> None:
        """Drains a worker, and removes its actor."""
        worker.leaving = worker.goes = True
        await asyncio.sleep(parting if worker.state != "resting" else 0)
        if not await self._actors.part(worker.actor, seconds=seconds):
            _log.warning("did not drain", extra={"worker": str(worker.name)})
        if self._workers.pop(str(worker.name), None) is not None and worker.watching is not None:
            worker.watching.cancel()
        await worker.close()
        _log.info("removed", extra={"worker": str(worker.name)})
        self._changed()
