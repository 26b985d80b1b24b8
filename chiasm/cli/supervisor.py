"""Keeps a front and its workers alive: starts them, starts again what died, ends them in order.

The front is what callers talk to. It is ended first, so that it can finish its calls while the workers still answer.
Knows roles as commands; what they serve, and how their logs are shown, is not its matter.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from chiasm.cli.child import Child, Role, Tell, record
from chiasm.cli.failure import FAILED, MISUSED, CommandFailed
from chiasm.settings import three_lines

T = TypeVar("T")

_LOGGER = "chiasm.cli.supervisor"


@dataclass(frozen=True, slots=True)
class Policy:
    """When a dead process is started again.

    Attributes:
        first_delay, longest_delay: seconds before the next start; doubled with every death between the two.
        steady: seconds of being ready after which the delay begins anew.
        attempts: deaths of a role that was never ready, after which all is given up.
        grace: seconds that a process has to end by itself, beside those that it says it drains.
    """

    first_delay: float = 0.1
    longest_delay: float = 5.0
    steady: float = 10.0
    attempts: int = 3
    grace: float = 15.0


class Supervisor:
    """Processes that live as long as its context.

        async with Supervisor(router, [encoder, decoder], tell) as supervisor:
            await supervisor.ready()
            await supervisor.wait()

    Attributes:
        target: where the front listens; empty until it is ready.
        stopping: whether what dies now stays dead.

    Args:
        front: ended first.
        workers: started before it, ended after it.
        tell: is told what every process says, and what becomes of it (`died`, `started again`).
    """

    def __init__(self, front: Role, workers: Sequence[Role], tell: Tell, *, policy: Policy | None = None) -> None:
        self.target = ""
        self.stopping = False
        self._front = front
        self._roles = [*workers, front]
        self._tell = tell
        self._policy = policy or Policy()
        self._children: dict[str, Child] = {}
        self._first_ready = {role.name: asyncio.Event() for role in self._roles}
        self._keeping: dict[str, asyncio.Task[None]] = {}

    def pids(self) -> dict[str, int]:
        """The processes that run now, by the names of their roles."""
        return {name: child.pid for name, child in self._children.items()}

    async def __aenter__(self) -> Self:
        for role in self._roles:
            self._keeping[role.name] = asyncio.create_task(self._keep(role), name=role.name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def ready(self) -> None:
        """Waits until every role has been ready once. Raises CommandFailed if one never will."""
        await self.during(self._all_ready())

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Does something that needs the processes. Raises what it raises, and CommandFailed if a role is given up."""
        working = asyncio.create_task(work)
        try:
            await asyncio.wait([working, *self._keeping.values()], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await self.wait()
            return await working
        finally:
            working.cancel()
            await asyncio.wait([working])

    async def wait(self) -> NoReturn:
        """Raises CommandFailed when a role is given up."""
        done, _ = await asyncio.wait(self._keeping.values(), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
        raise AssertionError("a role is kept until it is given up")

    async def stop(self) -> None:
        """Ends the front, then the workers. Every process is gone when it returns, also if it is cancelled."""
        self.stopping = True
        try:
            await self._end([self._front])
            await self._end([role for role in self._roles if role is not self._front])
        finally:
            self.kill()
            await self._end(self._roles)
            for task in self._keeping.values():
                if not task.cancelled():
                    task.exception()  # the first was raised by `wait`; asyncio complains of others that nobody looks at

    def kill(self) -> None:
        """Kills every process at once."""
        self.stopping = True
        for child in self._children.values():
            child.kill()

    async def _end(self, roles: Sequence[Role]) -> None:
        for role in roles:
            if role.name not in self._children:  # between two starts
                self._keeping[role.name].cancel()
        running = [self._children[role.name] for role in roles if role.name in self._children]
        await asyncio.gather(*(child.stop(self._policy.grace) for child in running))
        await asyncio.wait([self._keeping[role.name] for role in roles])

    async def _all_ready(self) -> None:
        for event in self._first_ready.values():
            await event.wait()

    async def _keep(self, role: Role) -> None:
        """Runs a role again and again, until all is ended. Raises CommandFailed when it is given up."""
        policy, was_ready = self._policy, self._first_ready[role.name]
        delay, deaths = policy.first_delay, 0
        while True:
            code, lived, child = await self._run(role)
            role = role.at(child.places)
            if self.stopping:
                return
            if not was_ready.is_set():
                deaths += 1
                if code == MISUSED or deaths >= policy.attempts:
                    raise given_up(role, code, deaths, child.tail)
            if lived >= policy.steady:
                delay = policy.first_delay
            self._say("died", "warning", role, exit=code, again_in=delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, policy.longest_delay)
            self._say("started again", "info", role)

    async def _run(self, role: Role) -> tuple[int, float, Child]:
        """Runs a role once. Returns its exit status, how many seconds it was ready, and what is left of it."""
        child = await Child.start(role, self._tell)
        self._children[role.name] = child
        ready_since: list[float] = []
        watching = asyncio.create_task(self._watch(child, ready_since))
        try:
            code = await child.wait()
        finally:
            child.close()
            watching.cancel()
            del self._children[role.name]
        return code, time.monotonic() - ready_since[0] if ready_since else 0.0, child

    async def _watch(self, child: Child, ready_since: list[float]) -> None:
        await child.ready.wait()
        ready_since.append(time.monotonic())
        if child.role.name == self._front.name:
            self.target = child.places["--listen"]
        self._first_ready[child.role.name].set()

    def _say(self, event: str, level: str, role: Role, **facts: object) -> None:
        self._tell(record(event, level=level, logger=_LOGGER, role=role.name, **facts))


def given_up(role: Role, code: int, deaths: int, tail: Iterable[str]) -> CommandFailed:
    """Why a role is not started again. One that was asked for what cannot be (exit status 2) has said so itself."""
    last = list(tail)
    if code == MISUSED and (told := three_lines(last)):
        what, where, fix = told
        return CommandFailed(what, f"{role.name} · {where}", fix, code=MISUSED)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    times = "" if deaths == 1 else f" {deaths} times"
    fix = "read its last lines above"
    if code == -signal.SIGKILL:
        fix = "give it more memory: the kernel kills what takes too much"
    return CommandFailed(f"{role.name} {how}{times} before it was ready", role.name, fix, code=FAILED, before=last)
