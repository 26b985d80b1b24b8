"""What it costs to bring entries into a node's region and out of it, beside a copy and the same digest of equal bytes.

Entries of 6.8 MiB (145 visual tokens of 12 cross layers, 8 heads of 128, bfloat16), 1, 8 and 64 of them, one after
another; 1 is taken eight times, because an event loop takes a tenth of a millisecond to begin. A: a copy and a keyed
BLAKE3 of each, into memory that is there. B, publish: `sealing` and `put` into the region, with header, finite check
and tag. B, attach: `get` and `open_entry`. The order is A B B A; medians of each. `publish_ratio` and `attach_ratio`
are A's time over B's for the count at which it is least: 1 costs nothing but copy and digest. The same in processor
time of all threads is `…_cpu_ratio`: B hands each copy to a thread, which on a machine with more work than cores has
to wait.

A look-up is a `pin`: the header is read, no payload. `lookup_us` is the largest median, `lookup_growth` the largest
over the least, over regions of 1 and of 256 entries and over entries of 48 KiB and of 41 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import blake3
import numpy as np
import torch
from torch import Tensor

from benchmarks._alternate import alternate
from chiasm.allocation import keep_freed
from chiasm.cache.arena import ArenaStore
from chiasm.cache.columns import Array
from chiasm.cache.entry import Contract, open_entry, sealing
from chiasm.cache.form import Form
from chiasm.cache.region import Region
from chiasm.cache.sealed import EntryKey
from chiasm.cache.store import Lease

SHAPE = (12, 2, 8, 145, 128)
COUNTS = (1, 8, 64)
FEWEST = 8
"""Entries that are timed together, the same ones again where there are fewer."""

SECRET = bytes(range(32))
IN = Path("/dev/shm")


def key(number: int) -> EntryKey:
    return number.to_bytes(32, "little")


def contract(number: int, tokens: int = SHAPE[3]) -> Contract:
    shape = (*SHAPE[:3], tokens, SHAPE[4])
    return Contract(key(number), bytes(32), Form.CROSS_KV, torch.bfloat16, (24, 24), shape)


@contextmanager
def store(nbytes: int) -> Iterator[ArenaStore]:
    path = IN / f"chiasm-benchmark-{secrets.token_hex(4)}"
    region = Region.create(path, nbytes)
    region.unlink()
    try:
        yield ArenaStore(region)
    finally:
        region.close()


class Crossed(NamedTuple):
    """A's seconds and B's, publishing and attaching."""

    publish: tuple[float, float]
    attach: tuple[float, float]


def crossing(runner: asyncio.Runner, count: int, rounds: int, clock: Callable[[], float]) -> Crossed:
    generator = torch.Generator().manual_seed(count)
    payloads = [torch.randn(SHAPE, generator=generator).to(torch.bfloat16) for _ in range(count)]
    contracts = [contract(number) for number in range(count)]
    turns = max(1, FEWEST // count)
    plain = [payload.view(-1).view(torch.uint8).numpy() for payload in payloads]
    there = np.ones((count, plain[0].size), np.uint8)

    def copied(sources: Sequence[Array], places: Array) -> None:
        for _ in range(turns):
            for source, place in zip(sources, places, strict=True):
                np.copyto(place, source)
                blake3.blake3(place.data, key=SECRET).digest()

    with store((count + 1) * (plain[0].size + 4096) + (64 << 20)) as arena:

        async def publish() -> None:
            for made, payload in list(zip(contracts, payloads, strict=True)) * turns:
                await arena.put(sealing(made, payload, SECRET), made.key)

        async def attach() -> None:
            for made in contracts * turns:
                sealed = await arena.get(made.key)
                assert sealed is not None
                assert isinstance(open_entry(sealed, made, SECRET), Tensor)

        out = np.ones_like(there[:1]).repeat(count, axis=0)
        return Crossed(
            alternate(lambda: copied(plain, there), lambda: runner.run(publish()), rounds, clock=clock),
            alternate(lambda: copied(list(there), out), lambda: runner.run(attach()), rounds, clock=clock),
        )


def lookup(runner: asyncio.Runner, entries: int, tokens: int, rounds: int) -> float:
    """Seconds of one look-up, in the middle."""
    nbytes = contract(0, tokens).payload_bytes
    with store(entries * (nbytes + 4096) + (16 << 20)) as arena:
        payload = torch.zeros((*SHAPE[:3], tokens, SHAPE[4]), dtype=torch.bfloat16)

        async def look() -> list[float]:
            for number in range(entries):
                made = contract(number, tokens)
                await arena.put(sealing(made, payload, SECRET), made.key)
            taken = []
            for turn in range(rounds):
                wanted, lease = key(turn % entries), Lease.of(60)
                began = time.perf_counter()
                pinned = await arena.pin(wanted, lease)
                taken.append(time.perf_counter() - began)
                assert pinned is not None
                await arena.release(wanted, lease.id)
            return taken

        return statistics.median(runner.run(look()))


def ratio(times: tuple[float, float]) -> float:
    return round(times[0] / times[1], 3)


def measure(rounds: int) -> dict[str, object]:
    keep_freed()  # as a decoder does
    gigabytes = contract(0).payload_bytes / 1e9
    with asyncio.Runner() as runner:
        wall, cpu = (
            {count: crossing(runner, count, max(3, rounds // max(count, FEWEST)), clock) for count in COUNTS}
            for clock in (time.perf_counter, time.process_time)
        )
        looked = {
            f"{entries} of {tokens} tokens": lookup(runner, entries, tokens, 50 * rounds)
            for entries, tokens in ((1, 1), (1, 870), (1, 145), (256, 1))
        }
    return {
        "publish_ratio": min(ratio(times.publish) for times in wall.values()),
        "attach_ratio": min(ratio(times.attach) for times in wall.values()),
        "lookup_us": round(1e6 * max(looked.values()), 1),
        "lookup_growth": round(max(looked.values()) / min(looked.values()), 3),
        "publish_cpu_ratio": min(ratio(times.publish) for times in cpu.values()),
        "attach_cpu_ratio": min(ratio(times.attach) for times in cpu.values()),
        "publish_by_count": {count: (ratio(wall[count].publish), ratio(cpu[count].publish)) for count in COUNTS},
        "attach_by_count": {count: (ratio(wall[count].attach), ratio(cpu[count].attach)) for count in COUNTS},
        "publish_gb_s": {count: round(max(count, FEWEST) * gigabytes / wall[count].publish[1], 2) for count in COUNTS},
        "attach_gb_s": {count: round(max(count, FEWEST) * gigabytes / wall[count].attach[1], 2) for count in COUNTS},
        "lookups_us": {name: round(1e6 * seconds, 1) for name, seconds in looked.items()},
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks publish_attach", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(options.rounds)
    if not options.json:
        print(f"of a copy and a digest: publish {result['publish_ratio']}, attach {result['attach_ratio']}")
    print(json.dumps(result))
