"""Ray nodes on this machine, and a router whose workers Ray places on them. All of it is ended with its block.

A node is what Ray calls one: a raylet of its own, with resources of its own. Its processes are told from those of
others by their command lines, which name the cluster's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from chiasm import AsyncClient, Video
from router import ray_plan
from tests import digits
from tests.e2e.test_digits import drawn
from tests.processes import Role, secret
from tests.redis_server import RedisServer, redis_server
from tests.waiting import alive, until

OBJECT_STORE_BYTES = 80 << 20

os.environ.update(ray_plan.environment("disabled"))  # before Ray is loaded: it reads this once


class Cluster:
    """A head that takes no actor, and nodes with resources."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self.folder = folder
        (folder / "ray").mkdir()
        self.nodes = Nodes(
            initialize_head=True,
            shutdown_at_exit=False,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            },
        )

    @property
    def address(self) -> str:
        return str(self.nodes.address)

    def add(self, **resources: float) -> Any:
        """One more node; what it returns is what `remove` takes."""
        return self.nodes.add_node(num_cpus=0, object_store_memory=OBJECT_STORE_BYTES, resources=resources)

    def remove(self, node: Any) -> None:
        """A node that dies: nothing of it has time to say so."""
        self.nodes.remove_node(node, allow_graceful=False)

    def kill_control_store(self) -> None:
        head: Any = self.nodes.head_node
        head.kill_gcs_server(check_alive=False)

    def start_control_store(self) -> None:
        """Again, at its port: it reads what it knew from its Redis."""
        head: Any = self.nodes.head_node
        head.start_gcs_server()

    def processes(self) -> list[int]:
        """Of Ray's own."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def end(self) -> None:
        self.nodes.shutdown()
        end = time.monotonic() + 20
        while left := [pid for pid in self.processes() if alive(pid)]:
            assert time.monotonic() < end, f"left over: {left}"
            time.sleep(0.05)


@contextmanager
def cluster() -> Iterator[Cluster]:
    with (
        redis_server("--port", str(port := free_port())),
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
        patched.setenv("RAY_TMPDIR", folder)  # of everything that Ray writes, also what it writes past `temp_dir`
        made = Cluster(Path(folder))
        try:
            yield made
        finally:
            made.end()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def pool(role: str, folder: Path, *, flags: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """Of the digits' workers, one as a rule, on a node that has a resource of the role's name."""
    own = {
        "model": "digits",
        "workers-secret-file": str(folder / "workers.key"),
        "drain-seconds": "2",
        "http": "127.0.0.1:0",
    }
    return {
        "role": role,
        "resources": {role: 1},
        "flags": {**own, **(flags or {})},
        "environment": {"OMP_NUM_THREADS": "1"},
        **more,
    }


class Fleet:
    """A router over Ray, and what its controller has logged."""

    def __init__(self, address: str, folder: Path, pools: Sequence[Mapping[str, Any]], flags: Sequence[str]) -> None:
        self.folder = folder
        self.plan = folder / "plan.json"
        self._address = address
        for name in ("workers.key", "tenants.key"):
            if not (folder / name).exists():
                secret(folder / name)
        self.write(pools)
        self.router = Role(
            "router",
            ["--ray-plan", str(self.plan), "--tenants-secret-file", str(folder / "tenants.key"),
             "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--drain-seconds", "5",
             "--patience", "100", *flags],
            folder,
        )  # fmt: skip

    def write(self, pools: Sequence[Mapping[str, Any]]) -> None:
        told = {"address": self._address, "auth": "disabled", "fleet": "tested", "arenas": str(self.folder / "arenas")}
        times = {"beat": 0.2, "silence": 4.0, "first_delay": 0.1}
        self.plan.write_text(json.dumps({**told, **times, "arena_bytes": 32 << 20, "pools": pools}), encoding="utf-8")

    @property
    def target(self) -> str:
        return self.router.target

    def said(self, event: str, role: str = "") -> list[dict[str, Any]]:
        """What was logged, of a role's pool where one is named."""
        return [
            line
            for line in self.router.events()
            if line["event"] == event and str(line.get("pool", "")).startswith(role)
        ]

    def serving(self, role: str) -> dict[str, dict[str, Any]]:
        """The workers that became ready and did not go, by name, with where they are."""
        ready: dict[str, dict[str, Any]] = {}
        for line in self.router.events():
            if line["event"] == "worker ready" and str(line.get("pool", "")).startswith(role):
                ready[line["worker"]] = line
            elif line["event"] in ("died", "removed", "worker draining", "worker resting"):
                ready.pop(line.get("worker", ""), None)
        return ready

    def worker(self, role: str) -> dict[str, Any]:
        """The one that serves."""
        ((_, worker),) = self.serving(role).items()
        return worker

    @property
    def controller(self) -> int:
        """Its process."""
        return int(self.said("controller started")[-1]["pid"])


class Served(Fleet):
    """With what it stands on.

    Attributes:
        flags: of its workers, beside those that all have.
    """

    nodes: Cluster
    store: RedisServer
    flags: dict[str, str]


F = TypeVar("F", bound=Fleet)


@contextmanager
def fleet(kind: type[F], address: str, folder: Path, pools: Sequence[Mapping[str, Any]], *flags: str) -> Iterator[F]:
    """A router that is ready, ended with its workers."""
    made = kind(address, folder, pools, flags)
    made.router.start()
    try:
        made.router.wait_for("ready", seconds=150)
        yield made
    finally:
        made.router.end()


def parent(pid: int) -> int:
    """The process that started one: of a worker, its actor."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


_seeds = itertools.cycle(range(80))
"""Of clips that the model reads as they are meant."""


async def read_right(target: str, *, frames: int = 3) -> None:
    """Asks about a clip that was not asked about lately, and holds the answer against what it shows."""
    seed = next(_seeds)
    shown_frames, shown = drawn(np.random.default_rng(seed), frames)
    async with AsyncClient(target, max_retries=4) as client:
        answer = await client.generate("digits", [Video(digits.clip(shown_frames)), "Read the digits."], max_tokens=24)
    assert answer.text == " ".join(map(str, shown)), (seed, answer, shown)


async def settled(fleet: Fleet) -> None:
    """Waits until a fleet has one worker of each role, and reads right."""
    await until(lambda: all(len(fleet.serving(role)) == 1 for role in ("encoder", "decoder")), seconds=60)
    await read_right(fleet.target)


class Asking:
    """Clients that ask on and on while a block does something, none of whom may fail."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.answered = 0

    async def __aenter__(self) -> Asking:
        self._over = False
        self._task = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await self._task

    async def more(self, count: int = 2) -> None:
        """Returns when so many more were answered."""
        end = self.answered + count
        while self.answered < end:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.02)

    async def _ask(self) -> None:
        while not self._over:
            await read_right(self._target)
            self.answered += 1
