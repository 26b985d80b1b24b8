"""`python -m tests.telltale.run --requests N --seed S`: a load of tell-tale requests on a system of processes with two
replicas of each worker, a fault every few seconds, and one line of JSON about all of it.

Ends with 1 if anything is wrong or left over. With `--plant` a bug is in the processes, and it ends with 1 unless the
bug was reached and found. `--history` keeps what clients saw, for `python -m tests.telltale.validator`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from chiasm import AsyncClient
from chiasm.cache.region import Region
from tests.chaos.faults import Fault, RegionFaults, StoreFaults
from tests.chaos.system import all_maps
from tests.faults.proxy import proxy
from tests.processes import Role
from tests.redis_server import RedisServer, redis_server
from tests.rpc.running import children
from tests.telltale import history as kept
from tests.telltale.asking import Asking
from tests.telltale.driving import Driver
from tests.telltale.history import History, Record, Writer
from tests.telltale.oracle import Oracle
from tests.telltale.plants import PLANTS
from tests.telltale.processes import Fleet, Size
from tests.telltale.service import REACHED
from tests.telltale.validator import Finding, judge, summary
from tests.waiting import gone

ARENA_BYTES = 16 << 20

MORE = 16
"""Of anything, a process may have so many more in the end than it had when it was warm: connections come and go."""

OFTEN = ("decoder killed", "router killed")
"""Faults that are there three times as often as the others: an answer goes on behind them."""

WARM = 50
"""Requests after which a process is warm."""


@dataclass
class Report:
    """Of one run.

    Attributes:
        left: what was left over, in words.
        encoded: units that encoders made, as far as those that were killed had told.
        needed: units that had to be made once.
        resumed: how often another decoder went on with an answer, as far as routers that were killed had told.
        taken_up: how often a client took an answer up at another router.
    """

    history: History
    found: list[Finding]
    seconds: float
    left: list[str] = field(default_factory=list)
    encoded: float = 0.0
    needed: int = 0
    resumed: int = 0
    taken_up: int = 0
    reached: bool = False

    @property
    def told(self) -> dict[str, Any]:
        requests = max(len(self.history.records), 1)
        return {
            **summary(self.history, self.found),
            "requests_per_second": round(requests / self.seconds, 1),
            "encodes_per_unit": round(self.encoded / max(self.needed, 1), 3),
            "encodes_per_request": round(self.encoded / requests, 3),
            "resumed": self.resumed,
            "taken_up": self.taken_up,
            "left": self.left,
            "reached": self.reached,
        }


async def load(
    requests: int,
    *,
    seed: int,
    faults: tuple[str, ...] = ("",),
    every: float = 5.0,
    at_a_time: int = 8,
    pace: float = 0.0,
    plant: str | None = None,
    history_file: Path | None = None,
) -> Report:
    """Runs a load.

    Args:
        faults: what names of faults begin with; none for a quiet run.
        every: seconds between the beginnings of two faults, at most.
    """
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="telltale-", dir="/dev/shm") as name, redis_server() as server:
        folder = Path(name)
        file = (history_file or folder / "history.jsonl").open("w", encoding="utf-8")
        async with AsyncExitStack() as stack:
            stack.callback(file.close)
            link = await stack.enter_async_context(proxy(server.socket))
            fleet = Fleet(folder, arena_bytes=ARENA_BYTES, redis=link.url, pace=pace, plant=plant)
            await asyncio.to_thread(fleet.__enter__)  # beside the loop, which carries the link
            stack.push_async_callback(asyncio.to_thread, fleet.__exit__, None, None, None)
            region = Region.open(fleet.arena)
            stack.callback(region.close)
            processes = fleet.faults(draw)
            kinds = {
                **processes.faults,
                **StoreFaults(server, link, draw).faults,
                **RegionFaults([region], draw).faults,
            }
            wanted = {kind: act for kind, act in kinds.items() if kind.startswith(faults)} if faults else {}
            clients = {
                tenant: await stack.enter_async_context(
                    AsyncClient([router.target for router in routers], max_retries=0)
                )
                for tenant, routers in fleet.routers.items()
            }
            writer = Writer(file, fleet.roots, {"seed": seed, "quiet": False, "plant": plant})
            driver = Driver(clients, writer.record)
            asking = iter(Asking(seed))
            await driver.ask_all(itertools.islice(asking, WARM), at_a_time=at_a_time)
            await fleet.settled(seconds=10)
            warm = await asyncio.to_thread(fleet.sizes)
            began = time.monotonic()
            asked = asyncio.create_task(driver.ask_all(itertools.islice(asking, requests), at_a_time=at_a_time))
            try:
                await _hurt(wanted, processes.may, asked, writer, driver, draw, every)
                await asked
            finally:
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
            seconds = time.monotonic() - began
            await processes.all_back()
            left = await _left(fleet, warm, server)
            encoded = processes.encoded + sum(
                role.counted()["chiasm_encoder_units_total:encoded"] for role in fleet.encoders
            )
            resumed = await asyncio.to_thread(lambda: processes.resumed)
            reached = any(role.event(REACHED) for role in fleet.roles)
            pids = [pid for role in fleet.roles for pid in (role.pid, *children(role.pid))]
        await gone(*pids)
        left += [f"{pid} still maps the region" for pid, maps in all_maps() if name in maps]
        history = kept.read(Path(file.name))
    oracle = Oracle()
    return Report(
        history,
        judge(history, oracle),
        seconds,
        left,
        encoded,
        _needed(history, oracle),
        resumed,
        driver.taken_up,
        reached,
    )


async def _hurt(
    faults: Mapping[str, Fault],
    may: Callable[[str], bool],
    asked: asyncio.Task[None],
    writer: Writer,
    driver: Driver,
    draw: random.Random,
    every: float,
) -> None:
    """A fault every few seconds, as long as anybody asks. What may not be done at the moment waits its turn."""
    waiting: list[str] = []
    while faults:
        await asyncio.wait([asked], timeout=draw.uniform(0.3, 1.0) * every)
        if asked.done():
            return
        name = next(filter(may, waiting), None)
        if name is None:
            again = [name for name in sorted(faults) for _ in range(3 if name in OFTEN else 1)]
            waiting += draw.sample(again, len(again))
            name = next(filter(may, waiting), None)
        if name is None:
            continue
        waiting.remove(name)
        begun = driver.now
        await faults[name]()
        writer.fault(kept.Fault(name, begun, driver.now))


async def _left(fleet: Fleet, warm: Mapping[Role, Size], server: RedisServer) -> list[str]:
    """What is still held, what has grown, and what would stay for ever."""
    left = [f"{what}: {value:g}" for what, value in (await fleet.settled(seconds=30)).items()]
    for role, size in (await asyncio.to_thread(fleet.sizes)).items():
        if any(now > before + MORE for now, before in zip(size, warm[role], strict=True)):
            left.append(f"{role.role} {role.pid} has {size}, and had {warm[role]}")
    endless = [name for name in server.names("chiasm:*") if server.admin.ttl(name) == -1]
    left += [f"{name} in the store has no end" for name in endless[:5]]
    return left


def _needed(history: History, oracle: Oracle) -> int:
    """Units of all media, each once for a tenant."""
    units: set[tuple[str, bytes]] = set()
    for record in history.records:
        if _was_answered(record):
            truth = oracle.truth(record.request, history.roots[record.request.tenant])
            units |= {(record.request.tenant, unit) for medium in truth.units for unit in medium}
    return len(units)


def _was_answered(record: Record) -> bool:
    return bool(record.events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults, not of their timing")
    parser.add_argument("--faults", default="all", help="what their names begin with, parted by commas; all, none")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults, at most")
    parser.add_argument("--at-a-time", type=int, default=8, help="requests at a time")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of a decoder's step beyond what it takes")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="a bug that must be found")
    parser.add_argument("--history", type=Path, help="keeps what clients saw in this file")
    given = parser.parse_args()
    faults = {"all": ("",), "none": ()}.get(given.faults, tuple(given.faults.split(",")))
    report = uvloop.run(
        load(
            given.requests,
            seed=given.seed,
            faults=faults,
            every=given.every,
            at_a_time=given.at_a_time,
            pace=given.pace,
            plant=given.plant,
            history_file=given.history,
        )
    )
    sys.stdout.write(json.dumps(report.told) + "\n")
    for finding in report.found[:20]:
        sys.stdout.write(json.dumps(finding._asdict()) + "\n")
    wrong = bool(report.found or report.left)
    sys.exit(not (wrong and report.reached) if given.plant else wrong)


if __name__ == "__main__":
    main()
