"""Entries that get their tag while they are put: the same bytes and the same tag as if sealed before, in every store,
and nothing of one that must not be published."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import blake3
import numpy as np
import pytest
import torch
from torch import Tensor

from chiasm.cache.arena import ArenaStore
from chiasm.cache.entry import HEADER_BYTES, Contract, open_entry, seal, sealing
from chiasm.cache.form import Form
from chiasm.cache.memory import MemoryStore
from chiasm.cache.redis import RedisStore
from chiasm.cache.sealing import PIECE
from chiasm.cache.store import EntryStore, Lease
from chiasm.cache.tiers import TieredStore, WritePolicy
from chiasm.errors import Overloaded, ServerError
from tests.cache.arenas import entry, small_region
from tests.cache.test_entry import SECRET, contract
from tests.redis_server import RedisServer, redis_server, store_at

MIB = 1 << 20
SMALLER, LARGER = 100, 10_000
"""Tokens of an entry of 100 KiB, which is copied at once, and of one of 10 MiB, which goes to a thread."""


def made_of(tokens: int) -> Contract:
    """Of 1 KiB a token, in float32."""
    return contract(form=Form.STATES, shape=(tokens, 256))


def numbers(contract: Contract) -> Tensor:
    return torch.randn(contract.shape, generator=torch.Generator().manual_seed(3)).to(contract.dtype)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(params=["memory", "arena", "redis", "behind"])
async def store(request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path) -> AsyncIterator[EntryStore]:
    """Of each kind, of 15 MiB where it has a size."""
    server.admin.flushall()
    if request.param == "memory":
        yield MemoryStore(15 * MIB)
        return
    with closing(small_region(tmp_path / "arena", 15 * MIB)) as region:
        if request.param == "arena":
            yield ArenaStore(region)
        elif request.param == "redis":
            far = store_at(server)
            yield far
            await far.close()
        else:
            near = ArenaStore(region)
            tiers = TieredStore(near, store_at(server), policy=WritePolicy.BEHIND, behind_bytes=64 * MIB)
            yield tiers
            await tiers.aclose()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("over", [-1, 0, 1, 1000])
@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_the_tag_made_while_copying_is_that_of_header_and_payload(dtype: torch.dtype, pieces: int, over: int) -> None:
    count = max(1, (pieces * PIECE - HEADER_BYTES) // dtype.itemsize + over)
    made = contract(form=Form.STATES, dtype=dtype, shape=(count, 1))
    payload = numbers(made)
    place = np.zeros(made.payload_bytes, np.uint8)
    tag = sealing(made, payload, SECRET).copy_into(place)
    plain = payload.view(-1).view(torch.uint8).numpy()
    assert np.array_equal(place, plain)
    assert tag == blake3.blake3(made.pack() + plain.tobytes(), key=SECRET).digest()
    assert tag == seal(made, payload, SECRET).tag


def test_a_second_copy_is_the_first_one_again() -> None:
    made = made_of(LARGER)
    once = sealing(made, numbers(made), SECRET)
    places = np.zeros((2, made.payload_bytes), np.uint8)
    assert once.copy_into(places[0]) == once.copy_into(places[1]) == once.seal().tag
    assert np.array_equal(places[0], places[1])


@pytest.mark.parametrize("tokens", [SMALLER, LARGER])
async def test_what_is_sealed_while_it_is_put_is_opened_bit_by_bit_wherever_it_was_put(
    store: EntryStore, tokens: int
) -> None:
    made = made_of(tokens)
    await store.put(sealing(made, numbers(made), SECRET), made.key)
    found = [await store.get(made.key)]
    if isinstance(store, TieredStore):
        await store.behind.settled()
        found.append(await store.far.get(made.key))
    for sealed in found:
        assert sealed is not None
        opened = open_entry(sealed, made, SECRET)
        assert isinstance(opened, Tensor) and torch.equal(opened, numbers(made))


@pytest.mark.parametrize("tokens", [SMALLER, LARGER])
@pytest.mark.parametrize("at", [0, -1])
async def test_what_turns_out_not_to_be_finite_is_nowhere_and_takes_no_room(
    store: EntryStore, tokens: int, at: int
) -> None:
    made = made_of(tokens)
    spoiled = numbers(made)
    spoiled.view(-1)[at] = math.nan
    with pytest.raises(ServerError) as caught:
        await store.put(sealing(made, spoiled, SECRET), made.key, lease=Lease.of(60.0), shared=True)
    assert caught.value.reason == "NONFINITE"
    if isinstance(store, TieredStore):
        await store.behind.settled()
        assert store.behind.bytes == 0 and await store.far.get(made.key) is None
    assert await store.get(made.key) is None
    assert await store.pin(made.key, Lease.of(60.0)) is None
    assert store.stats().bytes == store.stats().pinned_bytes == 0
    if not isinstance(store, RedisStore):
        await store.put(entry(15 * MIB), bytes(32))


async def test_what_turns_out_not_to_be_finite_replaces_nothing(store: EntryStore) -> None:
    made = made_of(SMALLER)
    await store.put(sealing(made, numbers(made), SECRET), made.key)
    with pytest.raises(ServerError):
        await store.put(sealing(made, numbers(made).fill_(math.inf), SECRET), made.key)
    sealed = await store.get(made.key)
    assert sealed is not None and isinstance(open_entry(sealed, made, SECRET), Tensor)


@pytest.mark.parametrize("kind", ["memory", "arena"])
async def test_what_found_no_room_is_put_once_there_is_some(kind: str, tmp_path: Path) -> None:
    with closing(small_region(tmp_path / "arena", 15 * MIB)) as region:
        store: EntryStore = MemoryStore(15 * MIB) if kind == "memory" else ArenaStore(region)
        made, lease = made_of(LARGER), Lease.of(60.0)
        await store.put(entry(15 * MIB), bytes(32), lease=lease)
        waiting = sealing(made, numbers(made), SECRET)
        for _ in range(2):
            with pytest.raises(Overloaded):
                await store.put(waiting, made.key)
        await store.release(bytes(32), lease.id)
        await store.put(waiting, made.key)
        sealed = await store.get(made.key)
        assert sealed is not None and isinstance(open_entry(sealed, made, SECRET), Tensor)


async def test_a_full_node_is_no_hindrance_to_sealing_what_is_shared(server: RedisServer) -> None:
    server.admin.flushall()
    made = made_of(LARGER)
    tiers = TieredStore(MemoryStore(MIB), store_at(server))
    try:
        await tiers.put(sealing(made, numbers(made), SECRET), made.key, shared=True)
        sealed = await tiers.far.get(made.key)
        assert sealed is not None and isinstance(open_entry(sealed, made, SECRET), Tensor)
    finally:
        await tiers.aclose()
