"""Tell-tale services as processes: two replicas of each worker, a router for each tenant, a region, and a store behind
it. And what may be done to them: a worker is hurt only while another of its role is whole.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from chiasm.cache.region import Region
from chiasm.cache.tenant import LOCAL, tenant_root
from tests.chaos.faults import Fault, ProcessFaults
from tests.processes import Role
from tests.telltale.laboratory import TENANTS
from tests.telltale.model import CHECKPOINT

REPLICAS = 2


class Fleet:
    """The processes, started when it is entered and ended when it is left. Entering blocks.

    Args:
        redis: where the store behind the region is; None for none.
        pace: as `laboratory.laboratory` has it.
        plant: a bug in the processes of its role.

    Attributes:
        roots: of the tenants, each of whom has a router.
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
        self.routers: dict[str, Role] = {}
        for tenant in TENANTS:
            secret = secrets.token_hex(32)
            self.roots[tenant] = tenant_root(bytes.fromhex(secret), LOCAL)
            flags = ["--listen", "127.0.0.1:0", *common, "--tenants-secret-file"]
            flags += [str(_secret(folder / f"{tenant}.key", secret))]
            flags += [
                "--encoders",
                ",".join(at for at, _ in encoders),
                "--decoders",
                ",".join(at for at, _ in decoders),
            ]
            self.routers[tenant] = Role("tests.telltale.router" if plant else "router", flags, folder)

    @property
    def roles(self) -> list[Role]:
        return [*self.encoders, *self.decoders, *self.routers.values()]

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

    def sizes(self) -> dict[int, tuple[int, int, int]]:
        """Files, threads and resident kilobytes of each process, by pid."""
        return {role.pid: _size(role.pid) for role in self.roles}


def _size(pid: int) -> tuple[int, int, int]:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    threads, resident = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("Threads", "VmRSS"))  # type: ignore[index]
    return len(os.listdir(f"/proc/{pid}/fd")), threads, resident


def _secret(path: Path, digits: str) -> Path:
    path.touch(0o600)
    path.write_text(digits, encoding="ascii")
    return path


class ReplicaFaults(ProcessFaults):
    """Of workers that have replicas: the last of a role is never killed."""

    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        super().__init__(fleet.encoders, fleet.decoders[0], draw)
        self._decoders: Sequence[Role] = fleet.decoders

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {
            **super().faults,
            "decoder killed": lambda: self._kill(self._draw.choice(self._decoders)),
            "decoder stopped": lambda: self._stop(self._draw.choice(self._decoders)),
        }

    async def _kill(self, role: Role) -> None:
        await self.all_back()
        await super()._kill(role)
