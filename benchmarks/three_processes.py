"""What sockets and a shared region cost: three processes against one, the same questions, weights and dtype.

The shipped model, one clip whose entries are in the store. A: `Client.in_process`. B: encoder, decoder and router as
processes, asked through the router. The order is A B B A; medians of each. One question at a time, then sixteen at
once. In one process all parts share one interpreter, so at sixteen the three may also gain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from chiasm.cli.interrupts import Interrupts
from chiasm.cli.system import Options, running
from chiasm.client import AsyncClient, Content, Token, Video
from chiasm.models.finding import SHIPPED

MODEL = "digits"
AT_ONCE = 16


class Timed(NamedTuple):
    """Seconds from the request."""

    first_token: float
    whole: float


async def ask(client: AsyncClient, content: Content) -> Timed:
    began = time.perf_counter()
    first = None
    async with client.stream(MODEL, content) as stream:
        async for event in stream:
            if first is None and isinstance(event, Token):
                first = time.perf_counter() - began
    assert first is not None, "an answer has a token"
    return Timed(first, time.perf_counter() - began)


async def many(client: AsyncClient, content: Content) -> float:
    """Seconds until all of `AT_ONCE` questions are answered."""
    began = time.perf_counter()
    await asyncio.gather(*(ask(client, content) for _ in range(AT_ONCE)))
    return time.perf_counter() - began


async def measure(rounds: int) -> dict[str, object]:
    clip = SHIPPED / MODEL / "held_out" / "clip_8.mp4"
    content: Content = [Video(clip.read_bytes()), "Read the digits."]
    options = Options(folder=SHIPPED / MODEL, name=MODEL, listen="127.0.0.1:0", arena_bytes=64 << 20)
    single: dict[str, list[Timed]] = {"one": [], "three": []}
    crowd: dict[str, list[float]] = {"one": [], "three": []}
    async with (
        running(options, lambda line: None, Interrupts()) as system,
        AsyncClient(system.target) as three,
        AsyncClient.in_process(MODEL) as one,
    ):
        clients = {"one": one, "three": three}
        for client in clients.values():
            await ask(client, content)
        for _ in range(rounds):
            for name in ("one", "three", "three", "one"):
                single[name].append(await ask(clients[name], content))
        for _ in range(max(1, rounds // 4)):
            for name in ("one", "three", "three", "one"):
                crowd[name].append(await many(clients[name], content))
    first = {name: statistics.median(timed.first_token for timed in all_) for name, all_ in single.items()}
    whole = {name: statistics.median(timed.whole for timed in all_) for name, all_ in single.items()}
    at_once = {name: statistics.median(all_) for name, all_ in crowd.items()}
    return {
        "ratio": round(whole["three"] / whole["one"], 3),
        "first_token_ratio": round(first["three"] / first["one"], 3),
        "throughput_ratio_16": round(at_once["one"] / at_once["three"], 3),
        "one_ms": round(1000 * whole["one"], 2),
        "three_ms": round(1000 * whole["three"], 2),
        "first_token_one_ms": round(1000 * first["one"], 2),
        "first_token_three_ms": round(1000 * first["three"], 2),
        "rounds": rounds,
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks three_processes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    result = asyncio.run(measure(options.rounds))
    if not options.json:
        print(f"a whole answer: one process {result['one_ms']} ms, three {result['three_ms']} ms")
    print(json.dumps(result))
