"""The store in memory: a budget, the least recently used first, pins that end by themselves."""

from __future__ import annotations

import pytest

from chiasm.cache.entry import Sealed
from chiasm.cache.memory import MemoryStore
from chiasm.cache.store import Lease
from chiasm.errors import Overloaded


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(300, clock=clock)


def entry(size: int, fill: int = 0) -> Sealed:
    """Any bytes: a store understands none of them. `size` is what it is charged."""
    return Sealed(bytes(10), memoryview(bytes([fill]) * (size - 30)), bytes(20))


async def held(store: MemoryStore, names: str) -> str:
    """Which of the keys are there. Asking is a use: they are asked in order."""
    return "".join([name for name in names if await store.get(name.encode()) is not None])


async def test_what_was_put_is_got_and_what_was_not_is_none(store: MemoryStore) -> None:
    put = entry(100, 7)
    await store.put(put, b"a")
    assert await store.get(b"a") is put
    assert await store.get(b"b") is None
    stats = store.stats()
    assert (stats.puts, stats.hits, stats.misses, stats.entries, stats.bytes) == (1, 1, 1, 1, 100)


async def test_the_least_recently_used_goes_first(store: MemoryStore) -> None:
    for name in (b"a", b"b", b"c"):
        await store.put(entry(100), name)
    assert await store.get(b"a") is not None
    await store.put(entry(100), b"d")
    assert await held(store, "abcd") == "acd"
    await store.put(entry(200), b"e")
    assert await held(store, "acde") == "de"
    assert store.stats().evictions == 3
    assert store.stats().bytes == 300


async def test_a_pinned_entry_stays_until_its_lease_ends(store: MemoryStore, clock: Clock) -> None:
    await store.put(entry(200), b"a", lease=Lease.of(5.0))
    await store.put(entry(100), b"b")
    await store.put(entry(100), b"c")
    assert await held(store, "abc") == "ac"
    clock.now += 5.0
    await store.put(entry(300), b"d")
    assert await held(store, "acd") == "d"


async def test_what_does_not_fit_beside_the_pinned_is_refused_and_takes_nothing(store: MemoryStore) -> None:
    await store.put(entry(150), b"a", lease=Lease.of(5.0))
    await store.put(entry(100), b"b")
    with pytest.raises(Overloaded) as caught:
        await store.put(entry(200), b"c")
    assert caught.value.reason == "CACHE_FULL"
    assert caught.value.retryable
    assert await held(store, "abc") == "ab"
    stats = store.stats()
    assert (stats.refusals, stats.evictions, stats.pinned_bytes, stats.budget) == (1, 0, 150, 300)


async def test_what_can_never_fit_is_refused_for_good(store: MemoryStore) -> None:
    with pytest.raises(Overloaded) as caught:
        await store.put(entry(301), b"a")
    assert not caught.value.retryable
    assert caught.value.facts == {"needed": 301, "budget": 300}
    await store.put(entry(300), b"a")


async def test_every_reader_pins_for_itself_and_releases_for_itself(store: MemoryStore, clock: Clock) -> None:
    short, long = Lease.of(2.0), Lease.of(10.0)
    await store.put(entry(300), b"a", lease=long)
    await store.get(b"a", lease=short)
    await store.release(b"a", short.id)
    clock.now += 3.0
    assert store.stats().pinned_bytes == 300, "the other's lease still holds"
    await store.release(b"a", long.id)
    assert store.stats().pinned_bytes == 0
    await store.put(entry(300), b"b")
    assert await held(store, "ab") == "b"


async def test_a_release_too_many_is_nothing(store: MemoryStore) -> None:
    mine, other = Lease.of(5.0), Lease.of(5.0)
    await store.release(b"a", mine.id)
    await store.put(entry(100), b"a", lease=other)
    for _ in range(3):
        await store.release(b"a", mine.id)
    assert store.stats().pinned_bytes == 100
    for _ in range(2):
        await store.release(b"a", other.id)
    assert store.stats().pinned_bytes == 0
    assert await held(store, "a") == "a"


async def test_a_release_that_comes_late_unpins_nobody_else(store: MemoryStore, clock: Clock) -> None:
    mine = Lease.of(1.0)
    await store.put(entry(300), b"a", lease=mine)
    clock.now += 2.0
    await store.get(b"a", lease=Lease.of(60.0))
    await store.release(b"a", mine.id)
    assert store.stats().pinned_bytes == 300


async def test_a_pin_taken_again_under_its_name_lasts_from_then_on(store: MemoryStore, clock: Clock) -> None:
    mine = Lease.of(5.0)
    await store.put(entry(300), b"a", lease=mine)
    clock.now += 4.0
    await store.get(b"a", lease=mine)
    clock.now += 4.0
    assert store.stats().pinned_bytes == 300
    await store.release(b"a", mine.id)
    assert store.stats().pinned_bytes == 0, "one name is one pin"


async def test_an_entry_put_again_replaces_the_old_and_keeps_its_pins(store: MemoryStore, clock: Clock) -> None:
    await store.put(entry(250, 1), b"a", lease=Lease.of(5.0))
    again = entry(280, 2)
    await store.put(again, b"a")
    assert await store.get(b"a") is again
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.pinned_bytes) == (1, 280, 280)
    clock.now += 5.0
    assert store.stats().pinned_bytes == 0


async def test_a_replacement_that_does_not_fit_leaves_the_old_one(store: MemoryStore) -> None:
    old = entry(100)
    await store.put(old, b"a")
    await store.put(entry(150), b"b", lease=Lease.of(9.0))
    with pytest.raises(Overloaded):
        await store.put(entry(200), b"a")
    assert await store.get(b"a") is old


async def test_what_is_wrong_is_discarded_even_if_pinned(store: MemoryStore) -> None:
    await store.put(entry(300), b"a", lease=Lease.of(60.0))
    await store.discard(b"a")
    await store.discard(b"a")
    assert await store.get(b"a") is None
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.pinned_bytes) == (0, 0, 0)


async def test_a_flush_forgets_all_that_is_not_pinned(store: MemoryStore, clock: Clock) -> None:
    for name, lease in ((b"a", None), (b"b", Lease.of(5.0)), (b"c", None)):
        await store.put(entry(100), name, lease=lease)
    await store.flush()
    assert await held(store, "abc") == "b"
    clock.now += 6.0
    await store.flush()
    assert await held(store, "abc") == ""
    assert store.stats().bytes == 0
