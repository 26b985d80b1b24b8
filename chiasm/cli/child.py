"""One process of a role: started, heard line by line, ended with everything it started.

What a process says becomes records: a line of JSON is one as it stands, any other line is one whose `event` is the
line. Knows processes and lines; when one is started again is the supervisor's matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self, TypeAlias

Record: TypeAlias = dict[str, Any]
"""One line of a log: `timestamp`, `level`, `logger`, `event`, `role`, and what else was said."""

Tell: TypeAlias = Callable[[Record], None]

LINE_BYTES = 1 << 20
"""A longer line is dropped: no log has one."""

TAIL = 20
"""Last lines that are kept, to be shown when the process dies."""


@dataclass(frozen=True, slots=True)
class Role:
    """What is to be run.

    Attributes:
        name: what people call it, for example `encoder-0`.
        command: program and arguments.
        environment: of the process; None for that of this one.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None


class Child:
    """A running process of a role. It leads a session of its own, so that Ctrl-C reaches the supervisor alone.

    Its standard input is a pipe that nobody writes to. The kernel closes it when this process dies, however it dies,
    and a role that was started with `--supervised` then ends.

    Attributes:
        ready: set when it has said `ready`.
        target: what a channel to it takes; None until it has said so.
        tail: its last lines.
    """

    def __init__(self, role: Role, tell: Tell) -> None:
        self.role = role
        self.ready = asyncio.Event()
        self.target: str | None = None
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._tell = tell
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]
        self._alive: int

    @classmethod
    async def start(cls, role: Role, tell: Tell) -> Self:
        """Starts the process. Raises OSError if it cannot be."""
        child = cls(role, tell)
        # Pipes of our own: asyncio's wait() also waits for its pipes to close, and what the process started may hold
        # them open when it is dead.
        stdin, child._alive = os.pipe()
        heard, said = os.pipe()
        try:
            child._process = await asyncio.create_subprocess_exec(
                *role.command,
                env=role.environment,
                stdin=stdin,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            os.close(child._alive)
            os.close(heard)
            raise
        finally:
            os.close(stdin)
            os.close(said)
        child._reading = asyncio.create_task(child._read(heard))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Waits for its end, ends what it left behind, and returns its exit status (minus the signal that killed it).

        When it returns, every line was told.
        """
        code = await self._process.wait()
        self.kill()
        await self._reading
        return code

    def close(self) -> None:
        """Kills what is left of it and hears no more. Once."""
        self.kill()
        self._reading.cancel()
        os.close(self._alive)

    async def stop(self, grace: float) -> None:
        """Asks it to end, and kills it after `grace` seconds. `wait` returns then."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        """Kills it and every process of its session. Nothing happens to the dead."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _read(self, heard: int) -> None:
        reader = asyncio.StreamReader(limit=LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(heard, "rb", buffering=0)
        )
        try:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:
                    continue  # longer than LINE_BYTES; the reader has dropped it
                if not line:
                    return
                if text := line.decode(errors="replace").rstrip():
                    self._hear(text)
        finally:
            transport.close()

    def _hear(self, text: str) -> None:
        said = record_of(text)
        self.tail += [said["event"], *str(said.get("exception", "")).splitlines()]
        if said["event"] in ("listening", "ready"):
            self.target = said.get("target", self.target)
        self._tell({**said, "role": self.role.name})
        if said["event"] == "ready":
            self.ready.set()


def record_of(text: str) -> Record:
    """A line of a log as a record. One that is not JSON was written past the log: by a library, or by a crash."""
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("event"), str):
        return said
    return record(text, level="info", logger="stderr")


def record(event: str, *, level: str, logger: str, **facts: Any) -> Record:
    """A record of this process, made now. The time is in UTC."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"timestamp": now, "level": level, "logger": logger, "event": event, **facts}
