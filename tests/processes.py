"""The three roles as processes of their own, for tests: started, killed, started again, and always ended.

Each is what its command line makes it; nothing here looks inside one. Workers listen on socket files, so no port is
chosen here; what they count is read from their plain ports.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from chiasm.cache.region import Region
from chiasm.models.finding import SHIPPED
from tests.rpc.plain import metrics

ARENA_BYTES = 32 << 20


class Role:
    """One process, `python -m ROLE …`, and what it logs.

    Args:
        arguments: of its command line.
        folder: where its log is kept.

    Attributes:
        env: what it is started with beside this process's own environment.
        within: what its command line begins with, for example a command that runs it in a namespace.
        more: flags behind those it was made with, which they win over.
    """

    def __init__(self, role: str, arguments: Sequence[str], folder: Path) -> None:
        self.role = role
        self._module = ["-m", role]
        self._arguments = [*arguments, "--log-format", "json", "--supervised"]
        self._log = folder / f"{role}-{secrets.token_hex(4)}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.env: dict[str, str] = {}
        self.within: list[str] = []
        self.more: list[str] = []

    def start(self) -> None:
        """Starts it, or starts it again after its end."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.within, sys.executable, *self._module, *self._arguments, *self.more],
                stdin=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.env},
            )

    def through(self, module: str, *arguments: str) -> None:
        """Has a module run it from its next start on: `python -m MODULE ARGUMENTS… ROLE …`."""
        self._module = ["-m", module, *arguments, self.role]

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    @property
    def code(self) -> int | None:
        """What it ended with; None while it runs."""
        assert self._process is not None, "it was started"
        return self._process.poll()

    def events(self) -> list[dict[str, Any]]:
        """What it has logged, in order."""
        lines = self._log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def event(self, name: str) -> dict[str, Any] | None:
        """The last event of that name."""
        return next((event for event in reversed(self.events()) if event["event"] == name), None)

    def wait_for(self, name: str, *, seconds: float = 60.0) -> dict[str, Any]:
        """Returns when it has logged an event of that name."""
        end = time.monotonic() + seconds
        while (event := self.event(name)) is None:
            assert self._process is not None and self._process.poll() is None, self._log.read_text(encoding="utf-8")
            assert time.monotonic() < end, f"{self.role} is not {name}: {self._log.read_text(encoding='utf-8')}"
            time.sleep(0.02)
        return event

    @property
    def target(self) -> str:
        """Where it listens."""
        target = self.wait_for("listening")["target"]
        assert isinstance(target, str)
        return target

    def counted(self) -> dict[str, float]:
        """What it counts now, as `tests.rpc.plain.metrics` names it."""
        return metrics(self.wait_for("listening")["http"])

    def kill(self) -> None:
        """Ends it as nothing can prevent, and returns when it has ended."""
        assert self._process is not None and self._process.stdin is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)
        self._process.stdin.close()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        """Asks it to end, as a supervisor does that ends, and at last ends it by force."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        assert process.stdin is not None
        self._signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


class Trio:
    """Encoders, decoders and routers of one model, one of each as a rule, with a region between the workers, or one on
    each of two nodes. Routers that are several listen on socket files, so that one that was started again is found."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        regions: tuple[Region, Region],
        options: dict[str, Sequence[str]],
        *,
        encoders: int,
        decoders: int = 1,
        routers: int = 1,
        modules: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        workers, tenants = (secret(folder / name) for name in ("workers.key", "tenants.key"))
        plain = ["--http", "127.0.0.1:0", "--drain-seconds", "1"]

        def worker(name: str, role: str, region: Region) -> tuple[str, Role]:
            socket = f"unix:{folder}/{name}.sock"
            told = ["--model", str(model), "--arena", str(region.path), "--workers-secret-file", str(workers)]
            arguments = [*told, *plain, "--listen", socket, *options.get(role, ())]
            return socket, Role(modules.get(role, f"{role}_service"), arguments, folder)

        made = [worker(f"encoder-{number}", "encoder", regions[0]) for number in range(encoders)]
        self.encoders = [role for _, role in made]
        self.arenas = sorted({region.path for region in regions})
        deciding = [worker(f"decoder-{number}", "decoder", regions[1]) for number in range(decoders)]
        self.decoders = [role for _, role in deciding]
        known = ["--encoders", ",".join(at for at, _ in made), "--decoders", ",".join(at for at, _ in deciding)]
        known += ["--tenants-secret-file", str(tenants)]
        places = ["127.0.0.1:0"] if routers == 1 else [f"unix:{folder}/router-{n}.sock" for n in range(routers)]
        self.routers = [
            Role("router", ["--listen", place, *plain, *known, *options.get("router", ())], folder) for place in places
        ]

    @property
    def encoder(self) -> Role:
        """The first of them."""
        return self.encoders[0]

    @property
    def decoder(self) -> Role:
        """The first of them."""
        return self.decoders[0]

    @property
    def router(self) -> Role:
        """The first of them."""
        return self.routers[0]

    @property
    def roles(self) -> list[Role]:
        return [*self.encoders, *self.decoders, *self.routers]

    @property
    def target(self) -> str:
        """What a client connects to."""
        return self.router.target

    @property
    def targets(self) -> list[str]:
        """Of all routers."""
        return [router.target for router in self.routers]

    async def settled(self, *, seconds: float = 20.0) -> None:
        """Waits until nothing is held by anybody: no call, no page, no extent, no pin."""
        end = time.monotonic() + seconds
        while held := await asyncio.to_thread(self.held):
            assert time.monotonic() < end, f"still held: {held}"
            await asyncio.sleep(0.05)

    def held(self) -> dict[str, float]:
        """Whatever is not zero of what must be when no request runs."""
        return {
            f"{role.role} {name}": value
            for role in self.roles
            for name, value in role.counted().items()
            if value and re.search("requests_running|requests_waiting|usage_perc|in_flight|pinned_bytes", name)
        }


@contextmanager
def trio(
    folder: Path,
    *,
    model: Path = SHIPPED / "digits",
    arena_bytes: int = ARENA_BYTES,
    encoders: int = 1,
    decoders: int = 1,
    routers: int = 1,
    nodes: int = 1,
    modules: Mapping[str, str] = MappingProxyType({}),
    within: Mapping[str, list[str]] = MappingProxyType({}),
    prepare: Callable[[Role], object] = lambda role: None,
    **options: Sequence[str],
) -> Iterator[Trio]:
    """Three processes that answer, or more, ended with the block.

    Args:
        nodes: 2 gives the encoders a region of their own, as if they were on another node than the decoder.
        modules: what is run in the place of a worker's own module, by role.
        within: what command lines begin with, by the module that is run.
        prepare: is given each role before it is started.
        options: more flags, by role: `encoder`, `decoder`, `router`.
    """
    with ExitStack() as stack:
        regions = [
            Region.create(folder / ("arena" if nodes == 1 else f"arena-{node}"), arena_bytes) for node in range(nodes)
        ]
        for region in regions:
            stack.callback(region.close)
        made = Trio(
            folder,
            model,
            (regions[0], regions[-1]),
            dict(options),
            encoders=encoders,
            decoders=decoders,
            routers=routers,
            modules=modules,
        )
        for role in made.roles:
            stack.callback(role.end)
            role.within = within.get(role.role, [])
            prepare(role)
            role.start()
        for role in made.roles:
            role.wait_for("ready", seconds=180)
        yield made


def secret(path: Path) -> Path:
    """A file of a new secret."""
    path.touch(0o600)
    path.write_text(secrets.token_hex(32), encoding="ascii")
    return path
