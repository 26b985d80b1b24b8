"""The encoder's engine: equal units encoded once, whoever leaves; known ones found; batches bounded; nothing broken
kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chiasm.attention.backend import VarlenAttention
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.arena import ArenaStore
from chiasm.cache.entry import Contract, open_entry, tag_secret
from chiasm.cache.memory import MemoryStore
from chiasm.cache.place import InArena, Place
from chiasm.cache.region import Region
from chiasm.cache.sealed import EntryKey, Sealable, Sealed
from chiasm.cache.store import NOBODY, EntryStore, Lease, full
from chiasm.cache.tenant import owner as owner_of
from chiasm.errors import InvalidRequest, Overloaded, ServerError, Unavailable
from chiasm.media.types import Rgb
from chiasm.models.family import MediumPlan, Trunk
from chiasm.models.registry import Model, find
from encoder_service.batcher import Share
from encoder_service.bounds import MAX_ELEMENTS, Bounds
from encoder_service.engine import Announced, EncoderEngine
from tests.waiting import until

ROOT = bytes(32)
WORKERS = bytes(range(32))


def plan(model: Model, height: int = 64, width: int = 64) -> MediumPlan:
    grid = (height // 16, width // 16)
    tokens = model.processor.unit_layout(grid).vision_tokens
    return MediumPlan("image", 1, height, width, grid, tokens, upscaled=False)


def frame(seed: int, height: int = 64, width: int = 64) -> Rgb:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def model() -> Model:
    return Model(find("digits"))


@asynccontextmanager
async def engine(
    model: Model,
    *,
    budget: int = 1 << 24,
    max_patches: int = 1 << 14,
    max_units: int = 64,
    max_unit_patches: int = 1 << 14,
    max_elements: int = MAX_ELEMENTS,
    store: EntryStore | None = None,
) -> AsyncIterator[EncoderEngine]:
    made = EncoderEngine(
        model.encoder(dtype=torch.float32),
        model.processor,
        fingerprint=model.checkpoint.fingerprint,
        store=store or MemoryStore(budget),
        workers_secret=WORKERS,
        max_patches=max_patches,
        max_units=max_units,
        max_unit_patches=max_unit_patches,
        max_elements=max_elements,
    )
    try:
        yield made
    finally:
        await made.close()


async def ahead(engine: EncoderEngine, model: Model) -> asyncio.Task[Announced]:
    """A unit whose pass has begun, while the device thread is held: all that comes behind it waits in the queue."""
    first = asyncio.create_task(engine.announce([frame(99)], plan(model), root=ROOT, lease=Lease.of(1)))
    await until(lambda: bool(engine.counts.batches))
    return first


@contextmanager
def held(engine: EncoderEngine) -> Iterator[None]:
    """Keeps the device thread busy, so that what is announced meanwhile waits in the queue."""
    gate = threading.Event()
    engine.device.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


async def test_equal_units_at_once_are_encoded_once(model: Model) -> None:
    async with engine(model) as e:
        found = await asyncio.gather(
            *(e.announce([frame(1)], plan(model), root=ROOT, lease=Lease.of(1)) for _ in range(32))
        )
        assert e.counts.encoded_units == 1
        assert len({announced.contract.key for announced in found}) == 1
        again = await e.announce([frame(1)], plan(model), root=ROOT, lease=Lease.of(1))
        assert again.cached and e.counts.encoded_units == 1


async def test_a_known_unit_is_pinned_and_its_payload_not_read(model: Model) -> None:
    class NeverRead(MemoryStore):
        async def get(self, key: EntryKey, place: Place | None = None, *, owner: bytes = NOBODY) -> Sealed | None:
            raise AssertionError("an encoder needs no payload")

    async with engine(model, store=NeverRead(1 << 24)) as e:
        leases = [Lease.of(60), Lease.of(60)]
        first = await e.announce([frame(1)], plan(model), root=ROOT, lease=leases[0])
        again = await e.announce([frame(1)], plan(model), root=ROOT, lease=leases[1])
        assert again.cached and (again.contract, again.place) == (first.contract, first.place)
        await e.store.release(first.contract.key, leases[0].id)
        assert e.store.stats().pinned_bytes > 0, "the second has a pin of its own"


async def test_units_are_announced_where_another_process_finds_them(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "arena"
    regions = [Region.open_or_create(path, 1 << 20) for _ in "ab"]
    reader = ArenaStore(regions[1])
    async with engine(model, store=ArenaStore(regions[0])) as e:
        first, joined = await asyncio.gather(
            *(e.announce([frame(1)], plan(model), root=ROOT, lease=Lease.of(60)) for _ in "ab")
        )
        known = await e.announce([frame(1)], plan(model), root=ROOT, lease=Lease.of(60))
        for announced in (first, joined, known):
            assert isinstance(announced.place, InArena)
            sealed = await reader.get(announced.contract.key, announced.place)
            assert sealed is not None
            assert isinstance(open_entry(sealed, announced.contract, tag_secret(WORKERS, ROOT)), torch.Tensor)
        assert e.counts.encoded_units == 1 and known.cached
        assert e.store.stats() != reader.stats(), "each counts its own"
    for region in regions:
        region.close()


async def test_the_leaders_leaving_hands_over_and_a_followers_touches_nobody(model: Model) -> None:
    for leaver in (0, 1, 2):
        async with engine(model) as e:
            with held(e):
                tasks = [
                    asyncio.create_task(e.announce([frame(2)], plan(model), root=ROOT, lease=Lease.of(1)))
                    for _ in range(3)
                ]
                await until(lambda: e.counts.joined_units == 2)
                tasks[leaver].cancel()
                await asyncio.sleep(0.01)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(results[leaver], asyncio.CancelledError)
            assert sum(not isinstance(r, BaseException) for r in results) == 2
            assert e.counts.encoded_units == 1


async def test_a_unit_that_nobody_waits_for_any_more_is_not_encoded(model: Model) -> None:
    async with engine(model) as e:
        with held(e):
            first = asyncio.create_task(e.announce([frame(3)], plan(model), root=ROOT, lease=Lease.of(1)))
            await until(lambda: bool(e.counts.batches))  # it has left the queue: it is being encoded and may finish
            second = asyncio.create_task(e.announce([frame(4)], plan(model), root=ROOT, lease=Lease.of(1)))
            await until(lambda: e.in_flight == 2)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            assert e.in_flight == 1
        await first
        assert e.counts.encoded_units == 1 and e.counts.dropped_units == 1


async def test_a_pass_takes_no_more_patches_than_allowed(model: Model) -> None:
    async with engine(model, max_patches=64) as e:
        with held(e):
            before = await ahead(e, model)
            sizes = [(64, 64)] * 5 + [(128, 128)]
            tasks = [
                asyncio.create_task(e.announce([frame(i, *size)], plan(model, *size), root=ROOT, lease=Lease.of(1)))
                for i, size in enumerate(sizes)
            ]
            await until(lambda: e.in_flight == 1 + len(sizes))
        await asyncio.gather(before, *tasks)
        assert sum(e.counts.batches) == 7
        assert max(e.counts.batches) == 4, "16 patches a small unit; the large one has 64 and is a pass of its own"


async def test_a_pass_takes_no_more_units_than_allowed(model: Model) -> None:
    async with engine(model, max_units=3) as e:
        with held(e):
            before = await ahead(e, model)
            tasks = [
                asyncio.create_task(e.announce([frame(i)], plan(model), root=ROOT, lease=Lease.of(1))) for i in range(8)
            ]
            await until(lambda: e.in_flight == 9)
        await asyncio.gather(before, *tasks)
        assert sum(e.counts.batches) == 9 and max(e.counts.batches) == 3


async def test_no_tensor_of_a_pass_has_more_elements_than_can_be_indexed(model: Model) -> None:
    of_unit = model.encoder(dtype=torch.float32).largest_tensor(16, 1)
    async with engine(model, max_elements=2 * of_unit + 1) as e:
        with held(e):
            before = await ahead(e, model)
            tasks = [
                asyncio.create_task(e.announce([frame(i)], plan(model), root=ROOT, lease=Lease.of(1))) for i in range(6)
            ]
            await until(lambda: e.in_flight == 7)
        await asyncio.gather(before, *tasks)
        assert max(e.counts.batches) == 2


async def test_a_unit_that_no_pass_could_hold_is_refused_with_both_numbers(model: Model) -> None:
    async with engine(model, max_unit_patches=40) as e:
        with pytest.raises(InvalidRequest) as caught:
            await e.announce([frame(1, 128, 128)], plan(model, 128, 128), root=ROOT, lease=Lease.of(1))
        assert caught.value.reason == "MEDIA_TOO_LARGE"
        assert (caught.value.facts["patches"], caught.value.facts["limit"]) == (64, 40)
        assert "64" in str(caught.value) and "40" in str(caught.value) and e.in_flight == 0
        largest = e.half.largest_tensor
    of_unit = largest(64, 1)
    with pytest.raises(InvalidRequest) as caught:
        Bounds(1 << 14, 64, largest, max_elements=of_unit).check((8, 8))
    assert (caught.value.facts["elements"], caught.value.facts["limit"]) == (of_unit, of_unit)
    Bounds(1 << 14, 64, largest, max_elements=of_unit + 1).check((8, 8))


@pytest.mark.parametrize("sizes", [[(64, 64)], [(64, 64)] * 5, [(64, 96), (128, 128), (32, 32)]])
def test_no_operation_of_a_pass_makes_more_elements_than_the_model_says(
    model: Model, sizes: list[tuple[int, int]]
) -> None:
    half = model.encoder(dtype=torch.float32)
    frames = [torch.zeros(1, 3, *size, dtype=torch.uint8) for size in sizes]
    patches = sum(height * width // 256 for height, width in sizes)
    with torch.inference_mode(), Largest() as seen:
        half.encode(frames, TorchVarlen())
    assert seen.elements <= half.largest_tensor(patches, len(sizes)) <= 2 * seen.elements


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *made, 0)
        return out


async def test_units_batched_with_others_equal_units_alone(model: Model) -> None:
    frames = [frame(i, 64, 64 + 32 * (i % 3)) for i in range(6)]
    plans = [plan(model, 64, 64 + 32 * (i % 3)) for i in range(6)]
    async with engine(model) as alone, engine(model) as together:
        for f, p in zip(frames, plans, strict=True):
            await alone.announce([f], p, root=ROOT, lease=Lease.of(1))
        with held(together):
            tasks = [
                asyncio.create_task(together.announce([f], p, root=ROOT, lease=Lease.of(1)))
                for f, p in zip(frames, plans, strict=True)
            ]
            await until(lambda: together.in_flight == 6)
        for task in tasks:
            contract = (await task).contract
            a, b = [await payload(e, contract) for e in (alone, together)]
            assert torch.allclose(a, b, rtol=0, atol=1e-5 * float(a.abs().max()))


async def payload(e: EncoderEngine, contract: Contract) -> torch.Tensor:
    sealed = await e.store.get(contract.key)
    assert sealed is not None
    opened = open_entry(sealed, contract, tag_secret(WORKERS, ROOT))
    assert isinstance(opened, torch.Tensor)
    return opened


async def test_two_tenants_share_no_entry(model: Model) -> None:
    async with engine(model) as e:
        one = await e.announce([frame(5)], plan(model), root=ROOT, lease=Lease.of(1))
        other = await e.announce([frame(5)], plan(model), root=bytes([1]) * 32, lease=Lease.of(1))
        assert one.contract.key != other.contract.key and e.counts.encoded_units == 2


async def test_what_is_not_finite_is_never_published_and_the_neighbour_is(model: Model) -> None:
    async with engine(model) as e:
        encode = e.half.encode

        def spoiling(
            units: Sequence[torch.Tensor], attention: VarlenAttention, trunk: Trunk | None = None
        ) -> list[torch.Tensor]:
            made = encode(units, attention, trunk)
            for one, unit in zip(made, units, strict=True):
                if tuple(unit.shape) == (1, 3, 128, 128):
                    one.view(-1)[-1] = torch.nan
            return made

        e.half.encode = spoiling  # type: ignore[method-assign]
        with held(e):
            sizes = [(64, 64), (128, 128), (64, 96)]
            tasks = [
                asyncio.create_task(e.announce([frame(i, *size)], plan(model, *size), root=ROOT, lease=Lease.of(1)))
                for i, size in enumerate(sizes)
            ]
            await until(lambda: e.in_flight == 3)
        first, spoiled, last = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(spoiled, ServerError) and (spoiled.code, spoiled.reason) == ("INTERNAL", "NONFINITE")
        assert not isinstance(first, BaseException) and not isinstance(last, BaseException)
        assert e.store.stats().puts == 2 and e.in_flight == 0


async def test_a_store_that_is_full_of_pinned_entries_is_waited_for_and_then_refused(model: Model) -> None:
    async with engine(model, budget=12_000) as e:
        lease = Lease.of(60)
        one = await e.announce([frame(7)], plan(model), root=ROOT, lease=lease)
        with pytest.raises(Overloaded) as caught:
            await e.announce([frame(8)], plan(model), root=ROOT, lease=Lease.of(0.05))
        assert caught.value.reason == "CACHE_FULL" and caught.value.retryable
        assert await e.store.get(one.contract.key) is not None, "what was pinned is still there"
        waiting = asyncio.create_task(e.announce([frame(8)], plan(model), root=ROOT, lease=Lease.of(60)))
        await until(lambda: e.store.stats().refusals > 3)
        await e.store.release(one.contract.key, lease.id)
        assert not (await waiting).cached


async def test_an_entry_larger_than_the_store_is_refused_at_once(model: Model) -> None:
    async with engine(model, budget=1_000) as e:
        with pytest.raises(Overloaded) as caught:
            await e.announce([frame(9)], plan(model), root=ROOT, lease=Lease.of(60))
        assert caught.value.reason == "CACHE_FULL" and not caught.value.retryable


async def test_the_pins_of_callers_that_left_are_not_kept(model: Model) -> None:
    """The leader leaves while a follower waits; and callers leave just when the entry has come."""
    async with engine(model) as e:
        with held(e):
            tasks = [
                asyncio.create_task(e.announce([frame(11)], plan(model), root=ROOT, lease=Lease.of(60))) for _ in "ab"
            ]
            await until(lambda: e.counts.joined_units == 1)
            tasks[0].cancel()
            await asyncio.sleep(0.01)
        follower = await tasks[1]
        assert follower.contract is not None
        pinned = e.store.stats().pinned_bytes
        assert pinned > 0, "the follower's own pin"
        await e.store.discard(follower.contract.key)

        leases = [Lease.of(60) for _ in range(6)]
        tasks = [asyncio.create_task(e.announce([frame(12)], plan(model), root=ROOT, lease=lease)) for lease in leases]
        for _ in range(10**6):
            if e.store.stats().puts == 2:
                break
            await asyncio.sleep(0)  # to be there in the very turn in which the entry has come
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result, lease in zip(results, leases, strict=True):
            if not isinstance(result, BaseException):  # told before it could be cancelled: the pin is the caller's
                await e.store.release(result.contract.key, lease.id)
        assert e.store.stats().pinned_bytes == 0


async def test_a_unit_that_breaks_the_model_fails_alone_and_not_its_batch(model: Model) -> None:
    async with engine(model) as e:
        encode = e.half.encode

        def picky(
            units: Sequence[torch.Tensor], attention: VarlenAttention, trunk: Trunk | None = None
        ) -> list[torch.Tensor]:
            if any(tuple(unit.shape) == (1, 3, 128, 128) for unit in units):
                raise MemoryError("no room for that one")
            return encode(units, attention, trunk)

        e.half.encode = picky  # type: ignore[method-assign]
        with held(e):
            sizes = [(64, 64), (128, 128), (64, 96)]
            tasks = [
                asyncio.create_task(e.announce([frame(i, *size)], plan(model, *size), root=ROOT, lease=Lease.of(1)))
                for i, size in enumerate(sizes)
            ]
            await until(lambda: e.in_flight == 3)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, MemoryError) for result in results] == [False, True, False]
        assert e.counts.encoded_units == 2 and e.in_flight == 0


async def test_closing_fails_what_is_on_its_way(model: Model) -> None:
    async with engine(model) as e:
        with held(e):
            task = asyncio.create_task(e.announce([frame(13)], plan(model), root=ROOT, lease=Lease.of(1)))
            await until(lambda: e.in_flight == 1)
            closing = asyncio.create_task(e.close())
            with pytest.raises(Unavailable) as caught:
                await task
        await closing
    assert caught.value.reason == "DRAINING" and caught.value.retryable


class Slow(MemoryStore):
    """A store whose puts wait until they may go on."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.putting = asyncio.Event()
        self.may = asyncio.Event()

    async def put(
        self,
        entry: Sealable,
        key: EntryKey,
        *,
        lease: Lease | None = None,
        owner: bytes = NOBODY,
        shared: bool = False,
    ) -> Place:
        place = await super().put(entry, key, lease=lease, owner=owner, shared=shared)
        self.putting.set()
        await self.may.wait()
        return place


async def test_pins_follow_who_comes_and_who_leaves_while_an_entry_is_put(model: Model) -> None:
    store, shown = Slow(), plan(model)
    first, second = Lease.of(60), Lease.of(60)
    async with engine(model, store=store) as encoder:
        leaving = asyncio.create_task(encoder.announce([frame(1)], shown, root=ROOT, lease=first))
        await store.putting.wait()
        joining = asyncio.create_task(encoder.announce([frame(1)], shown, root=ROOT, lease=second))
        await until(lambda: encoder.counts.joined_units == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        store.may.set()
        announced = await joining
        assert store.stats().pinned_bytes > 0, "who joined has a pin"
        await store.release(announced.contract.key, second.id)
        assert store.stats().pinned_bytes == 0, "who left has none"


@pytest.mark.parametrize("same_tenant", [True, False])
async def test_a_picture_is_told_after_a_pass_or_two_whatever_a_video_has_queued(
    model: Model, same_tenant: bool
) -> None:
    async with engine(model, max_units=4) as e:
        told: list[str] = []

        async def announce(name: str, seed: int, share: Share) -> None:
            await e.announce([frame(seed)], plan(model), root=ROOT, lease=Lease.of(60), share=share)
            told.append(name)

        video = e.share(ROOT)
        picture = e.share(ROOT) if same_tenant else e.share(ROOT, key=b"another")
        with held(e):
            tasks = [asyncio.create_task(announce("frame", seed, video)) for seed in range(60)]
            await until(lambda: e.in_flight == 60)
            tasks.append(asyncio.create_task(announce("picture", 60, picture)))
            await until(lambda: e.in_flight == 61)
        await asyncio.gather(*tasks)
        assert told.index("picture") < 8, "the pass that had begun, and the one it is in"


async def test_a_tenant_whose_entries_find_no_room_keeps_nobody_else_from_the_model(model: Model) -> None:
    class OneTenantsFull(MemoryStore):
        async def put(
            self,
            entry: Sealable,
            key: EntryKey,
            *,
            lease: Lease | None = None,
            owner: bytes = NOBODY,
            shared: bool = False,
        ) -> Place:
            if owner == owner_of(ROOT) and not room.is_set():
                raise full(1, 2)
            return await super().put(entry, key, lease=lease, owner=owner, shared=shared)

    room, other = asyncio.Event(), bytes([1]) * 32
    async with engine(model, max_units=2, store=OneTenantsFull(1 << 24)) as e:
        stuck = [
            asyncio.create_task(e.announce([frame(i)], plan(model), root=ROOT, lease=Lease.of(60))) for i in range(10)
        ]
        await until(lambda: bool(e.counts.batches))
        for i in range(6):
            await e.announce([frame(i)], plan(model), root=other, lease=Lease.of(60))
        assert not any(task.done() for task in stuck)
        assert sum(e.counts.batches) < 6 + 10, "no more of it is encoded than has room to wait"
        room.set()
        await asyncio.gather(*stuck)
