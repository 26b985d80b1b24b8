"""One encode for equal units, whoever leaves, wherever the unit is then: resized, queued, encoded, sealed or put."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiasm.attention.backend import VarlenAttention
from chiasm.cache.entry import open_entry, tag_secret
from chiasm.cache.memory import MemoryStore
from chiasm.cache.place import Place
from chiasm.cache.sealed import EntryKey, Sealable
from chiasm.cache.store import NOBODY, Lease, Pinned, full
from chiasm.errors import Overloaded, ServerError
from chiasm.models.family import Trunk
from chiasm.models.registry import Model, find
from encoder_service.engine import PASSES, RESIZING, Announced, EncoderEngine
from encoder_service.publish import THREADS
from tests.encoder_service.test_engine import ROOT, WORKERS, frame, plan
from tests.waiting import until

MODEL = Model(find("digits"))

FILLER = 10**6
"""Of a frame that nobody asks about: it keeps the model busy, so that others wait in the queue."""


class Store(MemoryStore):
    """A store whose puts can be held up, and fail.

    Attributes:
        puts_begun: how many.
        may_put: set while none is held up.
        failing: how many puts and pins fail from now on.
    """

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.puts_begun = 0
        self.may_put = asyncio.Event()
        self.may_put.set()
        self.failing = 0

    async def put(
        self,
        entry: Sealable,
        key: EntryKey,
        *,
        lease: Lease | None = None,
        owner: bytes = NOBODY,
        shared: bool = False,
    ) -> Place:
        self.puts_begun += 1
        await self.may_put.wait()
        self._fail()
        await asyncio.sleep(0)
        return await super().put(entry, key, lease=lease, owner=owner, shared=shared)

    async def pin(self, key: EntryKey, lease: Lease, *, owner: bytes = NOBODY, shared: bool = False) -> Pinned | None:
        await asyncio.sleep(0)
        return await super().pin(key, lease, owner=owner, shared=shared)

    def _fail(self) -> None:
        if self.failing:
            self.failing -= 1
            raise full(2, 1)


class World:
    """An engine whose stages can be held up and made to fail.

    Attributes:
        encoded: units that went through the model.
        spoiled: how many units come out of the model as NaN from now on.
        broken: how many passes raise from now on.
        in_pass: set once the model has begun.
    """

    def __init__(self) -> None:
        self.encoded = 0
        self.spoiled = 0
        self.broken = 0
        self.in_pass = threading.Event()
        self.may_pass = threading.Event()
        self.may_pass.set()
        self._gates: list[threading.Event] = []
        half = MODEL.encoder(dtype=torch.float32)
        encode = half.encode

        def encoding(
            units: Sequence[torch.Tensor], attention: VarlenAttention, trunk: Trunk | None = None
        ) -> list[torch.Tensor]:
            self.in_pass.set()
            self.may_pass.wait()
            if self.broken:
                self.broken -= 1
                raise MemoryError("no room for those")
            made = encode(units, attention, trunk)
            self.encoded += len(made)
            spoiled, self.spoiled = min(self.spoiled, len(made)), max(0, self.spoiled - len(made))
            return [torch.full_like(one, torch.nan) if at < spoiled else one for at, one in enumerate(made)]

        half.encode = encoding  # type: ignore[method-assign]
        self.store = Store()
        self.engine = EncoderEngine(
            half, MODEL.processor, fingerprint=MODEL.checkpoint.fingerprint, store=self.store, workers_secret=WORKERS
        )

    def hold(self, stage: str) -> None:
        gate = threading.Event()
        self._gates.append(gate)
        if stage == "resize":
            for _ in range(RESIZING):
                self.engine.resizing.submit(gate.wait)
        elif stage == "queue":
            self.engine.device.submit(gate.wait)
        elif stage == "pass":
            self.may_pass.clear()
        elif stage == "seal":
            for _ in range(THREADS):
                self.engine.publisher.submit(gate.wait)
        elif stage == "put":
            self.store.may_put.clear()

    def let_go(self) -> None:
        for gate in self._gates:
            gate.set()
        self.may_pass.set()
        self.store.may_put.set()

    def ask(self, seed: int, lease: Lease) -> asyncio.Task[Announced]:
        return asyncio.create_task(self.engine.announce([frame(seed)], plan(MODEL), root=ROOT, lease=lease))

    async def assert_told(self, announced: Announced, lease: Lease) -> None:
        """Whoever was told has a pin of his own on an entry that is right; he gives it back."""
        kept = self.store._kept[announced.contract.key]
        assert lease.id in kept.leases
        sealed = await self.store.get(announced.contract.key)
        assert sealed is not None
        assert isinstance(open_entry(sealed, announced.contract, tag_secret(WORKERS, ROOT)), torch.Tensor)
        await self.store.release(announced.contract.key, lease.id)

    async def assert_nothing_is_left(self) -> None:
        await until(lambda: self.engine.in_flight == 0)
        assert not len(self.engine._batcher) and not self.engine._batcher._tenants
        await until(lambda: self.engine._passes._value == PASSES)
        assert self.store.stats().pinned_bytes == 0


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    try:
        yield made
        await made.assert_nothing_is_left()
    finally:
        made.let_go()
        await made.engine.close()


async def reached(one: World, stage: str, callers: int) -> None:
    """Until all callers wait for one unit, and it is at that stage."""
    if stage == "resize":
        await asyncio.sleep(0)
        return
    await until(lambda: one.engine.counts.joined_units == callers - 1)
    if stage == "pass":
        await until(one.in_pass.is_set)
    elif stage == "seal":
        await until(lambda: one.encoded > 0)
    elif stage == "put":
        await until(lambda: one.store.puts_begun > 0)


@pytest.mark.parametrize("stage", ["resize", "queue", "pass", "seal", "put"])
@pytest.mark.parametrize("leaving", [(0,), (1,), (2,), (0, 1, 2)], ids=["first", "second", "third", "all"])
async def test_who_leaves_touches_nobody_at_whatever_stage_and_others_still_join(
    stage: str, leaving: tuple[int, ...]
) -> None:
    async with world() as one:
        one.hold(stage)
        others = []
        if stage == "queue":
            lease = Lease.of(60)
            others.append((one.ask(FILLER, lease), lease))
            await until(lambda: bool(one.engine.counts.batches))
        leases = [Lease.of(60) for _ in range(3)]
        asked = [one.ask(1, lease) for lease in leases]
        await reached(one, stage, 3)
        for which in leaving:
            asked[which].cancel()
        await asyncio.gather(*(asked[which] for which in leaving), return_exceptions=True)
        late = Lease.of(60)
        asked, leases = [*asked, one.ask(1, late)], [*leases, late]
        if stage != "resize":
            # Where all have left a unit that was only queued, the late one begins it anew.
            joins = 2 if stage == "queue" and len(leaving) == 3 else 3
            await until(lambda: one.engine.counts.joined_units == joins and one.engine.in_flight == 1 + len(others))
        one.let_go()
        for which, (task, lease) in enumerate(zip(asked, leases, strict=True)):
            if which in leaving:
                assert task.cancelled()
            else:
                await one.assert_told(await task, lease)
        for task, lease in others:
            await one.assert_told(await task, lease)
        assert one.encoded == 1 + len(others)


@pytest.mark.parametrize(("failing", "expected"), [("pass", MemoryError), ("seal", ServerError), ("put", Overloaded)])
async def test_a_failure_tells_all_who_wait_and_the_next_one_is_encoded(
    failing: str, expected: type[Exception]
) -> None:
    async with world() as one:
        held = "put" if failing == "put" else "pass"
        one.hold(held)
        asked = [one.ask(1, Lease.of(60)) for _ in range(3)]
        await reached(one, held, 3)
        one.broken, one.spoiled = int(failing == "pass"), int(failing == "seal")
        one.store.failing = int(failing == "put")
        one.let_go()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) for result in results] == [expected] * 3
        lease = Lease.of(60)
        await one.assert_told(await one.ask(1, lease), lease)


async def test_a_pin_that_cannot_be_had_fails_one_caller_and_not_the_others() -> None:
    async with world() as one:
        one.hold("put")
        leases = [Lease.of(60) for _ in range(3)]
        asked = [one.ask(1, lease) for lease in leases]
        await reached(one, "put", 3)
        pin = one.store.pin
        refused: list[Lease] = []

        async def pinning(key: EntryKey, lease: Lease, *, owner: bytes = NOBODY, shared: bool = False) -> Pinned | None:
            if not refused:
                refused.append(lease)
                raise full(2, 1)
            return await pin(key, lease, owner=owner, shared=shared)

        one.store.pin = pinning  # type: ignore[method-assign]
        one.let_go()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(result, Overloaded) for result in results) == 1
        for result, lease in zip(results, leases, strict=True):
            if isinstance(result, Announced):
                await one.assert_told(result, lease)


async def test_who_comes_while_nobody_waited_for_room_waits_for_it() -> None:
    async with world() as one:
        put, tried = one.store.put, asyncio.Event()
        leases: list[Lease | None] = []

        async def crowded(entry: Sealable, key: EntryKey, *, lease: Lease | None = None, **given: Any) -> Place:
            leases.append(lease)
            if lease is None:
                tried.set()
                await one.store.may_put.wait()
            if len(leases) <= 2:
                raise full(1, 2)
            return await put(entry, key, lease=lease, **given)

        one.store.put = crowded  # type: ignore[method-assign]
        one.hold("put")
        leaving = one.ask(1, Lease.of(60))
        await until(lambda: bool(leases))
        leaving.cancel()
        await tried.wait()
        lease = Lease.of(60)
        coming = one.ask(1, lease)
        await until(lambda: one.engine.counts.joined_units == 1)
        one.let_go()
        await one.assert_told(await coming, lease)
        assert [one is None for one in leases] == [False, True, False] and one.encoded == 1


async def test_an_entry_that_went_before_the_next_in_line_had_its_pin_is_put_again() -> None:
    async with world() as one:
        put = one.store.put

        async def gone(entry: Sealable, key: EntryKey, *, lease: Lease | None = None, **given: Any) -> Place:
            place = await put(entry, key, lease=lease, **given)
            if one.store.puts_begun == 1:
                await one.store.discard(key)
            return place

        one.store.put = gone  # type: ignore[method-assign]
        one.hold("put")
        leases = [Lease.of(60) for _ in range(2)]
        asked = [one.ask(1, lease) for lease in leases]
        await reached(one, "put", 2)
        one.let_go()
        announced, *_ = await asyncio.gather(*asked)
        assert one.encoded == 1 and one.store.puts_begun == 2
        for lease in leases:
            await one.store.release(announced.contract.key, lease.id)


async def test_a_unit_that_is_not_finite_fails_alone_among_eight() -> None:
    async with world() as one:
        one.hold("pass")
        filler = one.ask(FILLER, Lease.of(60))
        await until(one.in_pass.is_set)
        leases = [Lease.of(60) for _ in range(8)]
        asked = [one.ask(seed, lease) for seed, lease in enumerate(leases)]
        await until(lambda: one.engine.in_flight == 9)
        one.spoiled = 2  # the one that keeps the model busy, and the first of the eight
        one.let_go()
        failed = 0
        for task, lease in [(filler, leases[0]), *zip(asked, leases, strict=True)]:
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, ServerError):
                failed += 1
            else:
                assert isinstance(result, Announced)
                await one.assert_told(result, lease)
        assert failed == 2 and list(one.engine.counts.batches) == [1, 8]


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    callers=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=16),
    failures=st.lists(st.sampled_from(["broken", "spoiled", "put"]), max_size=2),
    seed=st.integers(0, 2**16),
)
def test_whoever_comes_leaves_or_fails_those_who_stay_are_told_and_nothing_is_left(
    callers: list[tuple[int, int, bool]], failures: list[str], seed: int
) -> None:
    """Each caller wants one of four units, comes after so many turns of the loop, and stays or leaves at some turn."""
    asyncio.run(_arrivals(callers, failures, random.Random(seed)))


async def _arrivals(callers: list[tuple[int, int, bool]], failures: list[str], rng: random.Random) -> None:
    async with world() as one:
        one.broken, one.spoiled = failures.count("broken"), failures.count("spoiled")
        one.store.failing = failures.count("put")

        async def turns(most: int) -> None:
            for _ in range(rng.randrange(most + 1)):
                await asyncio.sleep(0 if rng.random() < 0.7 else 0.001)

        async def call(which: int, after: int, stays: bool) -> str:
            await turns(20 * after)
            lease = Lease.of(60)
            task = one.ask(which, lease)
            if not stays:
                await turns(60)
                task.cancel()
            try:
                announced = await task
            except asyncio.CancelledError:
                return "left"
            except (MemoryError, ServerError, Overloaded):
                return "failed"
            await one.assert_told(announced, lease)
            return "told"

        outcomes = await asyncio.gather(*(call(*caller) for caller in callers))
        if not failures:
            assert all(outcome == "told" for outcome, (_, _, stays) in zip(outcomes, callers, strict=True) if stays)
            assert one.encoded <= len({which for which, _, _ in callers}) + outcomes.count("left")
        for which in range(4):  # and whatever failed fails no later caller
            one.broken = one.spoiled = one.store.failing = 0
            lease = Lease.of(60)
            await one.assert_told(await one.ask(which, lease), lease)


async def test_nothing_runs_on_when_the_last_who_waited_for_a_pass_has_left_and_the_passes_end() -> None:
    async with world() as one:
        one.hold("put")
        leases = [Lease.of(60) for _ in range(PASSES)]
        passing = []
        for number, lease in enumerate(leases, 1):
            passing.append(one.ask(number, lease))
            await until(lambda count=number: one.store.puts_begun == count)  # type: ignore[misc]
        leaving = one.ask(PASSES + 1, Lease.of(60))
        await until(lambda: one.engine.in_flight == PASSES + 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        one.let_go()
        for announced, lease in zip(await asyncio.gather(*passing), leases, strict=True):
            await one.store.release(announced.contract.key, lease.id)
        await until(lambda: one.engine.idle)
