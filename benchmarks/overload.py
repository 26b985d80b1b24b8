"""What is left of the answers in time when more is asked than can be served.

The real router and the real wire before workers that take a fixed time for everything (`benchmarks/_paced.py`), in
processes of their own. Requests come as they do from many who know nothing of each other (Poisson, open loop), each
with a picture of its own and an answer of 10 to 30 tokens. *Goodput* is answers a second whose first token came within
`--slo` seconds of the time at which they were due and whose last within twice the time they take alone; a refusal is a
miss. Peak is the goodput of a quarter more who ask again and again than there are seats. `goodput_2x` and
`goodput_10x` are goodputs at twice and ten times the peak, as parts of it.

`refusal_p99` is milliseconds until a refusal at ten times the peak. `recovery` is the goodput after the workers stood
still at 80 % load, while every client tried again at once, four times, whatever it was told, as a part of that before.
`neighbour` is the p99 of the times of a tenant's answers while another asks for twenty times as much, by that alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._paced import MODEL, TENANT
from chiasm.errors import ChiasmError, Overloaded
from chiasm.rpc.call import streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.v1 import router_pb2_grpc
from tests.asking import image, question

DECODERS, SEATS, STEP = 2, 8, 0.05
TOKENS = (10, 30)
WAIT = 0.5
LATE = 2.0
DEADLINE = 20.0


@dataclass
class Asked:
    """One request: when it was due, and what became of it, in seconds from then."""

    due: float
    tokens: int
    first: float | None = None
    last: float | None = None
    refused: float | None = None
    tries: int = 0

    def good(self, slo: float) -> bool:
        return (
            self.first is not None
            and self.last is not None
            and self.first <= slo
            and (self.last <= slo + LATE * self.tokens * STEP)
        )


@dataclass
class System:
    """Workers, a router, and a way to it."""

    workers: asyncio.subprocess.Process
    stub: router_pb2_grpc.RouterAsyncStub
    numbers: random.Random = field(default_factory=lambda: random.Random(1))

    async def ask(self, asked: Asked, *, tenant: str = "local", tries: int = 1) -> None:
        request = question("What is this?", image(self.numbers.randbytes(256)), model=MODEL, max_tokens=asked.tokens)
        while True:
            asked.tries += 1
            began = time.monotonic()
            try:
                call = self.stub.Generate(request, timeout=DEADLINE, metadata=((TENANT, tenant),))
                async for event in streamed(call):
                    now = time.monotonic() - asked.due
                    if event.HasField("tokens") and asked.first is None:
                        asked.first = now
                    if event.HasField("finished"):
                        asked.last = now
                return
            except ChiasmError as error:
                if isinstance(error, Overloaded):
                    asked.refused = time.monotonic() - began
                if asked.tries >= tries:
                    return

    def fresh(self, due: float) -> Asked:
        return Asked(due, self.numbers.randint(*TOKENS))

    async def poisson(self, rate: float, seconds: float, *, tenant: str = "local", tries: int = 1) -> list[Asked]:
        """Requests at a rate; returns when all have ended."""
        every: list[Asked] = []
        asking: list[asyncio.Task[None]] = []
        due = time.monotonic()
        end = due + seconds
        while (due := due + self.numbers.expovariate(rate)) < end:
            await asyncio.sleep(max(due - time.monotonic(), 0))
            every.append(self.fresh(due))
            asking.append(asyncio.create_task(self.ask(every[-1], tenant=tenant, tries=tries)))
        await asyncio.gather(*asking)
        return every

    async def closed(self, callers: int, seconds: float) -> list[Asked]:
        """So many who ask again when they have their answer."""
        every: list[Asked] = []
        end = time.monotonic() + seconds

        async def caller() -> None:
            while time.monotonic() < end:
                every.append(self.fresh(time.monotonic()))
                await self.ask(every[-1])
                if every[-1].last is None:
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(caller() for _ in range(callers)))
        return every


@asynccontextmanager
async def system() -> AsyncIterator[System]:
    """Both processes, ended with the block."""
    with tempfile.TemporaryDirectory(prefix="chiasm-overload-") as folder:
        started: list[asyncio.subprocess.Process] = []
        try:
            for role in ("workers", "router"):
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "benchmarks._paced", role, "--folder", folder, "--decoders", str(DECODERS),
                    "--seats", str(SEATS), "--seconds", str(STEP), "--wait", str(WAIT),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[1],
                )  # fmt: skip
                started.append(process)
                assert process.stdout is not None
                assert await process.stdout.readline() == b"ready\n", f"the {role} did not start"
            async with connect(f"unix:{folder}/router") as channel:
                yield System(started[0], router_pb2_grpc.RouterStub(channel))
        finally:
            for process in reversed(started):
                assert process.stdin is not None
                process.stdin.close()
                try:
                    await asyncio.wait_for(process.wait(), 10)
                except TimeoutError:
                    process.kill()
                    await process.wait()


def goodput(every: Sequence[Asked], begin: float, end: float, slo: float) -> float:
    """Of the requests that were due between two moments."""
    return sum(asked.good(slo) for asked in every if begin <= asked.due < end) / (end - begin)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


async def at(made: System, rate: float, seconds: float, slo: float) -> tuple[float, list[Asked]]:
    """Goodput at a rate, after a time to settle."""
    began = time.monotonic()
    every = await made.poisson(rate, seconds + WARM)
    return goodput(every, began + WARM, began + WARM + seconds, slo), every


WARM = 3.0


async def peak_of(made: System, seconds: float, slo: float) -> float:
    """A quarter more callers than there are seats, so that none is empty between two."""
    began = time.monotonic()
    every = await made.closed(DECODERS * SEATS * 5 // 4, seconds + WARM)
    return goodput(every, began + WARM, began + WARM + seconds, slo)


async def recovery_of(made: System, peak: float, stall: float, seconds: float, slo: float) -> float:
    """Goodput from twice the longest answer after a stall on, by that before it."""
    longest = 2 * TOKENS[1] * STEP
    began = time.monotonic()
    total = WARM + seconds + stall + longest + seconds
    asking = asyncio.create_task(made.poisson(0.8 * peak, total, tries=5))
    await asyncio.sleep(WARM + seconds)
    stopped = time.monotonic()
    os.kill(made.workers.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(stall)
    finally:
        os.kill(made.workers.pid, signal.SIGCONT)
    again = time.monotonic() + longest
    every = await asking
    before = goodput(every, began + WARM, stopped - longest / 2, slo)
    offered = [sum(b <= one.due < e for one in every) / (e - b) for b, e in
               ((began + WARM, stopped - longest / 2), (again, began + total))]  # fmt: skip
    return goodput(every, again, began + total, slo) / offered[1] / (before / offered[0])


async def neighbour_of(made: System, peak: float, seconds: float) -> float:
    """p99 of the times of one tenant's answers beside another's, by that alone."""
    rate = peak / 5

    def p99(every: Sequence[Asked]) -> float:
        return percentile([one.last if one.last is not None else DEADLINE for one in every], 0.99)

    alone = await made.poisson(rate, seconds, tenant="quiet")
    beside, _ = await asyncio.gather(
        made.poisson(rate, seconds, tenant="quiet"), made.poisson(20 * rate, seconds + 1, tenant="loud")
    )
    return p99(beside) / p99(alone)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    peaks: list[float] = []
    doubled: list[float] = []
    tenfold: list[float] = []
    refusals: list[float] = []
    async with system() as made:
        for _ in range(options.rounds):
            peaks.append(await peak_of(made, options.seconds, options.slo))
            peak = statistics.median(peaks)
            doubled.append((await at(made, 2 * peak, options.seconds, options.slo))[0])
            good, every = await at(made, 10 * peak, options.seconds, options.slo)
            tenfold.append(good)
            refusals += [1000 * asked.refused for asked in every if asked.refused is not None]
        peak = statistics.median(peaks)
        result: dict[str, object] = {
            "goodput_2x": round(statistics.median(doubled) / peak, 3),
            "goodput_10x": round(statistics.median(tenfold) / peak, 3),
            "peak": round(peak, 2),
            "refusals": len(refusals),
            "refusal_p50": round(percentile(refusals, 0.5), 1),
            "refusal_p99": round(percentile(refusals, 0.99), 1),
        }
        if not options.quick:
            result["recovery"] = round(await recovery_of(made, peak, options.stall, options.seconds, options.slo), 3)
            result["neighbour"] = round(await neighbour_of(made, peak, 2 * options.seconds), 2)
    return result


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks overload", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement")
    parser.add_argument("--slo", type=float, default=1.5, help="seconds to a first token")
    parser.add_argument("--stall", type=float, default=3.0, help="seconds for which workers stand still")
    parser.add_argument("--quick", action="store_true", help="only the goodputs")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    result = asyncio.run(measure(options))
    if not options.json:
        print(f"goodput at 2x {result['goodput_2x']}, at 10x {result['goodput_10x']} of {result['peak']} a second")
    print(json.dumps(result))
