"""Whatever is written over a region, an entry is right or it is a miss, and nobody breaks over it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiasm.cache.arena import ArenaStore
from chiasm.cache.entry import Contract, open_entry, seal
from chiasm.cache.ledger import Ledger
from chiasm.cache.region import Region
from chiasm.cache.store import Lease
from chiasm.errors import Overloaded
from tests.cache.arenas import KIB, key, small_region
from tests.cache.test_entry import SECRET, contract

UNITS = 6

slow = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Region]:
    region = small_region(tmp_path_factory.mktemp("arena") / "arena", 128 * KIB)
    yield region
    region.close()


def unit(number: int) -> tuple[Contract, torch.Tensor]:
    """Of 16 KiB; the payload says which."""
    made = contract(key=key(f"{number}"), shape=(2, 2, 2, 16, 32))
    return made, torch.full(made.shape, float(number))


async def put(store: ArenaStore, number: int, lease: Lease | None = None) -> None:
    made, payload = unit(number)
    await store.put(seal(made, payload, SECRET), made.key, lease=lease)


async def right_or_missed(store: ArenaStore, number: int) -> None:
    made, payload = unit(number)
    sealed = await store.get(made.key)
    opened = None if sealed is None else open_entry(sealed, made, SECRET)
    assert not isinstance(opened, torch.Tensor) or torch.equal(opened, payload)


async def everything(store: ArenaStore) -> None:
    """One call of each kind, refused or not."""
    for number in range(UNITS + 2):
        lease = Lease.of(0.0)
        with suppress(Overloaded):
            await store.pin(key(f"{number}"), lease)
        with suppress(Overloaded):
            await put(store, number, lease)
        await right_or_missed(store, number)
        await store.release(key(f"{number}"), lease.id)
        store.stats()
        store.totals()
    await store.discard(key("0"))
    await store.flush()


@slow
@given(st.data())
def test_a_ledger_that_is_written_over_anywhere_breaks_nobody_and_nothing_wrong_is_read(
    region: Region, data: st.DataObject
) -> None:
    region.body[:] = bytes(region.body.nbytes)
    asyncio.run(damaged(region, data))


async def damaged(region: Region, data: st.DataObject) -> None:
    store = ArenaStore(region)
    ledger = Ledger(region.body)
    for number in range(UNITS):
        await put(store, number, Lease.of(60) if number % 3 == 0 else None)
    columns = st.integers(0, ledger.offset // 64 - 1)
    lines = data.draw(st.lists(st.tuples(columns, st.binary(min_size=1, max_size=64)), min_size=1, max_size=200))
    # Most of a ledger this size is for records that were never used: the first lines of its columns are hit too.
    firsts = [at for at in range(0, ledger.offset, 64) if any(region.body[at : at + 64])]
    for at, noise in data.draw(st.lists(st.tuples(st.sampled_from(firsts), st.binary(min_size=1, max_size=64)))):
        region.body[at : at + len(noise)] = noise
    for line, noise in lines:
        region.body[64 * line : 64 * line + len(noise)] = noise
    await everything(store)
    await everything(ArenaStore(region))
