"""How many encodes 32 equal pictures cost that come at the same time.

The whole system in one process (`chiasm.local`), the shipped checkpoint, real pixels: 32 questions about one PNG at
once, each of other words, so that nothing but the picture is shared. `encodes` are units that went through the model;
`makespan` is the time of the 32 against one alone, of pictures never seen, medians: the rest of it is 32 answers.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from chiasm.local import LocalService
from tests.asking import ask, image, question, running

CALLERS = 32


def picture(seed: int) -> bytes:
    """A PNG of 448x448 random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (448, 448, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


async def together(service: LocalService, data: bytes, callers: int) -> tuple[float, int]:
    """Seconds until every caller has its answer, and how many units were encoded."""
    before, began = service.encoder.counts.encoded_units, time.perf_counter()
    requests = [question(f"{number}: what is this?", image(data), max_tokens=1) for number in range(callers)]
    await asyncio.gather(*(ask(service, request) for request in requests))
    return time.perf_counter() - began, service.encoder.counts.encoded_units - before


async def measure(rounds: int) -> dict[str, object]:
    alone: list[float] = []
    all_at_once: list[float] = []
    encodes = set()
    async with running() as service:
        await together(service, picture(0), 1)
        for seed in range(1, rounds + 1):
            seconds, _ = await together(service, picture(2 * seed), 1)
            alone.append(seconds)
            seconds, encoded = await together(service, picture(2 * seed + 1), CALLERS)
            all_at_once.append(seconds)
            encodes.add(encoded)
    return {
        "encodes": max(encodes),
        "callers": CALLERS,
        "makespan": round(statistics.median(all_at_once) / statistics.median(alone), 2),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks single_flight", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = asyncio.run(measure(options.rounds))
    if not options.json:
        print(f"{CALLERS} callers with one picture: {result['encodes']} encodes")
    print(json.dumps(result))
