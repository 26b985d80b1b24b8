"""Two tiers as one store: near first, far as well, and nothing that befalls the far one is anybody's fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from chiasm.cache.behind import Behind
from chiasm.cache.memory import MemoryStore
from chiasm.cache.place import Elsewhere, InArena, InMemory, InRedis
from chiasm.cache.store import Lease, Pinned
from chiasm.cache.tiers import TieredStore, WritePolicy
from chiasm.errors import Overloaded
from tests.cache.arenas import KIB, entry, key, same
from tests.redis_server import RedisServer, redis_server, store_at


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    """Empty."""
    running.admin.flushall()
    return running


@asynccontextmanager
async def tiers(
    server: RedisServer | str,
    *,
    budget: int = 300 * KIB,
    policy: WritePolicy = WritePolicy.THROUGH,
    behind_bytes: int = 1 << 20,
    step: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> AsyncIterator[TieredStore]:
    far = store_at(server, step=step, **options)
    made = TieredStore(MemoryStore(budget), far, policy=policy, behind_bytes=behind_bytes, near_name="memory")
    try:
        yield made
    finally:
        await made.aclose()


async def test_an_entry_is_announced_near_and_is_far_as_well(server: RedisServer) -> None:
    put = entry(100 * KIB, 7)
    async with tiers(server) as one, tiers(server) as other:
        assert isinstance(await one.put(put, key("a")), InMemory)
        assert same(await other.get(key("a")), put)
        assert {name: (held.puts, held.hits) for name, held in one.tiers().items()} == {
            "memory": (1, 0),
            "redis": (1, 0),
        }


async def test_behind_an_entry_is_far_a_little_later(server: RedisServer) -> None:
    async with tiers(server, policy=WritePolicy.BEHIND) as made:
        await made.put(entry(100 * KIB), key("a"))
        assert server.names("*") == []
        assert made.behind.bytes == 100 * KIB
        await made.behind.settled()
        assert len(server.names("*")) == 2
        assert made.behind.bytes == 0


async def test_what_is_to_be_shared_is_far_when_its_put_returns_and_is_announced_there(server: RedisServer) -> None:
    put = entry(100 * KIB, 7)
    async with tiers(server, policy=WritePolicy.BEHIND) as one, tiers(server) as other:
        place = await one.put(put, key("a"), lease=Lease.of(60.0), shared=True)
        assert isinstance(place, InRedis)
        assert same(await other.get(key("a"), place), put)
        near = one.near.stats()
        assert (near.entries, near.pinned_bytes) == (1, 0), "whoever reads it there cannot unpin it here"


async def test_what_is_near_only_is_written_far_when_it_is_pinned_to_be_shared(server: RedisServer) -> None:
    put = entry(100 * KIB, 7)
    async with tiers(server) as one, tiers(server) as other:
        await one.near.put(put, key("a"))
        pinned = await one.pin(key("a"), Lease.of(60.0), shared=True)
        assert pinned is not None and isinstance(pinned.place, InRedis) and pinned.header == put.header
        assert same(await other.get(key("a"), pinned.place), put)
        assert one.near.stats().pinned_bytes == 0
        assert await one.pin(key("b"), Lease.of(60.0), shared=True) is None


async def test_what_waits_to_be_written_is_bounded_and_the_rest_is_dropped_and_counted(server: RedisServer) -> None:
    async with tiers(server, policy=WritePolicy.BEHIND, behind_bytes=250 * KIB) as made:
        for name in "abc":
            await made.put(entry(100 * KIB), key(name))
        assert (made.behind.bytes, made.behind.dropped) == (200 * KIB, 1)
        await made.behind.settled()
        assert made.far.stats().puts == 2
        assert same(await made.get(key("c")), entry(100 * KIB)), "it is near all the same"


async def test_what_was_discarded_is_not_written_behind_any_more(server: RedisServer) -> None:
    async with tiers(server, policy=WritePolicy.BEHIND) as made:
        await made.put(entry(100 * KIB), key("a"))
        await made.discard(key("a"))
        await made.behind.settled()
        assert server.names("*") == []
        assert await made.get(key("a")) is None


async def test_a_full_node_is_no_hindrance_to_what_is_to_be_shared(server: RedisServer) -> None:
    put = entry(200 * KIB, 7)
    async with tiers(server) as made:
        await made.put(entry(200 * KIB), key("pinned"), lease=Lease.of(60.0))
        with pytest.raises(Overloaded):
            await made.put(put, key("a"))
        assert await made.far.get(key("a")) is None
        place = await made.put(put, key("a"), lease=Lease.of(60.0), shared=True)
        assert isinstance(place, InRedis)
        assert same(await made.get(key("a"), place), put)
        pinned = await made.pin(key("a"), Lease.of(60.0))
        assert pinned is not None and pinned.place == place
        assert made.stats().refusals == 1


async def test_without_the_far_store_everything_is_as_with_the_near_one_alone() -> None:
    put = entry(100 * KIB, 7)
    async with tiers("unix:///nowhere/socket") as made:
        for name in "abcdef":
            place = await made.put(put, key(name), lease=Lease.of(1.0) if name == "a" else None)
            assert isinstance(place, InMemory)
            assert same(await made.get(key(name), place), put)
        assert await made.get(key("g")) is None
        assert await made.pin(key("g"), Lease.of(1.0)) is None
        assert await made.claim(key("g"), 1.0)
        await made.unclaim(key("g"))
        await made.discard(key("f"))
        assert await made.get(key("f")) is None
        with pytest.raises(Overloaded):
            await made.put(entry(301 * KIB), key("g"))
        assert made.far.link.breaker.opened > 0


async def test_what_is_to_be_shared_is_refused_for_now_while_the_far_store_is_gone_and_for_good_if_it_is_too_large(
    server: RedisServer,
) -> None:
    async with tiers("unix:///nowhere/socket") as made:
        with pytest.raises(Overloaded) as caught:
            await made.put(entry(100 * KIB), key("a"), lease=Lease.of(60.0), shared=True)
        assert caught.value.reason == "SHARED_STORE" and caught.value.retryable
        assert made.near.stats().pinned_bytes == 0
        await made.near.put(entry(100 * KIB), key("b"))
        assert await made.pin(key("b"), Lease.of(60.0), shared=True) is None, "near is no use to its reader"
    async with tiers(server) as made:
        made.far._entry_bytes = 50 * KIB
        with pytest.raises(Overloaded) as caught:
            await made.put(entry(100 * KIB), key("a"), shared=True)
        assert caught.value.reason == "SHARED_STORE" and not caught.value.retryable
        assert caught.value.facts == {"needed": 100 * KIB}


async def test_a_reader_with_no_other_way_waits_until_the_far_store_answers_again(server: RedisServer) -> None:
    put = entry(100 * KIB, 7)
    async with tiers(server) as one, tiers(server) as other:
        place = await one.put(put, key("a"), shared=True)
        for _ in range(3):
            other.far.link.breaker.failed()
        assert await other.get(key("a")) is None, "who might find it elsewhere does not wait"
        assert same(await other.get(key("a"), place), put)
        assert other.far.link.breaker.closed


async def test_what_is_read_from_far_is_near_from_then_on(server: RedisServer) -> None:
    put = entry(100 * KIB, 7)
    async with tiers(server) as one, tiers(server) as other:
        await one.put(put, key("a"))
        for place in (None, InArena(b"another's region", 64, 1 << 16), InMemory()):
            assert same(await other.get(key("a"), place), put)
        held = other.tiers()
        assert (held["redis"].hits, held["memory"].entries, held["memory"].bytes) == (1, 1, 100 * KIB)
        assert await other.get(key("a"), Elsewhere()) is None


async def test_a_pin_brings_near_what_is_far_and_reads_it_once(server: RedisServer) -> None:
    put = entry(100 * KIB, 7)
    async with tiers(server) as one, tiers(server) as other:
        await one.put(put, key("a"))
        before = server.count("total_net_output_bytes")
        leases = [Lease.of(60.0) for _ in range(8)]
        pinned = await asyncio.gather(*(other.pin(key("a"), lease) for lease in leases))
        assert all(found is not None and found.header == put.header and found.place == InMemory() for found in pinned)
        assert server.count("total_net_output_bytes") - before < 200 * KIB
        assert other.stats().pinned_bytes == 100 * KIB
        for lease in leases:
            await other.release(key("a"), lease.id)
        assert other.stats().pinned_bytes == 0
        assert await other.pin(key("b"), Lease.of(1.0)) is None


async def test_those_who_read_one_entry_at_a_time_share_the_reading_and_one_may_leave(server: RedisServer) -> None:
    put = entry(100 * KIB, 7)
    async with tiers(server) as one, tiers(server) as other:
        await one.put(put, key("a"))
        reading = [asyncio.create_task(other.get(key("a"))) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        reading[0].cancel()
        found = await asyncio.gather(*reading, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert all(same(sealed, put) for sealed in found[1:] if not isinstance(sealed, BaseException))
        assert other.tiers()["redis"].hits == 1


async def test_a_full_node_reads_from_far_and_keeps_what_it_has(server: RedisServer) -> None:
    put = entry(200 * KIB, 7)
    async with tiers(server) as one, tiers(server) as other:
        await one.put(put, key("a"))
        await other.put(entry(200 * KIB, 1), key("b"), lease=Lease.of(60.0))
        assert same(await other.get(key("a")), put)
        assert other.near.stats().entries == 1


async def test_what_is_discarded_or_flushed_is_forgotten_by_both(server: RedisServer) -> None:
    async with tiers(server) as one, tiers(server) as other:
        await one.put(entry(100 * KIB), key("a"))
        await one.discard(key("a"))
        assert await one.get(key("a")) is None
        assert await other.get(key("a")) is None
        await one.put(entry(100 * KIB), key("b"), lease=Lease.of(60.0))
        await one.put(entry(100 * KIB), key("c"))
        await one.flush()
        assert await other.get(key("b")) is None
        assert await one.get(key("b")) is not None, "it is pinned"
        assert await one.get(key("c")) is None


class Held:
    """Holds the first call of a method of a far store until it is let go."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self._method = method
        self.called = asyncio.Event()
        self.free = asyncio.Event()
        self.returned = asyncio.Event()  # from one call, the first or another

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not self.called.is_set():
            self.called.set()
            await self.free.wait()
        try:
            return await self._method(*arguments, **named)
        finally:
            self.returned.set()


async def until_both_wait() -> None:
    """Whoever can go on has."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_is_discarded_while_it_is_written_behind_is_not_there_in_the_end(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiers(server, policy=WritePolicy.BEHIND) as made:
        held = Held(made.far.put)
        monkeypatch.setattr(made.far, "put", held)
        await made.put(entry(100 * KIB), key("a"))
        await held.called.wait()
        discarding = asyncio.create_task(made.discard(key("a")))
        await until_both_wait()
        held.free.set()
        await discarding
        await made.behind.settled()
        assert server.names("chiasm:entry:*") == []
        assert made.behind.bytes == 0


@pytest.mark.parametrize("shared", [False, True])
async def test_of_two_that_are_written_to_one_key_the_later_is_there_in_the_end(
    shared: bool, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = entry(100 * KIB, 1), entry(100 * KIB, 2)
    async with tiers(server, policy=WritePolicy.BEHIND) as made:
        held = Held(made.far.put)
        monkeypatch.setattr(made.far, "put", held)
        await made.put(first, key("a"))
        await held.called.wait()
        putting = asyncio.create_task(made.put(second, key("a"), shared=shared))
        other = asyncio.create_task(made.put(first, key("b")))
        await other
        await held.returned.wait()  # the other writer has nothing else to do
        held.free.set()
        await putting
        await made.behind.settled()
        assert same(await made.far.get(key("a")), second)


@pytest.mark.parametrize("while_it", ["is read", "arrives"])
@pytest.mark.parametrize("what", ["put", "discard", "flush"])
async def test_what_is_read_from_far_does_not_replace_what_happened_near_meanwhile(
    what: str, while_it: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = entry(100 * KIB, 1), entry(100 * KIB, 2)
    async with tiers(server) as one, tiers(server) as other:
        await one.put(old, key("a"))
        if while_it == "is read":
            held = Held(lambda *arguments: asyncio.sleep(0, old))
            monkeypatch.setattr(other.far, "get", held)
        else:
            held = Held(other.near.put)
            monkeypatch.setattr(other.near, "put", held)
        reading = asyncio.create_task(other.get(key("a")))
        await held.called.wait()
        happening = {"put": other.put(new, key("a")), "discard": other.discard(key("a")), "flush": other.flush()}
        doing = asyncio.ensure_future(happening.pop(what))
        for unused in happening.values():
            unused.close()
        await until_both_wait()
        held.free.set()
        await doing
        assert same(await reading, old)
        assert same(await other.near.get(key("a")), new) if what == "put" else await other.near.get(key("a")) is None


async def test_what_is_announced_far_is_not_pinned_near(server: RedisServer) -> None:
    async with tiers(server) as made:
        assert isinstance(await made.put(entry(100 * KIB), key("a"), lease=Lease.of(60.0), shared=True), InRedis)
        assert isinstance(pinned := await made.pin(key("a"), Lease.of(60.0), shared=True), Pinned)
        assert isinstance(pinned.place, InRedis)
        assert made.stats().pinned_bytes == 0
        assert await made.near.get(key("a")) is not None


async def test_a_flush_drops_what_waits_to_be_written(server: RedisServer) -> None:
    async with tiers(server, policy=WritePolicy.BEHIND) as made:
        for name in "ab":
            await made.put(entry(100 * KIB), key(name))
        await made.flush()
        await made.behind.settled()
        assert server.names("*") == []
        assert (made.behind.bytes, made.near.stats().entries) == (0, 0)


async def test_a_store_that_cannot_be_flushed_does_not_spare_the_other(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy() -> None:
        raise Overloaded("CACHE_BUSY", "another process keeps the lock", retry_after=0.1)

    async with tiers(server) as made:
        await made.put(entry(100 * KIB), key("a"))
        monkeypatch.setattr(made.near, "flush", busy)
        with pytest.raises(Overloaded):
            await made.flush()
        assert server.names("*") == []


async def test_of_two_nodes_one_claims_an_entry(server: RedisServer) -> None:
    async with tiers(server) as one, tiers(server) as other:
        assert await one.claim(key("a"), 60.0)
        assert not await other.claim(key("a"), 60.0)
        await one.unclaim(key("a"))
        assert await other.claim(key("a"), 60.0)


async def test_a_write_that_fails_gives_its_room_back_and_the_next_is_made() -> None:
    behind = Behind(100, writers=1)
    written: list[str] = []

    async def write(name: str) -> None:
        written.append(name)

    for name in ("a", "b", "a", "c"):
        behind.add(key(name), 40, lambda name=name: write(name))  # type: ignore[misc]
    assert (behind.bytes, behind.dropped) == (80, 1)
    await behind.settled()
    assert written == ["b", "a"], "the older one of the same key was taken back"
    assert behind.bytes == 0
    await behind.close()
