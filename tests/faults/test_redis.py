"""The store that nodes share, while its server is killed, stopped, full, flushed, slow, or lies: never an error, never
a wrong entry, and well again by itself.

Entries are real ones, sealed and opened as an encoder and a decoder do. Each test shows that its fault took effect.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import redis
import torch
import uvloop

from chiasm.cache.arena import ArenaStore
from chiasm.cache.breaker import State
from chiasm.cache.entry import Contract, open_entry, seal
from chiasm.cache.form import Form
from chiasm.cache.manifest import CHUNK_BYTES, Manifest
from chiasm.cache.place import Elsewhere, InArena, InRedis
from chiasm.cache.redis import RedisStore
from chiasm.cache.sealed import Sealed
from chiasm.cache.store import Lease
from chiasm.cache.tiers import TieredStore, WritePolicy
from chiasm.errors import Overloaded
from tests.cache.arenas import KIB, at, key, small_region
from tests.faults.proxy import proxy
from tests.redis_server import RedisServer, redis_server, store_at
from tests.waiting import until

Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]

SECRET = bytes(31) + b"\1"
TOKENS = 1100
"""Of an entry of two values and a bit."""


def contract(name: str, tokens: int = TOKENS) -> Contract:
    return Contract(key(name), bytes(32), Form.CROSS_KV, torch.float32, (4, 6), (2, 2, 4, tokens, 32))


@cache
def made(name: str, tokens: int = TOKENS) -> Sealed:
    """An entry whose bytes are those of its name."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return seal(contract(name, tokens), torch.randn(contract(name, tokens).shape, generator=generator), SECRET)


def right(sealed: Sealed | None, name: str, tokens: int = TOKENS) -> bool:
    """Whether it is the entry of that name, as a decoder finds out. Whatever passes must be its bytes."""
    if sealed is None or isinstance(open_entry(sealed, contract(name, tokens), SECRET), str):
        return False
    assert sealed.payload == made(name, tokens).payload, "a wrong entry passed"
    return True


on_every_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
"""For what depends on when a transport tells what: the services run on uvloop, the tests on asyncio's own loop."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@asynccontextmanager
async def store(server: RedisServer | str, **options: Any) -> AsyncIterator[RedisStore]:
    store = store_at(server, **options)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def node(folder: Path, far: RedisStore, capacity: int = 32 << 20) -> AsyncIterator[TieredStore]:
    """A node of its own: a region in front of the shared store."""
    region = small_region(folder, capacity)
    tiers = TieredStore(ArenaStore(region), far, policy=WritePolicy.THROUGH)
    try:
        yield tiers
    finally:
        await tiers.aclose()
        region.close()


async def kept(store: RedisStore, name: str, tokens: int = TOKENS) -> InRedis:
    place = await store.put(made(name, tokens), key(name))
    assert isinstance(place, InRedis), (place, store.refused, store.link.failures)
    return place


async def closed_again(store: RedisStore) -> None:
    await until(lambda: store.link.breaker.closed)


# -- killed, stopped, started again ------------------------------------------------------------------------------------


async def test_killed_while_idle_it_is_a_miss_and_then_not_asked(server: RedisServer, tmp_path: Path) -> None:
    async with store(server) as far, node(tmp_path / "arena", far) as tiers:
        await tiers.put(made("a"), key("a"))
        server.kill()
        assert right(await tiers.get(key("a")), "a"), "the node's own are there"
        for _ in range(5):
            assert await tiers.get(key("b")) is None
            assert isinstance(await tiers.put(made("c"), key("c")), InArena)
            assert await tiers.claim(key("b"), 2.0)
        assert far.link.failures["connection"] == 3, "the fourth was not made"
        assert far.link.failures["unasked"] >= 12
        assert far.link.breaker.state is not State.CLOSED


async def test_killed_during_a_put_nothing_is_there_and_nothing_fails(server: RedisServer) -> None:
    async with store(server, step=at("chunks put", server.kill)) as far:
        assert isinstance(await far.put(made("a"), key("a")), Elsewhere)
        assert far.refused["unanswered"] == 1
        server.start()
        await closed_again(far)
        await kept(far, "b")
        assert await far.get(key("a")) is None


@on_every_loop
def test_killed_while_it_takes_values_in_it_is_a_refusal(run: Run, server: RedisServer) -> None:
    """At any moment of a put: the server ends when it has had a part of the bytes."""

    async def scenario() -> None:
        async with store(server) as far:
            place = await kept(far, "a")
            for _ in range(3):
                server.freeze()
                putting = asyncio.create_task(far.put(made("b", 9 * TOKENS), key("b")))
                await asyncio.sleep(0)
                for _ in range(20):
                    await asyncio.sleep(0.001)
                assert not putting.done(), "a socket takes not all of it"
                server.kill()
                assert isinstance(await putting, Elsewhere)
                server.start()
                await closed_again(far)
                assert await far.get(key("a"), place) is None, "it is empty"
                place = await kept(far, "a")
            assert far.link.failures["connection"] == 3

    run(scenario())


async def test_killed_during_a_get_it_is_a_miss(server: RedisServer) -> None:
    async with store(server) as writer, store(server, step=at("manifest read", server.kill)) as far:
        await kept(writer, "a")
        assert await far.get(key("a")) is None
        assert far.link.failures["connection"] == 1
        assert far.rejected.total() == 0


async def test_killed_while_it_sends_values_it_is_a_miss(server: RedisServer) -> None:
    async with store(server) as far, proxy(server.socket) as slow:
        place = await kept(far, "a", 9 * TOKENS)
        async with store(slow.url) as reader:
            assert right(await reader.get(key("a"), place), "a", 9 * TOKENS)
            slow.rate, slow.passed = 20e6, 0
            reading = asyncio.create_task(reader.get(key("a"), place))
            await until(lambda: slow.passed > CHUNK_BYTES // 2)
            server.kill()
            assert await reading is None
            assert slow.passed < made("a", 9 * TOKENS).size
            assert reader.link.failures["connection"] == 1


async def test_started_again_and_empty_it_is_used_again_by_the_same_process(server: RedisServer) -> None:
    async with store(server) as far:
        for _ in range(3):
            place = await kept(far, "a")
            assert right(await far.get(key("a"), place), "a")
            server.kill()
            server.start()
            await far.get(key("a"), place)
            await closed_again(far)
            assert await far.get(key("a"), place) is None, "it is empty"
        await kept(far, "a")
        assert right(await far.get(key("a")), "a")


async def test_frozen_every_call_ends_within_its_limit_and_the_breaker_opens_and_closes(server: RedisServer) -> None:
    async with store(server, timeout=0.2) as far:
        place = await kept(far, "a")
        server.freeze()
        calls: list[Callable[[], Any]] = [
            lambda: far.get(key("a"), place),
            lambda: far.put(made("b"), key("b")),
            lambda: far.claim(key("c"), 1.0),
        ]
        for call in calls:
            async with asyncio.timeout(20):  # a hang, not a slow machine
                await call()
        assert far.link.failures["timeout"] == 3
        assert not far.link.breaker.closed
        began = far.link.failures["unasked"]
        assert await far.get(key("a"), place) is None
        assert far.link.failures["unasked"] == began + 1
        server.thaw()
        await closed_again(far)
        assert right(await far.get(key("a"), place), "a")


# -- full, flushed, evicting -------------------------------------------------------------------------------------------


async def test_full_it_refuses_writes_that_nobody_hears_of_and_serves_reads() -> None:
    with redis_server("--maxmemory", "10mb", "--maxmemory-policy", "noeviction") as server:
        async with store(server) as far:
            place = await kept(far, "a")
            with pytest.raises(redis.OutOfMemoryError):
                for index in range(20):
                    server.admin.set(f"ballast {index}", bytes(1 << 20))
            assert isinstance(await far.put(made("b"), key("b")), Elsewhere)
            assert far.refused["full"] == 1
            assert server.admin.info("errorstats")["errorstat_OOM"]["count"] > 0
            assert right(await far.get(key("a"), place), "a")
            assert await far.get(key("b")) is None
            assert far.link.breaker.closed
            server.admin.delete(*server.names("ballast*"))
            await kept(far, "b")


async def test_an_entry_that_is_too_large_is_not_sent_and_evicts_nothing() -> None:
    with redis_server("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru") as server:
        async with store(server, entry_bytes=4 << 20) as far:
            place = await kept(far, "a")
            received = server.count("total_net_input_bytes")
            assert isinstance(await far.put(made("b", 20 * TOKENS), key("b")), Elsewhere)
            assert far.refused["entry_budget"] == 1
            assert server.count("evicted_keys") == 0
            assert server.count("total_net_input_bytes") < received + 10 * KIB
            assert right(await far.get(key("a"), place), "a")
        with suppress(redis.OutOfMemoryError):
            server.admin.set("too large", bytes(20 << 20))
        assert server.count("evicted_keys") > 0, "it would have"


async def test_evicting_under_us_it_loses_entries_and_never_half_of_one_is_used() -> None:
    with redis_server("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-random") as server:
        async with store(server) as far:
            found = 0
            for _ in range(6):
                places = {name: await far.put(made(name), key(name)) for name in "abcdefgh"}
                for name, place in places.items():
                    found += right(await far.get(key(name), place), name)
                    await far.pin(key(name), Lease.of(5000.0))
            assert server.count("evicted_keys") > 0
            assert 0 < found < 48
            assert far.rejected["chunk_missing"] > 0
            assert far.link.failures.total() == 0


async def test_a_value_that_goes_between_manifest_and_values_is_a_miss(server: RedisServer) -> None:
    deleted: list[object] = []

    def delete() -> None:
        deleted.append(server.admin.delete(server.names("*:value:*:1")[0]))

    async with store(server, step=at("manifest read", delete)) as far:
        await kept(far, "a")
        assert await far.get(key("a")) is None
        assert deleted == [1]
        assert far.rejected["chunk_missing"] == 1


async def test_flushed_what_was_read_stays_and_what_was_announced_is_missing(server: RedisServer) -> None:
    async with store(server) as far:
        place = await kept(far, "a")
        held = await far.get(key("a"), place)
        server.admin.flushall()
        assert server.names("*") == []
        assert right(held, "a")
        assert await far.get(key("a"), place) is None
        assert await far.pin(key("a"), Lease.of(1.0)) is None
        await kept(far, "a")


async def test_after_a_failover_to_a_stale_replica_what_was_acknowledged_is_a_miss(server: RedisServer) -> None:
    """Two servers behind one address. The second has what the first had a while ago."""
    with redis_server() as replica:
        async with proxy(server.socket) as link, store(link.url) as far:
            early = await kept(far, "a")
            for name in server.names("*"):
                replica.admin.restore(name, 0, server.admin.dump(name) or b"")
            late = await kept(far, "b")
            link.turn_to(replica.socket)
            assert not right(await far.get(key("b"), late), "b")  # the connection ends with the first server
            await closed_again(far)
            assert await far.get(key("b"), late) is None
            assert right(await far.get(key("a"), early), "a")
            assert replica.count("keyspace_misses") > 0


# -- slow --------------------------------------------------------------------------------------------------------------


async def test_too_slow_for_its_size_an_entry_is_a_miss_and_a_small_one_is_not(server: RedisServer) -> None:
    async with store(server) as writer, proxy(server.socket) as link:
        large, small = await kept(writer, "a", 9 * TOKENS), await kept(writer, "b", 1)
        link.delay, link.rate = 0.02, 2e6
        async with store(link.url, timeout=1.0, rate=200e6) as far:
            assert right(await far.get(key("b"), small), "b", 1)
            async with asyncio.timeout(20):
                assert await far.get(key("a"), large) is None
            assert link.passed < made("a", 9 * TOKENS).size
            assert far.link.failures["timeout"] == 1
            link.delay, link.rate = 0.0, None
            assert right(await far.get(key("a"), large), "a", 9 * TOKENS)


# -- lies --------------------------------------------------------------------------------------------------------------


def offsets(length: int, count: int) -> list[int]:
    """Both ends, and some between."""
    return sorted({0, length - 1, *random.Random(0).sample(range(length), min(count, length))})


async def test_a_flipped_bit_anywhere_is_found(server: RedisServer) -> None:
    async with store(server) as far:
        place = await kept(far, "a")
        names = server.names("chiasm:*")
        assert len(names) == place.chunks + 1
        for name in names:
            whole = server.admin.get(name)
            assert isinstance(whole, bytes)
            for offset in offsets(len(whole), len(whole) if ":entry:" in name else 25):
                server.admin.setrange(name, offset, bytes([whole[offset] ^ 1 << offset % 8]))
                assert server.admin.getrange(name, offset, offset) != whole[offset : offset + 1]
                for where in (place, None):
                    assert not right(await far.get(key("a"), where), "a"), (name, offset)
                server.admin.setrange(name, offset, whole[offset : offset + 1])
        assert right(await far.get(key("a"), place), "a")


def rejected(far: RedisStore) -> int:
    return far.rejected.total() + far.link.failures["too_long"]


async def test_a_value_that_was_cut_or_grew_is_found_whatever_it_is(server: RedisServer) -> None:
    async with store(server) as far:
        place = await kept(far, "a")
        for name in server.names("chiasm:*"):
            whole = server.admin.get(name)
            assert isinstance(whole, bytes)
            lies: list[bytes | None] = [whole[:end] for end in offsets(len(whole), 5)]
            lies += [whole + b"x", whole * 2, whole + bytes(4 << 20), None]
            for lie in lies:
                server.admin.delete(name)
                if lie is None:
                    server.admin.rpush(name, "a list")
                else:
                    server.admin.set(name, lie)
                before = rejected(far)
                for where in (place, None):
                    assert await far.get(key("a"), where) is None, (name, lie and len(lie))
                assert rejected(far) >= before + 2
            server.admin.set(name, whole)
        assert right(await far.get(key("a"), place), "a")
        assert far.link.breaker.closed


async def test_a_value_far_too_long_is_left_where_it_is(server: RedisServer) -> None:
    async with store(server) as far:
        place = await kept(far, "a")
        (name,) = server.names("*:value:*:0")
        server.admin.set(name, bytes(200 << 20))
        async with asyncio.timeout(60):
            assert await far.get(key("a"), place) is None
            assert await far.get(key("a")) is None
        assert far.rejected["chunk_length"] == 2
        sent = server.count("total_net_output_bytes")
        assert sent < 100 << 20, sent


async def test_an_entry_under_the_key_of_another_is_refused(server: RedisServer) -> None:
    async with store(server) as far:
        place = await kept(far, "a")
        await kept(far, "b")
        names = {name: f"chiasm:entry:{key(name).hex()}" for name in "ab"}
        swapped = server.admin.get(names["a"])
        assert isinstance(swapped, bytes)
        server.admin.set(names["b"], swapped)
        assert await far.get(key("b"), place) is None
        assert await far.get(key("b")) is None
        assert far.rejected["key"] == 2
        # And with a manifest that says the other key, all of it true but for that.
        honest = Manifest.unpack(swapped, key("a"), 1 << 30)
        assert isinstance(honest, Manifest)
        server.admin.set(names["b"], replace(honest, key=key("b")).pack())
        lie = await far.get(key("b"))
        assert lie is not None, "a store understands no header"
        assert open_entry(lie, contract("b"), SECRET) == "key"


async def test_an_entry_forged_without_the_secret_is_refused(server: RedisServer) -> None:
    payload = torch.zeros(contract("a").shape)
    forged = seal(contract("a"), payload, bytes(32))
    async with store(server) as far:
        place = await far.put(forged, key("a"))
        found = await far.get(key("a"), place)
        assert found is not None
        assert open_entry(found, contract("a"), SECRET) == "tag"


# -- cancelled ---------------------------------------------------------------------------------------------------------


@on_every_loop
def test_calls_cancelled_anywhere_give_nobody_anothers_value(
    run: Run, server: RedisServer, request: pytest.FixtureRequest
) -> None:
    """The count is that of `--cancels`."""

    async def scenario() -> None:
        names = [f"entry {index}" for index in range(6)]
        random_ = random.Random(1)
        async with store(server) as far:
            places = {name: await kept(far, name, 40 + 300 * index) for index, name in enumerate(names)}
            tokens = {name: 40 + 300 * index for index, name in enumerate(names)}
            cancelled = answered = 0

            async def one() -> None:
                nonlocal cancelled, answered
                name = random_.choice(names)
                kind = random_.randrange(4)
                calls: list[Callable[[], Any]] = [
                    lambda: far.get(key(name), places[name]),
                    lambda: far.get(key(name)),
                    lambda: far.pin(key(name), Lease.of(1.0)),
                    lambda: far.put(made(name, tokens[name]), key(name)),
                ]
                task = asyncio.ensure_future(calls[kind]())
                for _ in range(random_.randrange(12)):
                    await asyncio.sleep(0)
                if random_.random() < 0.3:
                    await asyncio.sleep(random_.random() * 0.003)
                cancelled += task.cancel()
                try:
                    found = await task
                except asyncio.CancelledError:
                    return
                answered += 1
                if kind < 2:
                    assert right(found, name, tokens[name]), "another's, or none"
                elif kind == 2:
                    assert found.header == made(name, tokens[name]).header

            async def many(count: int) -> None:
                for _ in range(count):
                    await one()

            total: int = request.config.getoption("--cancels")
            await asyncio.gather(*(many(total // 10) for _ in range(10)))
            assert cancelled > total // 3 and answered > 0
            assert far.link.breaker.closed and far.link.failures.total() == 0
            for name in names:
                assert right(await far.get(key(name)), name, tokens[name])

    run(scenario())


# -- two nodes ---------------------------------------------------------------------------------------------------------


async def test_a_decoder_reads_what_an_encoder_of_another_node_put(server: RedisServer, tmp_path: Path) -> None:
    async with (
        store(server) as one,
        store(server) as other,
        node(tmp_path / "one", one) as encoder,
        node(tmp_path / "other", other) as decoder,
    ):
        place = await encoder.put(made("a"), key("a"), lease=Lease.of(30.0), shared=True)
        assert isinstance(place, InRedis)
        assert right(await decoder.get(key("a"), place), "a")
        assert decoder.tiers()["redis"].hits == 1
        server.kill()
        assert right(await decoder.get(key("a"), place), "a"), "it was brought near"
        assert right(await encoder.get(key("a"), place), "a"), "and there it always was"
        await decoder.discard(key("a"))
        assert await decoder.get(key("a"), place) is None


@on_every_loop
def test_whatever_happens_to_the_server_two_nodes_never_read_a_wrong_entry(
    run: Run, server: RedisServer, tmp_path: Path
) -> None:
    """Puts and reads at two nodes while the server is killed, frozen, flushed and lied to."""

    async def scenario() -> None:
        names: list[str] = list("abcdefgh")
        random_ = random.Random(2)

        def lie() -> None:
            for name in server.names("chiasm:value:*"):
                server.admin.setrange(name, random_.randrange(1000), os.urandom(8))

        async def harm() -> None:
            for act in (lie, server.admin.flushall, "kill", lie, "freeze", lie, "kill"):
                await asyncio.sleep(0.1)
                if act == "kill":
                    await asyncio.to_thread(server.kill)
                    await asyncio.sleep(0.1)
                    await asyncio.to_thread(server.start)
                elif act == "freeze":
                    server.freeze()
                    await asyncio.sleep(0.3)
                    server.thaw()
                else:
                    assert callable(act)
                    await asyncio.to_thread(act)

        async with (
            store(server, timeout=0.2) as one,
            store(server, timeout=0.2) as other,
            node(tmp_path / "one", one, 4 << 20) as encoder,
            node(tmp_path / "other", other, 4 << 20) as decoder,
        ):
            found = missed = 0

            async def ask(name: str) -> None:
                nonlocal found, missed
                try:
                    place = await encoder.put(made(name), key(name), shared=True)
                except Overloaded:
                    missed += 1
                    return
                sealed = await decoder.get(key(name), place)
                if right(sealed, name):
                    found += 1
                    return
                missed += 1
                await decoder.discard(key(name))

            harming = asyncio.create_task(harm())
            while not harming.done():
                await ask(random_.choice(names))
                await asyncio.sleep(0)
            await harming
            assert found and missed
            await until(lambda: one.link.breaker.closed and other.link.breaker.closed)
            for name in names:
                await decoder.discard(key(name))
                place = await encoder.put(made(name), key(name), shared=True)
                assert right(await decoder.get(key(name), place), name)

    run(scenario())
