"""How much sooner the first token comes when a video's entries are in the store already.

One process, the shipped model, one clip. A: the store is flushed before the question. B: the entries are there. The
order is A B B A; medians of each. What was flushed is opened and decoded too; what is there is known by its digest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing

import torch

from chiasm.local import LocalService, LocalSettings
from chiasm.models.registry import SHIPPED
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb


async def first_token(service: LocalService, clip: bytes) -> float:
    """Seconds from the request to its first token."""
    request = rpb.GenerateRequest(model=service.name)
    turn = request.prompt.conversation.turns.add(role=pb.ROLE_USER)
    turn.parts.add(text="Read the digits.")
    turn.parts.add(slot=0)
    request.media.add(kind=pb.MEDIA_KIND_VIDEO, data=clip)
    request.sampling.max_tokens = 1
    began = time.perf_counter()
    async with aclosing(service.generate(request)) as events:
        async for event in events:
            if event.HasField("tokens"):
                return time.perf_counter() - began
    raise AssertionError("an answer has a token")


async def measure(device: str, rounds: int) -> dict[str, object]:
    clip = (SHIPPED / "digits" / "held_out" / "clip_8.mp4").read_bytes()
    service = await LocalService.start("digits", LocalSettings(device=device))
    try:
        cold: list[float] = []
        hit: list[float] = []
        await first_token(service, clip)
        for _ in range(rounds):
            for flush in (True, False, False, True):
                if flush:
                    await service.store.flush()
                (cold if flush else hit).append(await first_token(service, clip))
    finally:
        await service.close()
    ratio = statistics.median(cold) / statistics.median(hit)
    return {
        "ratio": round(ratio, 3),
        "cold_ms": round(1000 * statistics.median(cold), 2),
        "hit_ms": round(1000 * statistics.median(hit), 2),
        "device": device,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks cold_vs_hit", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    result = asyncio.run(measure(options.device, options.rounds))
    if not options.json:
        print(f"first token: cold {result['cold_ms']} ms, hit {result['hit_ms']} ms")
    print(json.dumps(result))
