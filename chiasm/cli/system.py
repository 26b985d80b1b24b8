"""Router, encoders and decoders as processes of this machine, around one arena: what `serve` and `demo` run.

Turns what was asked for into command lines of roles. Workers listen on sockets in the folder of the run, so that no
port but the router's is open. Knows the flags of the roles, and nothing of what is in them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chiasm.cache.region import Region
from chiasm.cli import health, run_folder
from chiasm.cli.child import Role, Tell
from chiasm.cli.failure import MISUSED, CommandFailed
from chiasm.cli.interrupts import Interrupts
from chiasm.cli.over_ray import OverRay, plan
from chiasm.cli.run_folder import RunFolder
from chiasm.cli.supervisor import Policy, Supervisor
from chiasm.settings import is_private

LISTEN = "127.0.0.1:50051"

ARENA_BYTES = 1 << 30
"""Of the arena, unless something else is asked for or half of what is free is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to run.

    Attributes:
        folder: of the checkpoint.
        name: what requests call the model.
        listen: `HOST:PORT` or `unix:PATH` of the router; port 0 takes a free one.
        http: `HOST:PORT` of the router's `/metrics`, `/healthz` and `/readyz`; None for none.
        device, dtype: where the workers compute, and in what; None is for each device its usual.
        form: of entries that decoders ask for; None lets them measure and agree.
        condition_layers: decoders keep so many layers and tell states alone; None for whole ones.
        arena_bytes: None for a share of what is free.
        cache_tenant_bytes: what the entries of one tenant may take of the arena; None for all.
        cache_ttl: seconds after which an entry that nobody has used is not served; None for never.
        insecure: lets the router listen where other machines reach it.
        redis: of the store that nodes share: its URL and whatever else workers are told of it, by flag; empty for none.
        ray: has Ray place the workers; None runs them as processes of this machine.
        parent: a folder in memory, in which that of the run is made.
    """

    folder: Path
    name: str
    listen: str = LISTEN
    http: str | None = None
    device: str = "cpu"
    dtype: str | None = None
    form: str | None = None
    condition_layers: int | None = None
    arena_bytes: int | None = None
    cache_tenant_bytes: int | None = None
    cache_ttl: float | None = None
    encoders: int = 1
    decoders: int = 1
    insecure: bool = False
    ray: OverRay | None = None
    redis: Mapping[str, str] = field(default_factory=dict)
    parent: Path = run_folder.IN


@dataclass(frozen=True, slots=True)
class Running:
    """A system that answers.

    Attributes:
        target: what a channel to the router takes.
        supervisor: keeps the processes until the context is left.
        seconds: from the beginning until it was ready.
    """

    target: str
    supervisor: Supervisor
    seconds: float


@asynccontextmanager
async def running(
    options: Options, tell: Tell, interrupts: Interrupts, *, policy: Policy | None = None
) -> AsyncIterator[Running]:
    """Starts everything and waits until a question would be answered. Leaving the context ends everything: the router,
    then the workers, then the folder with the arena.

    Raises CommandFailed if a role cannot start or no folder can be made, Unsupported ARENA_NO_SPACE.
    """
    began = time.monotonic()
    with _folder(options.parent) as folder, ExitStack() as stack:
        if options.ray is None:  # which has the regions of its nodes made there
            region = await asyncio.to_thread(Region.create, folder.arena, arena_bytes(options))
            stack.callback(region.close)
        front, workers = (roles if options.ray is None else roles_over_ray)(options, folder)
        async with Supervisor(front, workers, tell, policy=policy) as supervisor:
            interrupts.hurry = supervisor.kill
            await supervisor.during(_answers(supervisor))
            yield Running(supervisor.target, supervisor, time.monotonic() - began)


def _folder(parent: Path) -> RunFolder:
    run_folder.sweep(parent)
    try:
        return RunFolder(parent)
    except OSError as error:
        what = f"no folder can be made in {parent}: {error.strerror}"
        raise CommandFailed(what, str(parent), "chiasm doctor", code=MISUSED) from None


async def _answers(supervisor: Supervisor) -> None:
    await supervisor.ready()
    await health.until_ready(supervisor.target)


def roles(options: Options, folder: RunFolder) -> tuple[Role, list[Role]]:
    """The router, and the workers."""
    kinds = _kinds(options)
    names = {kind: [f"{kind}-{index}" for index in range(count)] for kind, count in kinds.items()}
    environment = threads(os.environ, sum(kinds.values()))
    workers = [
        _role(
            name,
            f"{kind}_service",
            {"--arena": str(folder.arena), **_worker_flags(options, kind, folder.workers_secret)},
            {"--listen": folder.socket(name), "--http": "none"},
            environment,
        )
        for kind in kinds
        for name in names[kind]
    ]
    found = {f"--{kind}s": ",".join(map(folder.socket, names[kind])) for kind in kinds}
    return _front(options, folder, found, environment), workers


def roles_over_ray(options: Options, folder: RunFolder) -> tuple[Role, list[Role]]:
    """The router, and a Ray of this machine if none is given. The workers are Ray's."""
    assert options.ray is not None
    ray, kinds = options.ray, _kinds(options)
    address, secret = folder.path / "ray.address", ray.workers_secret or folder.workers_secret
    environment = threads(os.environ, sum(kinds.values()))
    written = folder.path / "ray.plan"
    text = plan(
        ray,
        address=str(address) if ray.here else ray.address,
        least=kinds,
        flags={kind: _worker_flags(options, kind, secret) for kind in kinds},
        arenas=folder.path / "arenas" if ray.here else None,
        arena_bytes=arena_bytes(options),
        environment={"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]} if ray.here else {},
        insecure=options.insecure,
    )
    written.write_text(text, encoding="utf-8")
    flags = {"--address-file": str(address), "--folder": str(folder.path / "ray")}
    heads = [_role("ray", "router.ray_head", flags, {}, environment)] if ray.here else []
    return _front(options, folder, {"--ray-plan": str(written)}, environment), heads


def _kinds(options: Options) -> dict[str, int]:
    return {"encoder": options.encoders, "decoder": options.decoders}


def _worker_flags(options: Options, kind: str, secret: Path) -> dict[str, str]:
    """What a worker is told wherever it runs."""
    asked = {
        "--dtype": options.dtype,
        "--cache-tenant-bytes": options.cache_tenant_bytes,
        "--cache-ttl": options.cache_ttl,
        "--forms": options.form if kind == "decoder" else None,
        "--condition-layers": options.condition_layers if kind == "decoder" else None,
    }
    return {
        "--model": str(options.folder),
        "--name": options.name,
        "--workers-secret-file": str(secret),
        "--device": options.device,
        **{flag: str(value) for flag, value in asked.items() if value is not None},
        **options.redis,
    }


def _front(options: Options, folder: RunFolder, found: Mapping[str, str], environment: Mapping[str, str]) -> Role:
    """The router, told how its workers are found."""
    return _role(
        "router",
        "router",
        {**found, "--tenants-secret-file": str(folder.tenants_secret)},
        {"--listen": options.listen, "--http": options.http or "none"},
        environment,
        ["--insecure"] if options.insecure else [],
    )


def _role(
    name: str,
    module: str,
    flags: Mapping[str, str],
    places: Mapping[str, str],
    environment: Mapping[str, str],
    switches: Sequence[str] = (),
) -> Role:
    # -P: a folder named like a module, where the command happens to be run, is not the module.
    command = [sys.executable, "-P", "-m", module, *(word for flag in flags.items() for word in flag)]
    return Role(name, [*command, *switches, "--log-format", "json", "--supervised"], environment, places)


def threads(environment: Mapping[str, str], workers: int) -> dict[str, str]:
    """The environment of the roles: the cores shared out among the workers, unless the user has said how.

    Threads of arithmetic that are more than the cores wait for each other at every step: an operation of half a
    millisecond then takes eight, a slice of the kernel's scheduler.
    """
    return {"OMP_NUM_THREADS": str(max(1, cores() // workers)), **environment}


def cores() -> int:
    """Cores that this process may use: those it may run on, or the quota of its container where that is less."""
    mine = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return mine if quota == "max" else max(1, min(mine, int(quota) // int(period)))
    except (OSError, ValueError):
        return mine


def arena_bytes(options: Options) -> int:
    """Bytes of the arena: those asked for, else 1 GiB or half of what is free."""
    if options.arena_bytes is not None:
        return options.arena_bytes
    return min(ARENA_BYTES, shutil.disk_usage(options.parent).free // 2)


def check_listen(listen: str, *, insecure: bool) -> bool:
    """Whether an address can be reached from other machines, which only `insecure` allows.

    Raises CommandFailed for one that can be reached and may not, and for one that is no address.
    """
    if listen.startswith("unix:"):
        return False
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        fix = f"write HOST:PORT, for example {LISTEN}, or unix:PATH"
        raise CommandFailed(f"{listen} is not an address", "--listen or --http", fix, code=MISUSED)
    if is_private(listen):
        return False
    if not insecure:
        raise CommandFailed(
            f"{listen} can be reached from other machines, and neither keys nor TLS are built yet",
            "--listen or --http",
            f"listen on 127.0.0.1:{port}, or say --insecure where the network itself keeps strangers out",
            code=MISUSED,
        )
    return True
