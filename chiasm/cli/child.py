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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self, TypeAlias

Record: TypeAlias = dict[str, Any]
"""One line of a log: `timestamp`, `level`, `logger`, `event`, `role`, and what else was said."""

Tell: TypeAlias = Callable[[Record], None]

WRITTEN_PAST = "stderr"
"""The `logger` of lines that are no records: a library or a crash wrote them."""

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
        places: flags that say where it listens, `--listen` and `--http`, with their values. They follow the command.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The whole command line."""
        return [*self.command, *(word for place in self.places.items() for word in place)]

    def at(self, places: Mapping[str, str]) -> Role:
        """The same role where it was found listening: a port that was free once stays its port."""
        return replace(self, places={flag: places.get(flag, value) for flag, value in self.places.items()})


class Child:
    """A running process of a role. It leads a session of its own, so that Ctrl-C reaches the supervisor alone.

    Its standard input is a pipe that nobody writes to. The kernel closes it when this process dies, however it dies,
    and a role that was started with `--supervised` then ends.

    Attributes:
        ready: set when it has said `ready`.
        places: where it listens, by flag; empty until it has said so. `--listen` is what a channel to it takes.
        tail: its last lines.
    """

    def __init__(self, role: Role, tell: Tell) -> None:
        self.role = role
        self.ready = asyncio.Event()
        self._stopped = asyncio.Event()
        self.places: dict[str, str] = {}
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._tell = tell
        self._gone = False
        self._limit: asyncio.Timeout | None = None
        self._grace = 0.0
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
                *role.words,
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
        self._gone = True
        await self._reading
        return code

    def close(self) -> None:
        """Kills what is left of it and hears no more. Once."""
        self.kill()
        self._reading.cancel()
        os.close(self._alive)

    async def stop(self, grace: float) -> None:
        """Asks it to end, and kills it after `grace` seconds, to which come those that it drains. `wait` returns then.

        One that has said `stopped` is done, and killed at once: what would follow is the end of its interpreter, which
        takes seconds where large libraries are loaded.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        ends = [asyncio.create_task(self._process.wait()), asyncio.create_task(self._stopped.wait())]
        try:
            async with asyncio.timeout(grace) as self._limit:
                self._grace = grace
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            self._limit = None
            self.kill()
            for end in ends:
                end.cancel()

    def kill(self) -> None:
        """Kills it and every process of its session. Nothing happens to the dead."""
        if not self._gone:  # its number may be somebody else's by now
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
        if said["event"] in ("listening", "ready") and {"target", "http"} <= said.keys():
            self.places = {"--listen": said["target"], "--http": said["http"]}
        self._tell({**said, "role": self.role.name})
        if said["event"] == "ready":
            self.ready.set()
        elif said["event"] == "draining" and self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + said["seconds"] + self._grace)
        elif said["event"] == "stopped":
            self._stopped.set()


def record_of(text: str) -> Record:
    """A line of a log as a record. One that is not JSON was written past the log: by a library, or by a crash."""
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("event"), str):
        return said
    return record(text, level="info", logger=WRITTEN_PAST)


def record(event: str, *, level: str, logger: str, **facts: Any) -> Record:
    """A record of this process, made now. The time is in UTC."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"timestamp": now, "level": level, "logger": logger, "event": event, **facts}
