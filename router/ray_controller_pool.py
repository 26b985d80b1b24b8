"""One pool of workers over Ray: watches each, replaces what dies or stands still, and goes towards what is wanted.

What is decided is decided elsewhere, by arithmetic (`scaling`, `restarts`, `rolling`); here it is done. Workers are
seen as the router sees them, by `Info`, and besides by what their actors report. It knows actors, and nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from chiasm.errors import ChiasmError
from router.ray_controller_actors import Actors, Gone, Named, Unheard
from router.ray_plan import Plan, Pool
from router.remote import RemoteDecoder, RemoteEncoder
from router.restarts import Deaths
from router.rolling import Standing, State, step
from router.scaling import Seen, Wanted

_log = logging.getLogger(__name__)

PARTING: Final = 1.0
"""Seconds between a worker's being taken from the membership and its being told to drain: the router hears of it."""


class Worker:
    """An actor that is watched, from its placing or its finding to its end.

    Attributes:
        state: as `rolling` has it.
        target: what a channel to it takes; empty while it takes no calls.
        running, oldest_wait: as it said last.
    """

    def __init__(self, name: Named, actor: Any, *, adopted: bool = False) -> None:
        self.name = name
        self.actor = actor
        self.adopted = adopted  # who knows what it was told before
        self.state: State = "starting"
        self.target = ""
        self.running = 0
        self.oldest_wait = 0.0
        self.leaving = False  # drains, or is about to
        self.goes = False  # and does not rest then
        self.ready_since: float | None = None
        self.heard = time.monotonic()  # by its actor
        self.said = time.monotonic()  # by itself
        self.watching: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.way: RemoteEncoder | RemoteDecoder | None = None


class WorkerPool:
    """Workers of one kind.

    Args:
        changed: called when `targets` answers otherwise.
    """

    def __init__(self, plan: Plan, pool: Pool, actors: Actors, changed: Callable[[], None]) -> None:
        self.pool = pool
        self._plan = plan
        self._actors = actors
        self._changed = changed
        self._workers: dict[str, Worker] = {}
        self._deaths = Deaths()
        self._wanted = Wanted.first(pool.scale, time.monotonic())
        self._placing: asyncio.Task[None] | None = None
        self._removing: set[asyncio.Task[None]] = set()

    def adopt(self, name: Named, actor: Any) -> None:
        """Takes over an actor that is there."""
        _log.info("adopted", extra={"worker": str(name), "pool": self._label})
        self._watch(Worker(name, actor, adopted=True))

    def targets(self) -> Iterator[str]:
        for worker in self._workers.values():
            if worker.state == "ready" and not worker.leaving and worker.target:
                yield worker.target

    @property
    def asleep(self) -> bool:
        return self._wanted.count == 0

    def move(self, waits: Mapping[str, float]) -> None:
        """One step: called at every beat.

        Args:
            waits: seconds that requests have waited at the router for a worker, by model.
        """
        now = time.monotonic()
        there = list(self._workers.values())
        ready = [worker for worker in there if worker.state == "ready" and not worker.leaving]
        oldest = max((worker.oldest_wait for worker in ready), default=0.0)
        if not ready:
            oldest = max(oldest, waits.get(self.pool.model, 0.0))
        seen = Seen(oldest, sum(worker.running for worker in ready), len(ready))
        before, self._wanted = self._wanted, self._wanted.after(self.pool.scale, seen, now)
        if before.count != self._wanted.count:
            _log.info("scaling", extra={"pool": self._label, "workers": self._wanted.count, "wait": round(oldest, 3)})
            self._changed()
        standing = [
            Standing(
                str(worker.name),
                "draining" if worker.goes or (worker.leaving and worker.state != "resting") else worker.state,
                worker.name.print == self.pool.print,
                worker.running,
            )
            for worker in there
        ]
        steps = step(standing, self._wanted.count)
        placing = self._placing is not None and not self._placing.done()
        if steps.start and not placing and now >= self._deaths.not_before:
            self._placing = asyncio.create_task(self._place())
        if steps.wake is not None:
            woken = self._workers[steps.wake]
            woken.leaving, woken.adopted, woken.state, woken.said = False, False, "starting", now
            woken.ending = asyncio.create_task(self._start(woken))
        for name, goes in ((steps.rest, False), (steps.drain, True)):
            if name is not None:
                self._let_go(self._workers[name], goes=goes)
        for name in steps.remove:
            self._let_go(self._workers[name], goes=True)

    async def close(self, *, remove: bool) -> None:
        """Ends watching. Removes the workers too, if it is so wished: all at once, each given its drain."""
        if self._placing is not None:
            self._placing.cancel()
            await asyncio.gather(self._placing, return_exceptions=True)
        workers = list(self._workers.values())
        if remove:
            await asyncio.gather(*(self._end(worker, parting=0.0) for worker in workers))
        for task in [task for worker in workers for task in (worker.watching, worker.ending) if task is not None]:
            task.cancel()
        await asyncio.gather(*(worker.way.close() for worker in workers if worker.way is not None))

    # -- one worker --------------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"{self.pool.role} {self.pool.model}"

    async def _place(self) -> None:
        name, actor = await self._actors.place(self.pool)
        _log.info("placed", extra={"worker": str(name), "pool": self._label})
        worker = Worker(name, actor)
        self._watch(worker)
        worker.ending = asyncio.create_task(self._start(worker))

    async def _start(self, worker: Worker) -> None:
        """An actor that is nowhere yet keeps the call until it is."""
        try:
            await self._actors.ask(worker.actor, "start", seconds=86_400)
        except Gone:
            pass  # whoever watches it finds out
        except Unheard as error:
            _log.warning("start failed", extra={"worker": str(worker.name), "error": str(error)})

    def _watch(self, worker: Worker) -> None:
        self._workers[str(worker.name)] = worker
        worker.watching = asyncio.create_task(self._keep_watching(worker))

    async def _keep_watching(self, worker: Worker) -> None:
        placed = False  # until it has answered once, it may be waiting for a node that has room
        while True:
            try:
                report = await self._actors.ask(worker.actor, "report", seconds=self._plan.silence)
            except Gone as error:
                self._died(worker, str(error).splitlines()[0] if str(error) else "it is gone", [])
                return
            except Unheard as error:
                silent = time.monotonic() - worker.heard
                if placed and silent > self._plan.silence:
                    self._lose(worker, f"its actor has not answered for {silent:.1f} s: {type(error).__name__}")
                    return
                await asyncio.sleep(self._plan.beat)
                continue
            placed = True
            worker.heard = time.monotonic()
            if report["state"] == "ended":
                self._lose(worker, f"its process ended with exit status {report['code']}", report["tail"])
                return
            await self._hear(worker, report)
            silent = time.monotonic() - worker.said
            if worker.state == "ready" and silent > self._plan.silence:
                self._lose(worker, f"it has not said who it is for {silent:.1f} s")
                return
            await asyncio.sleep(self._plan.beat)

    async def _hear(self, worker: Worker, report: dict[str, Any]) -> None:
        state, target = report["state"], report["target"]
        if state == "resting":
            if not worker.leaving and not worker.adopted:
                return  # it has been placed, and told to start
            worker.running, worker.oldest_wait = 0, 0.0
        if state in ("ready", "draining") and target:
            await self._ask(worker, target)
        if (worker.state, worker.target) != (state, target):
            if state == "ready" and worker.state != "ready":
                worker.ready_since = worker.said = time.monotonic()
            worker.state, worker.target = state, target
            where = {"target": target, "node": report["node"], "pid": report["pid"]}
            _log.info(f"worker {state}", extra={"worker": str(worker.name), "pool": self._label, **where})
            self._changed()

    async def _ask(self, worker: Worker, target: str) -> None:
        """Asks the worker itself, as the router does."""
        if worker.way is None or worker.way.target != target:
            if worker.way is not None:
                await worker.way.close()
            worker.way = RemoteEncoder(target) if self.pool.role == "encoder" else RemoteDecoder(target)
        try:
            info = await worker.way.info(timeout=min(5.0, self._plan.silence))
        except ChiasmError:
            return
        worker.said = time.monotonic()
        worker.running = info.load.running + info.load.waiting
        worker.oldest_wait = info.load.oldest_wait.ToTimedelta().total_seconds()

    def _died(self, worker: Worker, why: str, tail: list[str]) -> None:
        """Forgets a worker. If nobody asked for its end, another takes its place when that is due."""
        self._workers.pop(str(worker.name), None)
        if not worker.goes:
            now = time.monotonic()
            lived = now - worker.ready_since if worker.ready_since is not None else 0.0
            self._deaths = self._deaths.after(self._plan.patience, lived=lived, now=now)
            delay = round(max(0.0, self._deaths.not_before - now), 3)
            facts = {"worker": str(worker.name), "why": why, "deaths": self._deaths.count, "again_in": delay}
            _log.warning("died", extra={**facts, "tail": tail[-3:]})
        self._changed()

    def _lose(self, worker: Worker, why: str, tail: list[str] | None = None) -> None:
        """Gives a worker up that is there and of no use."""
        self._died(worker, why, tail or [])
        self._later(self._actors.kill(worker.actor))

    def _let_go(self, worker: Worker, *, goes: bool) -> None:
        worker.leaving, worker.goes = True, goes
        self._changed()
        worker.ending = asyncio.create_task(self._end(worker) if goes else self._rest(worker))

    async def _rest(self, worker: Worker) -> None:
        await asyncio.sleep(PARTING)
        with suppress(*Unheard):  # whoever watches it finds out
            await self._actors.ask(worker.actor, "stop", seconds=self._plan.silence)

    async def _end(self, worker: Worker, *, parting: float = PARTING) -> None:
        """Drains a worker, and removes its actor."""
        worker.leaving = worker.goes = True
        try:
            if worker.state != "resting":
                await asyncio.sleep(parting)
                report = await self._actors.ask(worker.actor, "stop", seconds=self._plan.silence)
                while report["state"] == "draining":
                    await asyncio.sleep(0.05)
                    report = await self._actors.ask(worker.actor, "report", seconds=self._plan.silence)
            await self._actors.ask(worker.actor, "leave", seconds=self._plan.silence)
        except Gone:
            pass  # as it should be; and it needed no control store for that
        except Unheard as error:
            _log.warning("did not drain", extra={"worker": str(worker.name), "error": type(error).__name__})
            await self._actors.kill(worker.actor)
        if self._workers.pop(str(worker.name), None) is not None and worker.watching is not None:
            worker.watching.cancel()
        _log.info("removed", extra={"worker": str(worker.name)})
        self._changed()

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)
