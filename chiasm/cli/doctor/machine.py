"""What the machine gives: processors, memory, shared memory, file descriptors, the port, proxies."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from chiasm.cli import health
from chiasm.cli.doctor.finding import Check, Finding, Status, judged
from chiasm.cli.probe import Service

GROUP = "machine"
PORT = 50051
SHARED = Path("/dev/shm")

LEAST_SHARED = 128 << 20
"""Bytes below which an arena of any use has no room."""

ENOUGH_SHARED = 1 << 30
"""Bytes of the arena that `chiasm serve` makes unless it is told otherwise, which is half of what is free at most."""

FILES = 4096
"""Descriptors for a thousand connections and the files behind them."""


def processors() -> Finding:
    from chiasm.cli.system import cores

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Finding(GROUP, "processors", Status.OK, f"{cores()} cores, {_gib(total)} of memory")


def shared_memory() -> Finding:
    try:
        space = shutil.disk_usage(SHARED)
    except OSError as error:
        fix = "mount a tmpfs at /dev/shm"
        return Finding(GROUP, "shared memory", Status.FAIL, f"{SHARED}: {error.strerror}", "a tmpfs", fix)
    return judged(
        GROUP,
        "shared memory",
        f"{_gib(space.free)} of {_gib(space.total)} free in {SHARED}",
        well=space.free >= 2 * ENOUGH_SHARED,
        expected=f"{_gib(2 * ENOUGH_SHARED)} free",
        fix="docker run --shm-size 4g; in Kubernetes an emptyDir with medium: Memory at /dev/shm",
        bad=Status.WARN if space.free >= LEAST_SHARED else Status.FAIL,
    )


def descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return judged(
        GROUP,
        "open files",
        "no limit" if soft == unlimited else f"{soft} (hard limit {'none' if hard == unlimited else hard})",
        well=soft == unlimited or soft >= FILES,
        expected=f"{FILES} or more",
        fix=f"ulimit -n {FILES}",
        bad=Status.WARN,
    )


def proxies() -> Finding:
    return judge_proxies(os.environ)


def judge_proxies(environment: Mapping[str, str]) -> Finding:
    """gRPC sends even what is for this machine through `http_proxy`, unless `no_proxy` names it."""
    # The names and their order are gRPC's own.
    named = [name for name in ("grpc_proxy", "https_proxy", "http_proxy") if environment.get(name)]
    spared = next((environment[name] for name in ("no_grpc_proxy", "no_proxy") if environment.get(name)), "")
    lacking = [host for host in ("localhost", "127.0.0.1") if not _spares(spared, host)]
    return judged(
        GROUP,
        "proxy",
        f"{', '.join(named)}, and no_proxy lacks {', '.join(lacking)}" if named and lacking else "none in the way",
        well=not named or not lacking,
        expected="no proxy between clients and a router on this machine",
        fix="export no_proxy=localhost,127.0.0.1",
        bad=Status.FAIL,
    )


def _spares(spared: str, host: str) -> bool:
    return any(entry and (host == entry or host.endswith(entry)) for entry in map(str.strip, spared.split(",")))


def port() -> Finding:
    return look_at_port(PORT)


def look_at_port(number: int) -> Finding:
    """Whether a router could listen here, or who does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            well, answer = health.check(f"127.0.0.1:{number}", Service.LIVENESS, 1)
        else:
            return Finding(GROUP, "port", Status.OK, f"{number} is free")
    who = listener(number)
    if well:
        return Finding(GROUP, "port", Status.OK, f"{number} is a server of chiasm ({who})")
    return Finding(
        GROUP,
        "port",
        Status.WARN,
        f"{number} is taken by {who}: {answer}",
        "the port of `chiasm serve`, free or its own",
        "chiasm serve MODEL --listen 127.0.0.1:0",
    )


def listener(number: int) -> str:
    """The process that listens on a TCP port of this machine, as far as this user may see it."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            columns = row.split()
            # proc(5): local address, state (0A listens), inode.
            if int(columns[1].rpartition(":")[2], 16) == number and columns[3] == "0A":
                sockets.add(f"socket:[{columns[9]}]")
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) in sockets:
                process = descriptor.parents[1]
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                return f"process {process.name}, {' '.join(words)[:80].strip()}"
        except OSError:
            continue  # another user's, or gone meanwhile
    return "a process of another user"


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


CHECKS: tuple[Check, ...] = (processors, shared_memory, descriptors, port, proxies)
