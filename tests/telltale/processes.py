"""Tell-tale services as processes: two replicas of each worker, two routers for each tenant, a region, and a store
behind it. And what may be done to them: whoever is hurt, another of its role is whole meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import secrets
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from chiasm.cache.region import Region
from chiasm.cache.tenant import LOCAL, tenant_root
from tests.chaos.faults import ProcessFaults
from tests.processes import Role
from tests.telltale.laboratory import TENANTS
from tests.telltale.model import CHECKPOINT
from tests.telltale.service import ASKED, TASKS

REPLICAS = 2


class Fleet:
    """The processes, started when it is entered and ended when it is left. Entering blocks.

    Args:
        redis: where the store behind the region is; None for none.
        pace: as `laboratory.laboratory` has it.
        plant: a bug in the processes of its role.

    Attributes:
        roots: of the tenants.
        routers: of each tenant.
    """

    def __init__(
        self, folder: Path, *, arena_bytes: int, redis: str | None, pace: float, plant: str | None = None
    ) -> None:
        self._stack = ExitStack()
        self.arena = folder / "arena"
        self._arena_bytes = arena_bytes
        workers = secrets.token_hex(32)
        common = ["--http", "127.0.0.1:0", "--drain-seconds", "1", *(["--plant", plant] if plant else [])]
        told = ["--model", str(CHECKPOINT), "--arena", str(self.arena), "--workers-secret-file"]
        told += [str(_secret(folder / "workers.key", workers)), *common, *(["--redis", redis] if redis else [])]

        def worker(role: str, number: int, *flags: str) -> tuple[str, Role]:
            socket = f"unix:{folder}/{role}-{number}.sock"
            return socket, Role(f"tests.telltale.{role}", [*told, "--listen", socket, *flags], folder)

        encoders = [
            worker("encoder", number, "--offer-forms", "cross_kv", "--lease-seconds", "5", "--media-workers", "1")
            for number in range(REPLICAS)
        ]
        decoders = [
            worker("decoder", number, "--forms", "cross_kv", "--text-tokens", "4096", "--visual-tokens", "256",
                   "--pace", str(pace))
            for number in range(REPLICAS)
        ]  # fmt: skip
        self.encoders, self.decoders = [role for _, role in encoders], [role for _, role in decoders]
        self.roots: dict[str, bytes] = {}
        self.routers: dict[str, list[Role]] = {}
        at_encoders, at_decoders = (",".join(at for at, _ in made) for made in (encoders, decoders))
        for tenant in TENANTS:
            secret = secrets.token_hex(32)
            self.roots[tenant] = tenant_root(bytes.fromhex(secret), LOCAL)
            kept = str(_secret(folder / f"{tenant}.key", secret))
            self.routers[tenant] = [
                Role(
                    "tests.telltale.router",
                    ["--listen", f"unix:{folder}/router-{tenant}-{number}.sock", *common, "--tenants-secret-file", kept,
                     "--encoders", at_encoders, "--decoders", at_decoders],
                    folder,
                )
                for number in range(REPLICAS)
            ]  # fmt: skip

    def faults(self, draw: random.Random) -> ProcessFaults:
        return ProcessFaults(self.encoders, self.decoders, [*itertools.chain(*self.routers.values())], draw)

    @property
    def roles(self) -> list[Role]:
        return [*self.encoders, *self.decoders, *itertools.chain(*self.routers.values())]

    def __enter__(self) -> Fleet:
        with self._stack:
            self._stack.callback(Region.create(self.arena, self._arena_bytes).close)
            for role in self.roles:
                self._stack.callback(role.end)
                role.start()
            for role in self.roles:
                role.wait_for("ready", seconds=120)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def settled(self, *, seconds: float) -> dict[str, float]:
        """Waits until nothing is held by anybody. Returns what still is when the time is over."""
        end = time.monotonic() + seconds
        while held := await asyncio.to_thread(self.held):
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.1)
        return held

    def held(self) -> dict[str, float]:
        """Whatever is not zero of what must be when no request runs."""
        return {
            f"{role.role} {role.pid} {name}": value
            for role in self.roles
            for name, value in role.counted().items()
            if value and re.search("requests_running|requests_waiting|usage_perc|in_flight|pinned_bytes", name)
        }

    def sizes(self) -> dict[Role, Size]:
        """What each process has now. Blocks until all have told their tasks."""
        return {role: _size(role) for role in self.roles}


class Size(NamedTuple):
    """Of a process: open files, threads, tasks of its loop, and mappings of shared memory."""

    files: int
    threads: int
    tasks: int
    shared: int


def _size(role: Role) -> Size:
    proc = Path(f"/proc/{role.pid}")
    threads = re.search(r"Threads:\s+(\d+)", (proc / "status").read_text(encoding="ascii"))
    assert threads is not None, "Linux says how many there are"
    shared = sum(place in line for line in (proc / "maps").read_text().splitlines() for place in ("/dev/shm", "memfd:"))
    return Size(len(os.listdir(proc / "fd")), int(threads[1]), _tasks(role), shared)


def _tasks(role: Role) -> int:
    """How many run in a process, as it says itself."""
    told = len([event for event in role.events() if event["event"] == TASKS])
    os.kill(role.pid, ASKED)
    end = time.monotonic() + 10
    while True:
        said = [event for event in role.events() if event["event"] == TASKS]
        if len(said) > told:
            return int(said[-1]["count"])
        assert time.monotonic() < end, f"{role.role} {role.pid} does not say how many tasks it has"
        time.sleep(0.02)


def _secret(path: Path, digits: str) -> Path:
    path.touch(0o600)
    path.write_text(digits, encoding="ascii")
    return path
