"""What every store does, over the store in memory, the arena, and the arena in front of a shared store that is gone: a
budget, the least recently used first, pins that end by themselves, a share for every owner, an age at which an entry is
not served any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from chiasm.cache import wire
from chiasm.cache.arena import ArenaStore
from chiasm.cache.memory import MemoryStore
from chiasm.cache.place import Elsewhere, InArena, InMemory
from chiasm.cache.store import EntryStore, Lease
from chiasm.cache.tiers import TieredStore
from chiasm.errors import Overloaded
from chiasm.rpc.v1 import common_pb2 as pb
from tests.cache.arenas import KIB, entry, key, same, small_region
from tests.cache.test_entry import contract
from tests.redis_server import store_at


class Clock:
    """Seconds that pass when told to, and a microsecond each time it is looked at."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Make(Protocol):
    """Makes a store of 300 KiB."""

    def __call__(self, *, owner_budget: int | None = None, ttl: float | None = None) -> EntryStore: ...


@contextmanager
def making(kind: str, clock: Clock, folder: Path) -> Iterator[Make]:
    """How stores of a kind are made."""
    with closing(small_region(folder / "arena", 300 * KIB)) as region:

        def make(*, owner_budget: int | None = None, ttl: float | None = None) -> EntryStore:
            if kind == "memory":
                return MemoryStore(300 * KIB, clock=clock, owner_budget=owner_budget, ttl=ttl)
            near = ArenaStore(region, clock=clock, owner_budget=owner_budget, ttl=ttl)
            return near if kind == "arena" else TieredStore(near, store_at("unix:///nowhere/socket", pause=3600.0))

        yield make


@pytest.fixture(params=["memory", "arena", "tiers"])
def make(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[Make]:
    """Of each kind."""
    with making(request.param, clock, tmp_path) as make:
        yield make


@pytest.fixture(params=["memory", "arena"])
def one_place(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[EntryStore]:
    """One in which an entry lies where it was put or nowhere."""
    with making(request.param, clock, tmp_path) as make:
        yield make()


@pytest.fixture
def store(make: Make) -> EntryStore:
    return make()


async def held(store: EntryStore, names: str) -> str:
    """Which of the keys are there. Asking is a use: they are asked in order."""
    return "".join([name for name in names if await store.get(key(name)) is not None])


async def test_what_was_put_is_got_and_what_was_not_is_none(store: EntryStore) -> None:
    put = entry(100 * KIB, 7)
    await store.put(put, key("a"))
    assert same(await store.get(key("a")), put)
    assert await store.get(key("b")) is None
    stats = store.stats()
    assert (stats.puts, stats.hits, stats.misses, stats.entries, stats.bytes) == (1, 1, 1, 1, 100 * KIB)


async def test_an_entry_is_got_where_it_was_put_and_nowhere_else(one_place: EntryStore) -> None:
    store = one_place
    put = entry(100 * KIB, 7)
    place = await store.put(put, key("a"))
    await store.put(entry(100 * KIB, 8), key("b"))
    assert same(await store.get(key("a"), place), put)
    assert await store.get(key("a"), Elsewhere()) is None
    other = InMemory() if isinstance(place, InArena) else InArena(bytes(16), 4096, 1 << 16)
    assert await store.get(key("a"), other) is None
    assert await store.get(key("c"), place) is None, "a place is not believed against the key"
    stats = store.stats()
    assert (stats.hits, stats.misses) == (1, 3)


async def test_a_place_is_the_same_after_the_wire(store: EntryStore) -> None:
    put = entry(100 * KIB, 7)
    place = await store.put(put, key("a"))
    told = pb.Entry.FromString(wire.announce(contract(), place).SerializeToString())
    assert told.WhichOneof("place") == ("arena" if isinstance(place, InArena) else "memory")
    assert wire.place_of(told) == place
    assert same(await store.get(key("a"), wire.place_of(told)), put)


async def test_a_place_of_a_kind_that_is_not_known_is_a_miss(one_place: EntryStore) -> None:
    store = one_place
    await store.put(entry(100 * KIB), key("a"))
    told = wire.announce(contract(), InMemory())
    told.redis.write_id = bytes(16)
    assert await store.get(key("a"), wire.place_of(told)) is None
    told.ClearField("redis")
    assert await store.get(key("a"), wire.place_of(told)) is None


async def test_the_least_recently_used_goes_first(store: EntryStore) -> None:
    for name in "abc":
        await store.put(entry(100 * KIB), key(name))
    assert await held(store, "a") == "a"
    await store.put(entry(200 * KIB), key("d"))
    assert await held(store, "abcd") == "ad"
    await store.put(entry(100 * KIB), key("e"))
    assert await held(store, "ade") == "de"
    assert store.stats().evictions == 3
    assert store.stats().bytes == 300 * KIB


async def test_a_pin_is_a_use_too(store: EntryStore) -> None:
    for name in "abc":
        await store.put(entry(100 * KIB), key(name))
    lease = Lease.of(5.0)
    assert await store.pin(key("a"), lease) is not None
    await store.release(key("a"), lease.id)
    await store.put(entry(100 * KIB), key("d"))
    assert await held(store, "abcd") == "acd"


async def test_a_pinned_entry_stays_until_its_lease_ends(store: EntryStore, clock: Clock) -> None:
    await store.put(entry(200 * KIB), key("a"), lease=Lease.of(5.0))
    await store.put(entry(100 * KIB), key("b"))
    await store.put(entry(100 * KIB), key("c"))
    assert await held(store, "abc") == "ac"
    clock.now += 5.0
    await store.put(entry(300 * KIB), key("d"))
    assert await held(store, "acd") == "d"


async def test_a_pin_tells_header_and_place_and_a_pin_of_nothing_is_none(store: EntryStore) -> None:
    put = entry(100 * KIB, 7)
    place = await store.put(put, key("a"))
    pinned = await store.pin(key("a"), Lease.of(5.0))
    assert pinned is not None and (pinned.header, pinned.place) == (put.header, place)
    assert await store.pin(key("b"), Lease.of(5.0)) is None
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.pinned_bytes) == (1, 1, 100 * KIB)


async def test_what_does_not_fit_beside_the_pinned_is_refused_and_takes_nothing(store: EntryStore) -> None:
    await store.put(entry(150 * KIB), key("a"), lease=Lease.of(5.0))
    await store.put(entry(100 * KIB), key("b"))
    with pytest.raises(Overloaded) as caught:
        await store.put(entry(200 * KIB), key("c"), lease=Lease.of(5.0))
    assert caught.value.reason == "CACHE_FULL"
    assert caught.value.retryable
    assert await held(store, "abc") == "ab"
    stats = store.stats()
    assert (stats.refusals, stats.evictions, stats.pinned_bytes, stats.budget) == (1, 0, 150 * KIB, 300 * KIB)


async def test_what_can_never_fit_is_refused_for_good(store: EntryStore) -> None:
    with pytest.raises(Overloaded) as caught:
        await store.put(entry(301 * KIB), key("a"))
    assert not caught.value.retryable
    assert caught.value.facts == {"needed": 301 * KIB, "budget": 300 * KIB}
    await store.put(entry(300 * KIB), key("a"))


async def test_every_reader_pins_for_itself_and_releases_for_itself(store: EntryStore, clock: Clock) -> None:
    short, long = Lease.of(2.0), Lease.of(10.0)
    await store.put(entry(300 * KIB), key("a"), lease=long)
    await store.pin(key("a"), short)
    await store.release(key("a"), short.id)
    clock.now += 3.0
    assert store.stats().pinned_bytes == 300 * KIB, "the other's lease still holds"
    await store.release(key("a"), long.id)
    assert store.stats().pinned_bytes == 0
    await store.put(entry(300 * KIB), key("b"))
    assert await held(store, "ab") == "b"


async def test_a_release_too_many_is_nothing(store: EntryStore) -> None:
    mine, other = Lease.of(5.0), Lease.of(5.0)
    await store.release(key("a"), mine.id)
    await store.put(entry(100 * KIB), key("a"), lease=other)
    await store.put(entry(100 * KIB), key("b"))
    for _ in range(3):
        await store.release(key("a"), mine.id)
    await store.release(key("b"), other.id)
    await store.release(b"no key", other.id)
    await store.release(key("a"), b"")
    assert store.stats().pinned_bytes == 100 * KIB
    for _ in range(2):
        await store.release(key("a"), other.id)
    assert store.stats().pinned_bytes == 0
    assert await held(store, "a") == "a"


async def test_a_release_that_comes_late_unpins_nobody_else(store: EntryStore, clock: Clock) -> None:
    mine = Lease.of(1.0)
    await store.put(entry(300 * KIB), key("a"), lease=mine)
    clock.now += 2.0
    await store.pin(key("a"), Lease.of(60.0))
    await store.release(key("a"), mine.id)
    assert store.stats().pinned_bytes == 300 * KIB


async def test_a_pin_taken_again_under_its_name_lasts_from_then_on(store: EntryStore, clock: Clock) -> None:
    mine = Lease.of(5.0)
    await store.put(entry(300 * KIB), key("a"), lease=mine)
    clock.now += 4.0
    await store.pin(key("a"), mine)
    clock.now += 4.0
    assert store.stats().pinned_bytes == 300 * KIB
    await store.release(key("a"), mine.id)
    assert store.stats().pinned_bytes == 0, "one name is one pin"


async def test_an_entry_put_again_replaces_the_old_and_keeps_its_pins(store: EntryStore, clock: Clock) -> None:
    await store.put(entry(100 * KIB, 1), key("a"), lease=Lease.of(5.0))
    again = entry(180 * KIB, 2)
    await store.put(again, key("a"))
    assert same(await store.get(key("a")), again)
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.pinned_bytes, stats.evictions) == (1, 180 * KIB, 180 * KIB, 0)
    clock.now += 5.0
    assert store.stats().pinned_bytes == 0


async def test_what_is_replaced_makes_room_before_anything_else_does(store: EntryStore) -> None:
    await store.put(entry(50 * KIB, 1), key("b"))
    await store.put(entry(200 * KIB, 1), key("a"))
    again = entry(230 * KIB, 2)
    await store.put(again, key("a"))
    assert same(await store.get(key("a")), again)
    assert await held(store, "b") == "b"
    assert store.stats().evictions == 0


async def test_what_is_pinned_is_not_given_up_for_its_own_successor(store: EntryStore) -> None:
    """A writer that dies on the way would lose what somebody was promised."""
    lease = Lease.of(5.0)
    old = entry(200 * KIB, 1)
    await store.put(old, key("a"), lease=lease)
    with pytest.raises(Overloaded) as caught:
        await store.put(entry(200 * KIB, 2), key("a"))
    assert caught.value.retryable
    assert same(await store.get(key("a")), old)
    await store.release(key("a"), lease.id)
    await store.put(entry(200 * KIB, 2), key("a"))
    assert same(await store.get(key("a")), entry(200 * KIB, 2))


async def test_a_replacement_that_does_not_fit_leaves_the_old_one(store: EntryStore) -> None:
    old = entry(100 * KIB, 1)
    await store.put(old, key("a"))
    await store.put(entry(150 * KIB), key("b"), lease=Lease.of(9.0))
    with pytest.raises(Overloaded):
        await store.put(entry(200 * KIB), key("a"))
    assert same(await store.get(key("a")), old)


async def test_what_is_wrong_is_discarded_even_if_pinned(store: EntryStore) -> None:
    lease = Lease.of(60.0)
    place = await store.put(entry(300 * KIB), key("a"), lease=lease)
    await store.discard(key("a"))
    await store.discard(key("a"))
    assert await store.get(key("a")) is None
    assert await store.get(key("a"), place) is None
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.pinned_bytes) == (0, 0, 0)
    await store.put(entry(300 * KIB), key("b"))
    await store.release(key("a"), lease.id)
    assert store.stats().entries == 1


async def test_a_flush_forgets_all_that_is_not_pinned(one_place: EntryStore, clock: Clock) -> None:
    store = one_place
    for name, lease in (("a", None), ("b", Lease.of(5.0)), ("c", None)):
        await store.put(entry(100 * KIB), key(name), lease=lease)
    await store.flush()
    assert await held(store, "abc") == "b"
    clock.now += 6.0
    await store.flush()
    assert await held(store, "abc") == ""
    assert store.stats().bytes == 0


ALICE, BOB = b"alice...", b"bob....."


async def test_an_owner_at_its_budget_evicts_its_own_oldest_and_nobody_elses(make: Make) -> None:
    store = make(owner_budget=200 * KIB)
    await store.put(entry(50 * KIB), key("a"), owner=BOB)
    for name in "bcde":
        await store.put(entry(90 * KIB), key(name), owner=ALICE)
    assert await held(store, "abcde") == "ade", "what is left of the store was not hers"
    await store.put(entry(50 * KIB), key("f"), owner=BOB)
    assert await held(store, "adef") == "adef"
    assert store.stats().evictions == 2


async def test_an_owner_whose_budget_is_pinned_is_refused_for_now_and_others_are_served(
    make: Make, clock: Clock
) -> None:
    store = make(owner_budget=200 * KIB)
    await store.put(entry(150 * KIB), key("a"), owner=ALICE, lease=Lease.of(5.0))
    with pytest.raises(Overloaded) as caught:
        await store.put(entry(100 * KIB), key("b"), owner=ALICE)
    assert (caught.value.reason, caught.value.retryable) == ("CACHE_FULL", True)
    assert caught.value.facts == {"needed": 100 * KIB, "budget": 200 * KIB}
    with pytest.raises(Overloaded) as never:
        await store.put(entry(201 * KIB), key("b"), owner=ALICE)
    assert not never.value.retryable
    await store.put(entry(50 * KIB), key("c"), owner=ALICE)
    await store.put(entry(100 * KIB), key("d"), owner=BOB)
    assert await held(store, "abcd") == "acd"
    clock.now += 5.0
    await store.put(entry(100 * KIB), key("b"), owner=ALICE)
    assert await held(store, "abcd") == "bcd"


async def test_the_room_of_an_entry_that_is_replaced_counts_for_its_owner(make: Make) -> None:
    store = make(owner_budget=200 * KIB)
    await store.put(entry(80 * KIB, 1), key("b"), owner=ALICE)
    await store.put(entry(100 * KIB, 1), key("a"), owner=ALICE)
    again = entry(120 * KIB, 2)
    await store.put(again, key("a"), owner=ALICE)
    assert same(await store.get(key("a")), again)
    assert await held(store, "ab") == "ab"
    assert store.stats().evictions == 0


async def test_what_is_charged_to_nobody_may_fill_the_store(make: Make) -> None:
    store = make(owner_budget=100 * KIB)
    await store.put(entry(300 * KIB), key("a"))
    assert await held(store, "a") == "a"
    await store.put(entry(100 * KIB), key("b"), owner=ALICE)
    assert await held(store, "ab") == "b", "without a budget of its own it has no claim either"


async def test_an_entry_that_nobody_has_used_for_its_time_is_not_served(make: Make, clock: Clock) -> None:
    store = make(ttl=60.0)
    place = await store.put(entry(100 * KIB), key("a"))
    await store.put(entry(100 * KIB), key("b"))
    clock.now += 50.0
    assert await held(store, "b") == "b"
    clock.now += 50.0
    assert await store.get(key("a"), place) is None
    assert await store.pin(key("a"), Lease.of(1.0)) is None
    assert await held(store, "ab") == "b"
    stats = store.stats()
    assert (stats.hits, stats.misses) == (2, 3)
    again = entry(100 * KIB, 2)
    await store.put(again, key("a"))
    assert same(await store.get(key("a")), again)


async def test_an_entry_is_served_for_as_long_as_somebody_has_it_pinned(make: Make, clock: Clock) -> None:
    store = make(ttl=60.0)
    lease = Lease.of(200.0)
    place = await store.put(entry(100 * KIB), key("a"), lease=lease)
    clock.now += 190.0
    assert await store.get(key("a"), place) is not None
    clock.now += 61.0
    assert await store.get(key("a"), place) is None


async def test_what_has_outlived_its_time_goes_before_what_has_not(make: Make, clock: Clock) -> None:
    store = make(ttl=60.0)
    for name in "abc":
        await store.put(entry(100 * KIB), key(name))
    clock.now += 61.0
    await store.put(entry(100 * KIB), key("d"))
    await store.put(entry(200 * KIB), key("e"))
    assert await held(store, "abcde") == "de"


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 200 * KIB])
async def test_every_size_comes_back_byte_for_byte(store: EntryStore, size: int) -> None:
    put = entry(30 + size, 9)
    await store.put(entry(1000, 1), key("before"))
    await store.put(put, key("a"))
    await store.put(entry(1000, 2), key("after"))
    assert same(await store.get(key("a")), put)
    assert same(await store.get(key("before")), entry(1000, 1))
    assert same(await store.get(key("after")), entry(1000, 2))
