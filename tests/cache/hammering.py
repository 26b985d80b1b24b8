"""Processes that put and get in one small arena as fast as they can, each reading what the others wrote.

    python -m tests.cache.hammering ARENA ROUNDS

Two write, two read, all do both sorts of looking. Prints one JSON object with what they counted together, after the
last has ended; a fifth is killed in the middle of its writing, twenty times over.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter

import torch

from chiasm.cache.arena import ArenaStore
from chiasm.cache.entry import Contract, open_entry, seal
from chiasm.cache.form import Form
from chiasm.cache.region import Region
from chiasm.cache.store import Lease
from chiasm.errors import Overloaded
from tests.cache.arenas import at, dies, key

_SECRET = bytes(range(32))
_UNITS = 40


def _unit(number: int) -> tuple[Contract, torch.Tensor]:
    """One of forty units, of 1 to 200 KiB; its payload says which."""
    tokens = 4 * 5 ** (number % 4)
    contract = Contract(key(f"{number}"), bytes(32), Form.CROSS_KV, torch.float32, (4, 4), (2, 2, 3, tokens, 8))
    return contract, torch.full(contract.shape, float(number))


async def _write(store: ArenaStore, rounds: int, draw: random.Random, counts: Counter[str]) -> None:
    for _ in range(rounds):
        contract, payload = _unit(draw.randrange(_UNITS))
        lease = Lease.of(draw.choice([0.001, 0.01, 10.0]))
        try:
            await store.put(seal(contract, payload, _SECRET), contract.key, lease=lease)
        except Overloaded as error:
            counts[error.reason] += 1
        else:
            counts["put"] += 1
            # Its own pin is on it: whatever the others do, it is there until it is released.
            sealed = await store.get(contract.key)
            counts["lost"] += sealed is None and lease.seconds == 10.0
            await store.release(contract.key, lease.id)


async def _read(store: ArenaStore, rounds: int, draw: random.Random, counts: Counter[str]) -> None:
    for _ in range(rounds):
        number = draw.randrange(_UNITS)
        contract, payload = _unit(number)
        lease = Lease.of(10.0)
        pinned = await store.pin(contract.key, lease) if draw.random() < 0.5 else None
        sealed = await store.get(contract.key, None if pinned is None else pinned.place)
        if sealed is None:
            counts["missed"] += 1
            counts["lost"] += pinned is not None
        else:
            opened = open_entry(sealed, contract, _SECRET)
            right = isinstance(opened, torch.Tensor) and torch.equal(opened, payload)
            counts["right" if right else "wrong"] += 1
        await store.release(contract.key, lease.id)


async def _die(path: str, seed: int) -> None:
    step = ("copying", "reserved", "publishing", "locked")[seed % 4]
    store = ArenaStore(Region.open(path), step=at(step, dies(signal.SIGKILL)))
    await _write(store, 100, random.Random(seed), Counter())


def _forked(path: str, name: str, rounds: int, seed: int, out: int) -> int:
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    if name == "die":
        asyncio.run(_die(path, seed))
        os._exit(1)
    counts: Counter[str] = Counter()
    store = ArenaStore(Region.open(path), patience=30.0)
    work = _write if name == "write" else _read
    asyncio.run(work(store, rounds, random.Random(seed), counts))
    counts["evicted"] += store.stats().evictions
    os.write(out, json.dumps(counts).encode() + b"\n")
    os._exit(0)


def main() -> None:
    path, rounds = sys.argv[1], int(sys.argv[2])
    read, write = os.pipe()
    children = [
        _forked(path, name, rounds, seed, write) for seed, name in enumerate(("write", "write", "read", "read"))
    ]
    killed = 0
    for seed in range(20):
        _, status = os.waitpid(_forked(path, "die", 0, 100 + seed, write), 0)
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    os.close(write)
    total: Counter[str] = Counter({"killed": killed, "failed": failed})
    with os.fdopen(read) as lines:
        for line in lines:
            total.update(json.loads(line))
    sys.stdout.write(json.dumps(total))


if __name__ == "__main__":
    main()
