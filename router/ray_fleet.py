"""A fleet whose workers Ray places. Their controller lives in a child process (`router.ray_controller`), which says
where they are; requests never pass through it, nor through Ray.

While the child is gone, starting again or cut off from Ray, what it said last goes on to be true: workers prove
themselves by answering. This module starts the child, hears it, and starts it again. It does not load Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from chiasm.settings import SettingsError
from router import ray_plan
from router.member_fleet import BEAT, MemberFleet
from router.membership import Hopeless, Role
from router.ray_words import Told
from router.restarts import Deaths, Patience

_log = logging.getLogger(__name__)

CONTROLLER: Final = (sys.executable, "-P", "-m", "router.ray_controller")

SILENCE: Final = 30.0
"""Seconds after which a child that says nothing that is understood is killed. It speaks at every beat."""

CONNECTING: Final = 120.0
"""Seconds that it may say nothing at its start: Ray is a large library."""

ENDING: Final = 9.5
"""Seconds that it has to remove its workers and to end: less than a process that ends has beyond its drain
(`chiasm.rpc.process`). The router has drained before: nothing runs there."""

LINE_BYTES: Final = 1 << 22


class Controlled:
    """`Membership` as the child says it.

    Args:
        plan: a file, as `router.ray_plan` reads it.
        keep: whether the workers stay when this is closed, for a router that comes after.
        command: the child, before the path of the plan.
        connecting, silence, ending: seconds, as the constants of these names.
    """

    def __init__(
        self,
        plan: Path,
        *,
        keep: bool = False,
        command: Sequence[str] = CONTROLLER,
        connecting: float = CONNECTING,
        silence: float = SILENCE,
        ending: float = ENDING,
    ) -> None:
        self._path = plan
        self._plan = ray_plan.read(plan)
        self._keep = keep
        self._command = command
        self._connecting = connecting
        self._silence = silence
        self._ending = ending
        self._told = Told()
        self._news = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._living: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._lock: int | None = None

    @property
    def pid(self) -> int | None:
        """Of the child, while one runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def hopeless(self) -> Sequence[Hopeless]:
        return self._told.hopeless

    async def targets(self, role: Role) -> list[str]:
        return list((self._told.targets or {}).get(role, ()))

    async def changed(self) -> None:
        await self._news.wait()
        self._news.clear()

    def asleep(self, model: str) -> bool:
        return model in self._told.asleep

    async def start(self) -> None:
        """Raises SettingsError if another router of this machine has the plan: two would undo each other's work."""
        self._lock = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            fix = "end that one, or give this one a plan of another fleet"
            raise SettingsError("another router has this plan of a fleet", str(self._path), fix) from None
        self._living = asyncio.create_task(self._live(), name="ray controller")

    async def close(self) -> None:
        """Ends the child; and before, by it, the workers, unless they are to be kept."""
        self._closing.set()
        if self._living is not None:
            self._tell_end()
            done, _ = await asyncio.wait([self._living], timeout=self._ending)
            if not done:
                _log.warning("the controller did not end", extra={"pid": self.pid})
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def say(self, said: dict[str, Any]) -> bool:
        """Tells the child. Whether it was: there may be none, or one that does not read; for that nothing is kept."""
        stdin = self._process.stdin if self._process is not None else None
        if self.pid is None or stdin is None or stdin.is_closing() or stdin.transport.get_write_buffer_size():
            return False
        stdin.write(json.dumps(said).encode() + b"\n")
        return True

    @property
    def _removes(self) -> bool:
        """Whether there is anything to be removed at the end."""
        return not self._keep and self._told.targets is not None

    def _tell_end(self) -> None:
        if self._process is None or self._process.stdin is None or self._process.stdin.is_closing():
            return
        if self._removes:
            self._process.stdin.write(b'{"stop": true}\n')
        self._process.stdin.close()

    async def _live(self) -> None:
        """Runs the child again and again. At the end once more, if the last one could not remove the workers."""
        deaths, patience = Deaths(), Patience(first=0.5)
        while True:
            began, closing = time.monotonic(), self._closing.is_set()
            code = await self._run()
            if closing or (self._closing.is_set() and (code == 0 or not self._removes)):
                return
            now = time.monotonic()
            deaths = deaths.after(patience, lived=now - began, now=now)
            delay = deaths.not_before - now
            _log.warning("controller died", extra={"exit": code, "deaths": deaths.count, "again_in": round(delay, 3)})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._closing.wait()
            if self._closing.is_set() and not self._removes:
                return

    async def _run(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            str(self._path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **ray_plan.environment(self._plan.auth)},
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the router, which ends it
        )
        self._process = process
        _log.info("controller started", extra={"pid": process.pid})
        if self._closing.is_set():
            self._tell_end()
        try:
            if await self._hear(process):  # its end follows that of its output
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), self._ending)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
        return process.returncode or 0

    async def _hear(self, process: asyncio.subprocess.Process) -> bool:
        """Returns when its output has ended, and False when it has said nothing that is understood for too long."""
        assert process.stdout is not None
        loop, patience = asyncio.get_running_loop(), self._connecting
        until = loop.time() + patience
        while True:
            try:
                async with asyncio.timeout_at(until):
                    line = await process.stdout.readline()
            except TimeoutError:
                _log.warning("controller silent", extra={"pid": process.pid, "seconds": patience})
                return False
            except ValueError:
                continue  # longer than LINE_BYTES; the reader has dropped it
            if not line:
                return True
            if (told := Told.read(line)) is None:
                continue
            patience = self._silence
            until = loop.time() + patience
            if told.targets is not None and told != self._told:
                self._told = told
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
            if (waits or told) and self.controlled.say({"waits": waits}):
                told = waits
            await asyncio.sleep(self._beat / 2)
