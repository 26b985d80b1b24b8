"""One chaos run: a system of processes, clients that ask, and a fault every second, until the time is over. Then it
must come to rest, answer everything, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from chiasm import AsyncClient, Video
from chiasm.cache.region import Region
from tests import digits
from tests.chaos.asking import READ, Question, Truth
from tests.chaos.faults import Fault, ProcessFaults, RegionFaults, StoreFaults
from tests.chaos.judge import Judge, Verdict
from tests.faults.proxy import proxy
from tests.processes import Trio, trio
from tests.redis_server import RedisServer, redis_server
from tests.rpc.running import children
from tests.waiting import gone

CONCURRENCY = 6

SHARED_MEMORY = Path("/dev/shm")
"""Where regions are in service, and here."""

OPTIONS: dict[str, list[str]] = {
    # What a killed encoder had pinned is free again soon.
    "encoder": ["--lease-seconds", "5"],
    # Room for two answers: the next one reads entries again, instead of finding them in the pool.
    "decoder": ["--visual-tokens", "96"],
    "router": ["--upload-ttl", "3600"],
}

ARENA_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Scenario:
    """What runs, and what may happen to it.

    Attributes:
        faults: what kinds begin with; all of them if empty.
        allowed: reasons with which requests may end.
        modules: as `tests.processes.trio`.
    """

    nodes: int
    faults: tuple[str, ...] = ()
    allowed: frozenset[str] = frozenset({"ENTRY_MISSING", "SHARED_STORE"})
    modules: Mapping[str, str] = field(default_factory=dict)


SCENARIOS: Mapping[str, Scenario] = {
    # Whatever befalls the store that nodes share: where the decoder reads its own node's region no request fails.
    "store": Scenario(nodes=1, faults=("store", "link"), allowed=frozenset()),
    "node": Scenario(nodes=1),
    "nodes": Scenario(nodes=2),
}

CONTROL = Scenario(nodes=1, faults=("region bytes",), modules={"decoder": "tests.chaos.trusting_decoder"})
"""A decoder that verifies no digest: if the judge finds nothing wrong there, it finds nothing anywhere."""


@dataclass
class Report:
    """Of one run.

    Attributes:
        faults: that took effect, by kind.
        encoded: units that encoders made, as far as those that were killed had told.
        needed: units that the same questions cost a system in peace.
        resumed: how often another decoder went on with an answer, as far as routers that were killed had told.
    """

    seed: int
    verdict: Verdict
    faults: Counter[str] = field(default_factory=Counter)
    encoded: float = 0.0
    needed: int = 0
    resumed: int = 0

    @property
    def told(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "requests": self.verdict.asked,
            "right": self.verdict.right,
            "left": self.verdict.left,
            "errors": dict(self.verdict.errors),
            "errors_after": {name: dict(errors) for name, errors in sorted(self.verdict.errors_after.items())},
            "wrong": self.verdict.wrong,
            "resumed": self.resumed,
            "faults": dict(sorted(self.faults.items())),
            "encodes_per_unit": round(self.encoded / max(self.needed, 1), 3),
        }


async def chaos(scenario: Scenario, *, seconds: float, seed: int, concurrency: int = CONCURRENCY) -> Report:
    """Runs a scenario. What is wrong with answers is in the report's verdict; whatever else is wrong raises."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=SHARED_MEMORY) as folder:
        with redis_server() as server:
            async with _served(Path(folder), scenario, server, draw) as (served, processes, faults):
                async with AsyncClient.in_process() as quiet, AsyncClient(served.targets, max_retries=0) as client:
                    truth = Truth(quiet)
                    judge = Judge(client, truth, scenario.allowed, seed)
                    report = Report(seed, judge.verdict)
                    await _hurt(
                        faults, processes.may, judge, report, seconds=seconds, draw=draw, concurrency=concurrency
                    )
                    await processes.all_back()
                    await served.settled(seconds=60)
                    await _at_peace(client, truth, report.verdict, seed)
                    await served.settled(seconds=60)
                    report.encoded = processes.encoded + sum(map(_encoded, served.encoders))
                    report.needed = truth.encoded
                    report.resumed = await asyncio.to_thread(lambda: processes.resumed)
                    if not any(name.startswith("router") for name in report.faults):
                        _check_count(served, report.verdict)
                pids = [pid for role in served.roles for pid in (role.pid, *children(role.pid))]
            await gone(*pids)
            codes = {role.role: role.code for role in served.roles if role.code}
            assert not codes, f"ended with {codes}"
        mapped = [pid for pid, maps in all_maps() if folder in maps]
        assert not mapped, f"{mapped} still map the region"
    return report


@asynccontextmanager
async def _served(
    folder: Path, scenario: Scenario, server: RedisServer, draw: random.Random
) -> AsyncIterator[tuple[Trio, ProcessFaults, dict[str, Fault]]]:
    """The system, and what may be done to it."""
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(proxy(server.socket))
        shared = ["--redis", link.url]
        starting = trio(
            folder,
            arena_bytes=ARENA_BYTES,
            encoders=2,
            decoders=2,
            routers=2,
            nodes=scenario.nodes,
            modules=scenario.modules,
            encoder=[*OPTIONS["encoder"], *shared],
            decoder=[*OPTIONS["decoder"], *shared],
            router=OPTIONS["router"],
        )
        # Beside the loop, which carries the link that processes need to come up.
        served = await asyncio.to_thread(starting.__enter__)
        stack.push_async_callback(asyncio.to_thread, starting.__exit__, None, None, None)
        regions = []
        for path in served.arenas:
            regions.append(Region.open(path))
            stack.callback(regions[-1].close)
        processes = ProcessFaults(served.encoders, served.decoders, served.routers, draw)
        faults = {
            **processes.faults,
            **StoreFaults(server, link, draw).faults,
            **RegionFaults(regions, draw).faults,
        }
        yield served, processes, {name: act for name, act in faults.items() if name.startswith(scenario.faults or "")}


async def _hurt(
    faults: Mapping[str, Fault],
    may: Callable[[str], bool],
    judge: Judge,
    report: Report,
    *,
    seconds: float,
    draw: random.Random,
    concurrency: int,
) -> None:
    """Asks and hurts until the time is over, or until something is wrong, and returns when all requests have ended."""
    stop = asyncio.Event()
    asking = [asyncio.create_task(judge.ask_on(stop)) for _ in range(concurrency)]
    try:
        end = time.monotonic() + seconds
        for name in _deck(sorted(faults), draw):
            if time.monotonic() > end or judge.verdict.wrong or any(task.done() for task in asking):
                break
            await asyncio.sleep(draw.uniform(0.2, 1.2))
            if not may(name):
                continue
            judge.verdict.meanwhile = name
            await faults[name]()
            report.faults[name] += 1
    finally:
        stop.set()
        await asyncio.gather(*asking)


def _deck(names: list[str], draw: random.Random) -> Iterator[str]:
    """Kinds in an order drawn anew each time that all of them were there."""
    while True:
        yield from draw.sample(names, len(names))


async def _at_peace(client: AsyncClient, truth: Truth, verdict: Verdict, seed: int) -> None:
    """When nobody hurts it any more, it answers everything."""
    judge = Judge(client, truth, allowed=(), seed=seed)
    for clip in digits.shipped_clips():
        await judge.ask(Question(clip.path.name, (Video(clip.path),), READ))
    verdict.asked += judge.verdict.asked
    verdict.right += judge.verdict.right
    verdict.wrong += [f"at peace: {what}" for what in judge.verdict.wrong]


def _encoded(encoder: object) -> float:
    counted: dict[str, float] = encoder.counted()  # type: ignore[attr-defined]
    return counted["chiasm_encoder_units_total:encoded"]


def _check_count(served: Trio, verdict: Verdict) -> None:
    """The routers have seen each request end once. One that was left at once may not have reached them."""
    counted = [item for router in served.routers for item in router.counted().items()]
    ended = sum(value for name, value in counted if name.startswith("chiasm_requests_total:generate:"))
    assert verdict.asked - verdict.left <= ended <= verdict.asked, (ended, verdict.asked, verdict.left)


def all_maps() -> Iterator[tuple[int, str]]:
    """What every process but this one has mapped."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(folder.name) == os.getpid():
                continue
            yield int(folder.name), (folder / "maps").read_text(encoding="utf-8", errors="replace")
