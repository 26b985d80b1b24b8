"""What the store that nodes share costs beside redis-py alone, and what it saves over one value of the whole entry.

One process and one server on a socket file, uvloop as in the services. Entries are put one after the other, then read
where they were announced. A: `RedisStore`, and the digest of an entry before its put and after its get, as its writer
and its reader make them. B (`ratio`): the same bytes in values of a megabyte by redis-py and hiredis, `MSET` and `MGET`
in pipelines, which never end and are left in pieces, and the same digests. C (`ratio_one_blob`): one `SET` and one
`GET` of each entry, and no digest on either side: what is moved is compared.

An entry has the size of a frame of 512 × 288 of the 8B model (6.8 MiB) in B, 16 MiB in C, and 6.8 MiB in C again
(`ratio_one_blob_7`), since what one value costs grows with it. redis-py as it comes; `ratio_tuned` is B where it reads
256 KiB at a time. The server is emptied before each, so that all write to fresh memory. Each pair in the order A B B A;
ratios of medians, above 1 where the store is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import uvloop
from blake3 import blake3
from redis.asyncio import Redis

from chiasm.cache.manifest import CHUNK_BYTES
from chiasm.cache.redis import RedisStore
from chiasm.cache.sealed import EntryKey, Sealed
from tests.redis_server import RedisServer, redis_server, store_at

ENTRIES = 6
FRAME = 12 * 2 * 8 * 145 * 128 * 2
"""Layers, K and V, heads, tokens, dim, bytes of a bfloat16."""

LARGE = 16 << 20

SECRET = bytes(32)

Run = Callable[[], Awaitable[None]]


def digest(*parts: bytes | memoryview) -> bytes:
    made = blake3(key=SECRET)
    for part in parts:
        made.update(part)
    return made.digest()


def payloads(nbytes: int) -> list[memoryview]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, nbytes, dtype=np.uint8).data for _ in range(ENTRIES)]


def by_store(store: RedisStore, entries: Sequence[memoryview], *, verified: bool = True) -> Run:
    keys: list[EntryKey] = [digest(bytes([index])) for index in range(len(entries))]

    async def run() -> None:
        places = [
            await store.put(Sealed(b"header", entry, digest(entry) if verified else bytes(32)), key)
            for key, entry in zip(keys, entries, strict=True)
        ]
        for key, place in zip(keys, places, strict=True):
            sealed = await store.get(key, place)
            assert sealed is not None, (store.refused, store.rejected, store.link.failures)
            assert not verified or digest(sealed.payload) == sealed.tag

    return run


def in_pieces(client: Redis, entries: Sequence[memoryview]) -> Run:
    pieces_of = range(0, entries[0].nbytes, CHUNK_BYTES)
    names = [[f"{index}:{start}" for start in pieces_of] for index in range(len(entries))]

    async def run() -> None:
        tags = []
        for entry, pieces in zip(entries, names, strict=True):
            tags.append(digest(entry))
            values = {name: entry[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES] for i, name in enumerate(pieces)}
            async with client.pipeline(transaction=False) as pipeline:
                pipeline.mset(values)
                await pipeline.execute()
        for tag, pieces in zip(tags, names, strict=True):
            async with client.pipeline(transaction=False) as pipeline:
                pipeline.mget(pieces)
                (found,) = await pipeline.execute()
            assert digest(*found) == tag

    return run


def in_one(client: Redis, entries: Sequence[memoryview]) -> Run:
    async def run() -> None:
        for index, entry in enumerate(entries):
            await client.set(f"whole:{index}", entry)
        for index, entry in enumerate(entries):
            found = await client.get(f"whole:{index}")
            assert found is not None and len(found) == entry.nbytes

    return run


async def ratio(peer: Run, store: Run, server: RedisServer, rounds: int) -> float:
    """Of medians, taken in the order A B B A."""
    taken: dict[Run, list[float]] = {peer: [], store: []}
    await peer()
    await store()
    for _ in range(rounds):
        for one in (store, peer, peer, store):
            server.admin.flushdb()
            began = time.perf_counter()
            await one()
            taken[one].append(time.perf_counter() - began)
    return statistics.median(taken[peer]) / statistics.median(taken[store])


async def measure(server: RedisServer, rounds: int) -> dict[str, object]:
    frames, large = payloads(FRAME), payloads(LARGE)
    store = store_at(server)
    plain = Redis(unix_socket_path=str(server.socket))
    tuned = Redis(unix_socket_path=str(server.socket), socket_read_size=256 << 10)
    pairs = {
        "ratio": (in_pieces(plain, frames), by_store(store, frames)),
        "ratio_one_blob": (in_one(plain, large), by_store(store, large, verified=False)),
        "ratio_tuned": (in_pieces(tuned, frames), by_store(store, frames)),
        "ratio_one_blob_7": (in_one(plain, frames), by_store(store, frames, verified=False)),
    }
    try:
        ratios = {name: round(await ratio(*pair, server, rounds), 3) for name, pair in pairs.items()}
    finally:
        await asyncio.gather(plain.aclose(), tuned.aclose(), store.close())
    return {**ratios, "entries": ENTRIES, "rounds": rounds}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks redis_tier", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--binary", help="of a server; default: the Valkey that comes with the tests")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    with redis_server(binary=options.binary) as server:
        result = uvloop.run(measure(server, options.rounds))
    if not options.json:
        print(f"raw against the store: {result['ratio']}; one value against it: {result['ratio_one_blob']}")
    print(json.dumps(result))
