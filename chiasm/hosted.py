"""A worker's process inside a Ray actor: started, heard, drained, and gone when the actor is.

The role keeps a process of its own, as without Ray: it has its event loop, its signals and its threads of arithmetic to
itself, a crash of it is an exit status that the actor tells, and no thread of Ray's stands beside a forward pass. What
ties the two is `chiasm.tied`: an actor that dies, however it dies, takes its worker with it, even one that is stopped.
For Ray gives the actor's device to the next one at once, and a worker that went on draining would still be on it.

The class is plain: whoever places it makes an actor of it. It must be driven from the main thread of its process, as
Ray does with an actor of one call at a time. It knows command lines and logs, no role.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, TypedDict

import ray
from ray.util import get_node_ip_address

from chiasm.cache.region import sweep

NODE: Final = "node"
"""Stands for the address of the node that the actor was placed on."""

TAIL: Final = 20
"""Last lines of a worker that are kept, to be told when it has died."""


class Report(TypedDict):
    """What an actor says of its worker.

    Attributes:
        state: `resting` (no process), `starting`, `ready`, `draining`, or `ended`: by itself, nobody asked for it.
        target: what a channel to it takes; empty before it listens.
        pid: of its process, 0 without one.
        code: its exit status, minus the signal that killed it; None while it runs.
        node: Ray's name of the node.
        tail: its last lines, where it has ended by itself.
    """

    state: str
    target: str
    pid: int
    code: int | None
    node: str
    tail: list[str]


class Hosted:
    """A worker's process, not started yet.

    Args:
        flags: of its command line, by name without dashes; an empty value is a switch.
        host: address to listen on; `node` is that of the node.
        arenas: folder in memory for the regions of this machine's nodes.
        arena_bytes: of this node's region, which the first worker there makes.
        environment: further variables.
    """

    module: ClassVar[str]

    def __init__(
        self,
        flags: Mapping[str, str],
        *,
        host: str,
        arenas: str,
        arena_bytes: int,
        environment: Mapping[str, str],
    ) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        self._arenas = Path(arenas)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._said: dict[str, Any] = {}
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._stopping = False
        host = str(get_node_ip_address()) if host == NODE else host
        told = {
            **flags,
            "arena": str(self._arenas / self._node),
            "arena-bytes": str(arena_bytes),
            "listen": f"{host}:0",
        }
        self._words = [word for name, value in told.items() for word in (f"--{name}", value) if word]

    def start(self) -> Report:
        """Starts the process, if none runs."""
        if self._process is None or self._process.poll() is not None:
            self._arenas.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._said, self._stopping = {}, False
            self._tail.clear()
            # -P: a folder named like a module, where Ray happens to run this, is not the module.
            tied = [sys.executable, "-P", "-m", "chiasm.tied", str(os.getpid()), self.module]
            self._process = subprocess.Popen(
                [*tied, *self._words, "--log-format", "json", "--supervised"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
            threading.Thread(target=self._hear, args=(self._process, self._said), daemon=True).start()
        return self.report()

    def report(self) -> Report:
        process = self._process
        code = process.poll() if process is not None else None
        if process is None or (code is not None and self._stopping):
            state = "resting"
        elif code is not None:
            state = "ended"
        elif self._stopping:
            state = "draining"
        else:
            state = "ready" if "ready" in self._said else "starting"
        return Report(
            state=state,
            target=str(self._said.get("target", "")),
            pid=process.pid if process is not None and code is None else 0,
            code=code,
            node=self._node,
            tail=list(self._tail) if state == "ended" else [],
        )

    def stop(self) -> Report:
        """Has the process drain and end. Returns at once; it rests when it has ended."""
        if not self._stopping and self._process is not None:
            self._stopping = True
            self._process.send_signal(signal.SIGTERM)
        return self.report()

    def leave(self) -> None:
        """Kills the process if it still runs, removes regions of this machine that nobody has open any more (the last
        worker of a node takes its region with it), and ends the actor. Whoever calls it hears that the actor is gone.
        """
        if self._process is not None:
            self._kill(self._process)
            self._process.wait()
        with suppress(OSError):
            sweep(self._arenas)
            self._arenas.rmdir()  # not while another node's is there
        ray.actor.exit_actor()

    def _hear(self, process: subprocess.Popen[bytes], said: dict[str, Any]) -> None:
        """Passes the process's log on to that of the actor, and remembers what it says of itself."""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                sys.stderr.write(line.decode(errors="replace"))
                event: Any = None
                with suppress(ValueError):
                    event = json.loads(line)
                name = event.get("event") if isinstance(event, dict) else None
                self._tail.append(str(name or line.decode(errors="replace").rstrip()))
                if name in ("listening", "ready"):
                    said.update(target=event["target"], **{name: True})
                elif name == "stopped":
                    self._kill(process)  # what follows is the end of its interpreter, which takes seconds

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """Kills it and whatever it has started: it leads a session."""
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
