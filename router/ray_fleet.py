"""A fleet whose workers Ray places. Their controller lives in a child process (`router.ray_controller`), which says
where they are; requests never pass through it, nor through Ray.

While the child is gone, starting again or cut off from Ray, what it said last goes on to be true: workers prove
themselves by answering. This module starts the child, hears it, and starts it again. It does not load Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

from router import ray_plan
from router.membership import Role
from router.restarts import Deaths, Patience
from router.static_fleet import BEAT, MemberFleet

_log = logging.getLogger(__name__)

SILENCE: Final = 30.0
"""Seconds after which a child that says nothing is killed. It speaks at every beat."""

CONNECTING: Final = 120.0
"""Seconds that it may say nothing at its start: Ray is a large library."""

ENDING: Final = 10.0
"""Seconds that it has to end, beside those that workers drain. The router has drained before: nothing runs there."""

LINE_BYTES: Final = 1 << 22


class Controlled:
    """`Membership` as the child says it.

    Args:
        plan: a file, as `router.ray_plan` reads it.
        keep: whether the workers stay when this is closed, for a router that comes after.
    """

    def __init__(self, plan: Path, *, keep: bool = False) -> None:
        self._path = plan
        self._plan = ray_plan.read(plan)
        self._keep = keep
        self._targets: dict[Role, list[str]] = {"encoder": [], "decoder": []}
        self._asleep: frozenset[str] = frozenset()
        self._news = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._living: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """Of the child, while one runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def targets(self, role: Role) -> list[str]:
        return list(self._targets[role])

    async def changed(self) -> None:
        await self._news.wait()
        self._news.clear()

    def asleep(self, model: str) -> bool:
        return model in self._asleep

    async def start(self) -> None:
        self._living = asyncio.create_task(self._live(), name="ray controller")

    async def close(self) -> None:
        """Ends the child; and before, by it, the workers, unless they are to be kept."""
        self._closing = True
        if self._living is None:
            return
        if self._process is not None and not self._keep:
            await self.say({"stop": True})
        elif self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        try:
            if self.pid is not None:
                async with asyncio.timeout(ENDING):
                    await self._process_ended()
        except TimeoutError:
            _log.warning("the controller did not end", extra={"pid": self.pid})
        finally:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)

    async def say(self, said: dict[str, Any]) -> None:
        """Tells the child, if there is one."""
        if self._process is None or self._process.stdin is None or self._process.stdin.is_closing():
            return
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(said).encode() + b"\n")
            await self._process.stdin.drain()

    async def _process_ended(self) -> None:
        assert self._living is not None
        await asyncio.wait([self._living])

    async def _live(self) -> None:
        """Runs the child again and again."""
        deaths, patience = Deaths(), Patience(first=0.5)
        while True:
            began = time.monotonic()
            code = await self._run()
            if self._closing:
                return
            now = time.monotonic()
            deaths = deaths.after(patience, lived=now - began, now=now)
            delay = deaths.not_before - now
            _log.warning("controller died", extra={"exit": code, "deaths": deaths.count, "again_in": round(delay, 3)})
            await asyncio.sleep(delay)

    async def _run(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "router.ray_controller",
            str(self._path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **ray_plan.environment(self._plan.auth)},
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the router, which ends it
        )
        self._process = process
        _log.info("controller started", extra={"pid": process.pid})
        try:
            await self._hear(process)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
        return process.returncode or 0

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        """Returns when it is silent for too long, or says nothing any more."""
        assert process.stdout is not None
        patience = CONNECTING
        while True:
            try:
                async with asyncio.timeout(patience):
                    line = await process.stdout.readline()
            except TimeoutError:
                _log.warning("controller silent", extra={"pid": process.pid, "seconds": patience})
                return
            if not line:
                return
            patience = SILENCE
            if line.startswith(b"{"):
                self._learn(json.loads(line))

    def _learn(self, said: dict[str, Any]) -> None:
        if "encoders" not in said:
            return  # it is alive, and knows nothing yet
        targets: dict[Role, list[str]] = {"encoder": said["encoders"], "decoder": said["decoders"]}
        asleep = frozenset(said["asleep"])
        if (targets, asleep) != (self._targets, self._asleep):
            self._targets, self._asleep = targets, asleep
            self._news.set()


class RayFleet(MemberFleet):
    """`Fleet` over the workers of a plan.

    Args:
        plan, keep: as of `Controlled`.
        patience, beat: as of `MemberFleet`.
    """

    def __init__(self, plan: Path, *, keep: bool = False, patience: float = 30.0, beat: float = BEAT) -> None:
        self.controlled = Controlled(plan, keep=keep)
        super().__init__(self.controlled, patience=patience, beat=beat)
        self._telling_waits: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.controlled.start()
        self._telling_waits = asyncio.create_task(self._keep_telling_waits())
        await super().start()

    async def close(self) -> None:
        if self._telling_waits is not None:
            self._telling_waits.cancel()
            await asyncio.gather(self._telling_waits, return_exceptions=True)
        await super().close()
        await self.controlled.close()

    async def _keep_telling_waits(self) -> None:
        """Whoever waits here for a worker that rests waits for nobody else to say so."""
        told: dict[str, float] = {}
        while True:
            waits = dict(self.waits())
            if waits or told:
                await self.controlled.say({"waits": waits})
            told = waits
            await asyncio.sleep(self._beat / 2)
