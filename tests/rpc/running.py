"""Real processes of roles: started, followed by the JSON lines they log, and ended by their own id."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Line = dict[str, Any]


class Running:
    """One process. Its lines are read as they come, so that it never waits for its reader."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[Line] = []
        self.text: list[str] = []
        """Lines that are not JSON."""
        self._over = False
        self._more = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def events(self) -> list[str]:
        """What was logged, in order, repetitions left out."""
        names = [line["event"] for line in self.lines]
        return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]

    async def logged(self, event: str) -> Line:
        """The first line of an event. Fails if the process ends without it."""

        def found() -> Line | None:
            return next((line for line in self.lines if line["event"] == event), None)

        async with self._more:
            await self._more.wait_for(lambda: found() is not None or self._over)
        line = found()
        assert line is not None, f"it ended without {event}: {self.lines} {self.text}"
        return line

    async def ended(self) -> int:
        """Its exit status, once all it wrote was read."""
        code = await self.process.wait()
        await self._reading
        return code

    async def _read(self) -> None:
        assert self.process.stderr is not None
        try:
            async for raw in self.process.stderr:
                line = raw.decode()
                async with self._more:
                    if line.startswith("{"):
                        self.lines.append(json.loads(line))
                    else:
                        self.text.append(line.rstrip("\n"))
                    self._more.notify_all()
        finally:
            async with self._more:
                self._over = True
                self._more.notify_all()


@asynccontextmanager
async def started(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> AsyncIterator[Running]:
    """`python ARGUMENTS` while the block lasts; killed at its end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    running = Running(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await running.ended()


async def outcome(*arguments: str, cwd: Path = ROOT) -> tuple[int, Sequence[str]]:
    """Exit status and the lines that are no JSON, of a process that ends by itself."""
    async with started(*arguments, cwd=cwd) as running:
        code = await running.ended()
        return code, running.text


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found
