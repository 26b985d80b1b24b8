"""Claims between encoders: of those that miss one entry at once one makes it, and nobody waits for the dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from chiasm.cache.arena import ArenaStore
from chiasm.cache.entry import open_entry, tag_secret
from chiasm.cache.memory import MemoryStore
from chiasm.cache.place import Place
from chiasm.cache.store import EntryStore, Lease
from chiasm.cache.tiers import TieredStore, WritePolicy
from chiasm.models.registry import Model, find
from encoder_service.claims import Claims
from encoder_service.engine import EncoderEngine
from tests.cache.arenas import entry, key, small_region
from tests.encoder_service.test_engine import ROOT, WORKERS, frame, held, plan
from tests.redis_server import RedisServer, redis_server, store_at
from tests.waiting import until


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@asynccontextmanager
async def node(server: RedisServer, policy: WritePolicy = WritePolicy.THROUGH) -> AsyncIterator[TieredStore]:
    tiers = TieredStore(MemoryStore(1 << 24), store_at(server), policy=policy, near_name="memory")
    try:
        yield tiers
    finally:
        await tiers.aclose()


async def look(store: EntryStore) -> bytes | None:
    pinned = await store.pin(key("a"), Lease.of(5.0))
    return None if pinned is None else pinned.header


async def test_the_first_is_told_to_make_it_and_the_second_gets_what_it_made(server: RedisServer) -> None:
    async with node(server) as one, node(server) as other:
        first, second = Claims(one), Claims(other)
        assert await first.wait(key("a"), lambda: look(one)) is None
        waiting = asyncio.create_task(second.wait(key("a"), lambda: look(other)))
        await until(lambda: other.far.stats().misses > 1)
        assert not waiting.done()
        await one.put(entry(1000, 7), key("a"))
        assert await waiting == entry(1000, 7).header
        first.end(key("a"))
        await until(lambda: server.names("*:claim:*") == [])


async def test_a_claim_lasts_until_what_is_written_behind_can_be_found(server: RedisServer) -> None:
    async with node(server, WritePolicy.BEHIND) as one, node(server) as other:
        first, second = Claims(one, seconds=60.0), Claims(other, patience=60.0)
        assert await first.wait(key("a"), lambda: look(one)) is None
        may_write, put = asyncio.Event(), one.far.put

        async def putting(*args: Any, **given: Any) -> Place:
            await may_write.wait()
            return await put(*args, **given)

        one.far.put = putting  # type: ignore[method-assign]
        waiting = asyncio.create_task(second.wait(key("a"), lambda: look(other)))
        await one.put(entry(1000, 7), key("a"))
        first.end(key("a"))
        before = other.far.stats().misses
        await until(lambda: other.far.stats().misses > before + 2)
        assert not waiting.done(), "it would make the entry once more"
        may_write.set()
        assert await waiting == entry(1000, 7).header
        await until(lambda: server.names("*:claim:*") == [])


async def test_who_leaves_after_it_has_claimed_gives_the_claim_back(server: RedisServer) -> None:
    async with node(server) as one, node(server) as other:
        first, second = Claims(one, seconds=60.0), Claims(other, seconds=60.0, patience=60.0)
        assert await first.wait(key("a"), lambda: look(one)) is None
        looking = asyncio.Event()

        async def looks() -> bytes | None:
            if server.names("*:claim:*") and not one.far._claims:
                looking.set()
                await asyncio.Event().wait()
            return await look(other)

        waiting = asyncio.create_task(second.wait(key("a"), looks))
        first.end(key("a"))
        await looking.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: server.names("*:claim:*") == [] and not other.far._claims)


async def test_who_ends_its_claim_without_an_entry_leaves_it_to_the_next(server: RedisServer) -> None:
    async with node(server) as one, node(server) as other:
        first, second = Claims(one, seconds=60.0), Claims(other, patience=60.0)
        assert await first.wait(key("a"), lambda: look(one)) is None
        waiting = asyncio.create_task(second.wait(key("a"), lambda: look(other)))
        await until(lambda: other.far.stats().misses > 1)
        first.end(key("a"))
        assert await waiting is None
        assert len(server.names("*:claim:*")) == 1


async def test_who_died_with_a_claim_is_waited_for_as_long_as_the_claim_lasts(server: RedisServer) -> None:
    async with node(server) as one, node(server) as other:
        assert await Claims(one, seconds=0.3).wait(key("a"), lambda: look(one)) is None
        assert await Claims(other, patience=60.0).wait(key("a"), lambda: look(other)) is None
        assert len(server.names("*:claim:*")) == 1, "the first one's is over, the second has one"


async def test_nobody_is_waited_for_longer_than_patience_lasts(server: RedisServer) -> None:
    async with node(server) as one, node(server) as other:
        assert await Claims(one, seconds=600.0).wait(key("a"), lambda: look(one)) is None
        assert await Claims(other, patience=0.2).wait(key("a"), lambda: look(other)) is None


async def test_of_one_process_one_claims_for_all_and_one_that_leaves_is_replaced(server: RedisServer) -> None:
    async with node(server) as one:
        claims = Claims(one)
        asked = [asyncio.create_task(claims.wait(key("a"), lambda: look(one))) for _ in range(4)]
        await asyncio.sleep(0)
        asked[0].cancel()
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(told[0], asyncio.CancelledError)
        assert told[1:] == [None] * 3


async def test_a_node_that_shares_nothing_never_waits(tmp_path: Path) -> None:
    region = small_region(tmp_path / "arena", 1 << 20)
    store = ArenaStore(region)
    claims = Claims(store)
    for _ in range(3):
        assert await claims.wait(key("a"), lambda: look(store)) is None
        claims.end(key("a"))
    await claims.close()
    region.close()


async def test_two_encoders_that_get_one_unit_at_once_encode_it_once(server: RedisServer) -> None:
    model = Model(find("digits"))
    async with AsyncExitStack() as stack:
        engines: list[EncoderEngine] = []
        for _ in range(2):
            store = await stack.enter_async_context(node(server))
            engine = EncoderEngine(
                model.encoder(dtype=torch.float32),
                model.processor,
                fingerprint=model.checkpoint.fingerprint,
                store=store,
                workers_secret=WORKERS,
            )
            stack.push_async_callback(engine.close)
            engines.append(engine)
        with held(engines[0]):
            leading = [
                asyncio.create_task(engines[0].announce([frame(1)], plan(model), root=ROOT, lease=Lease.of(30.0)))
                for _ in range(3)
            ]
            await until(lambda: engines[0].in_flight == 1 and len(server.names("*:claim:*")) == 1)
            following = asyncio.create_task(
                engines[1].announce([frame(1)], plan(model), root=ROOT, lease=Lease.of(30.0))
            )
            await until(lambda: engines[1].store.stats().misses > 1)
        announced = [*await asyncio.gather(*leading), await following]
        assert [engine.counts.encoded_units for engine in engines] == [1, 0]
        assert announced[-1].cached
        contract = announced[0].contract
        assert all(told.contract == contract for told in announced)
        sealed = await engines[1].store.get(contract.key, announced[-1].place)
        assert sealed is not None
        assert isinstance(open_entry(sealed, contract, tag_secret(WORKERS, ROOT)), torch.Tensor)
        await until(lambda: server.names("*:claim:*") == [])


async def test_an_encoder_whose_caller_left_makes_way_for_the_other(server: RedisServer) -> None:
    model = Model(find("digits"))
    async with node(server) as store:
        engine = EncoderEngine(
            model.encoder(dtype=torch.float32),
            model.processor,
            fingerprint=model.checkpoint.fingerprint,
            store=store,
            workers_secret=WORKERS,
        )
        blocker = asyncio.create_task(engine.announce([frame(0)], plan(model), root=ROOT, lease=Lease.of(30.0)))
        with held(engine):
            await until(lambda: engine.in_flight == 1)
            leaving = asyncio.create_task(engine.announce([frame(1)], plan(model), root=ROOT, lease=Lease.of(30.0)))
            await until(lambda: engine.in_flight == 2)
            leaving.cancel()
            await until(lambda: engine.counts.dropped_units == 1)
            await until(lambda: len(server.names("*:claim:*")) == 1)
        await blocker
        await engine.close()
