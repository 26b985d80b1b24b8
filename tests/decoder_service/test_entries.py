"""Right keys and values or none: an entry that is gone, changed or foreign is asked for again, and the answer is the
same."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from chiasm.cache import wire
from chiasm.cache.arena import ArenaStore
from chiasm.cache.entry import Contract
from chiasm.cache.form import Form
from chiasm.cache.memory import MemoryStore
from chiasm.cache.place import InArena, InMemory, Place
from chiasm.cache.region import Region
from chiasm.cache.sealed import EntryKey, Sealed
from chiasm.cache.store import NOBODY
from chiasm.errors import ServerError
from chiasm.local import LocalService
from chiasm.rpc.v1 import common_pb2 as pb
from tests import digits
from tests.asking import ask, question, running, video
from tests.decoder_service.halves import CLOSE, halves, sized
from tests.e2e.test_requests import settled


def flipped(sealed: Sealed) -> Sealed:
    payload = bytearray(sealed.payload)
    payload[len(payload) // 2] ^= 1
    return Sealed(sealed.header, memoryview(payload), sealed.tag)


class Meddling(MemoryStore):
    """A store that hands a decoder something else than it was given, `times` times, and `each` times of one entry: two
    of which one is met twice are another story. An encoder only pins."""

    def __init__(self, change: Callable[[Sealed], Sealed | None], times: int, each: int = 1) -> None:
        super().__init__(1 << 24)
        self.change = change
        self.times = times
        self.left = defaultdict[EntryKey, int](lambda: each)

    async def get(self, key: EntryKey, place: Place | None = None, *, owner: bytes = NOBODY) -> Sealed | None:
        sealed = await super().get(key, place)
        if sealed is None or not self.times or not self.left[key]:
            return sealed
        self.times -= 1
        self.left[key] -= 1
        changed = self.change(sealed)
        if changed is None:
            await self.discard(key)
        return changed


def meddle(service: LocalService, change: Callable[[Sealed], Sealed | None], times: int, *, each: int = 1) -> None:
    store = Meddling(change, times, each)
    service.store = service.encoder.store = service.decoder.store = store


CHANGES: dict[str, Callable[[Sealed], Sealed | None]] = {
    "gone": lambda sealed: None,
    "bit": flipped,
    "cut": lambda sealed: Sealed(sealed.header, sealed.payload[:-2], sealed.tag),
    "tag": lambda sealed: Sealed(sealed.header, sealed.payload, bytes(32)),
    "header": lambda sealed: Sealed(bytes(len(sealed.header)), sealed.payload, sealed.tag),
}


REASONS = {"bit": "tag", "cut": "size", "tag": "tag", "header": "header"}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_doubtful_entry_is_encoded_again_and_the_answer_is_the_same(change: str) -> None:
    clip = digits.shipped_clips()[1]
    request = question("Read the digits.", video(clip.path.read_bytes()))
    async with running() as service:
        right = await ask(service, request)
    async with running() as service:
        meddle(service, CHANGES[change], 2)
        answer = await ask(service, request)
        assert service.encoder.counts.encoded_units == len(clip.digits) + 2
        rejections = service.decoder.rejections
        assert +rejections.counts == ({REASONS[change]: 2} if change in REASONS else {})
        assert rejections.absent == (2 if change == "gone" else 0)
        await settled(service)
    assert answer.ids == right.ids


async def test_an_entry_that_is_doubtful_twice_fails_the_request_and_frees_everything() -> None:
    clip = digits.shipped_clips()[0]
    async with running() as service:
        meddle(service, flipped, 10**6, each=2)
        with pytest.raises(ServerError) as caught:
            await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
        assert caught.value.reason == "ENTRY_MISSING" and caught.value.retryable
        assert caught.value.item == "messages[0].content[1]"
        await settled(service)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def regions(path: Path) -> Iterator[list[Region]]:
    """One region, opened twice, as two processes do."""
    regions = [Region.create(path, 1 << 20), Region.open(path)]
    yield regions
    for region in regions:
        region.close()


class Recording(ArenaStore):
    """Remembers where it was told to look, and may be made to lose some of what it is asked for before it looks."""

    def __init__(self, region: Region, losing: int) -> None:
        super().__init__(region)
        self.losing = losing
        self.lost: set[EntryKey] = set()

    async def get(self, key: EntryKey, place: Place | None = None, *, owner: bytes = NOBODY) -> Sealed | None:
        self.places = [*getattr(self, "places", []), place]
        if len(self.lost) < self.losing and key not in self.lost:
            self.lost.add(key)
            await self.discard(key)
        return await super().get(key, place)


async def test_units_that_are_announced_twice_or_do_not_fit_leave_no_pin() -> None:
    """The store of `halves` holds no pin at its end."""
    frames = [digits.frame(cells, np.random.default_rng(1)) for cells, _ in digits.held_out_digits()[:3]]
    async with halves() as system:
        twice = [*await system.ready(frames), *await system.ready(frames)]
        told = await system.told(system.opened(0, "Read the digits."), sized(3), *twice, CLOSE)
        assert told.finished is not None
        wrong = await system.ready(frames)
        with pytest.raises(ServerError) as caught:
            await system.told(system.opened(0, "Read the digits."), sized(3, side=8), *wrong, CLOSE)
        assert caught.value.reason == "FEATURE_COUNT_MISMATCH"


async def test_a_call_that_ends_while_it_gives_a_pin_back_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of `halves` holds no pin at its end."""
    frames = [digits.frame(cells, np.random.default_rng(1)) for cells, _ in digits.held_out_digits()[:3]]
    async with halves() as system:
        release, called = system.store.release, asyncio.Event()

        async def stuck(key: EntryKey, lease_id: bytes) -> None:
            if not called.is_set():
                called.set()
                await asyncio.Event().wait()
            await release(key, lease_id)

        ready = await system.ready(frames)
        monkeypatch.setattr(system.store, "release", stuck)
        telling = asyncio.create_task(system.told(system.opened(0, "Read the digits."), sized(3), *ready, CLOSE))
        await called.wait()
        telling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await telling


def reshaped(entry: pb.Entry, axis: int, by: int) -> pb.Entry:
    """An announcement of another shape that agrees with itself."""
    contract = wire.read(entry)
    shape = list(contract.shape)
    shape[axis] += by
    made = wire.announce(replace(contract, shape=tuple(shape)), InMemory())
    made.lease.CopyFrom(entry.lease)
    return made


def remade(entry: pb.Entry, **changes: object) -> pb.Entry:
    made = wire.announce(replace(wire.read(entry), **changes), InMemory())  # type: ignore[arg-type]
    made.lease.CopyFrom(entry.lease)
    return made


MISMATCHES: dict[str, tuple[Callable[[pb.Entry], pb.Entry], str, str]] = {
    "layers": (lambda entry: reshaped(entry, 0, 1), "4", "3"),
    "heads": (lambda entry: reshaped(entry, 2, -1), "1", "2"),
    "tokens": (lambda entry: reshaped(entry, 3, 2), "7", "5"),
    "width": (lambda entry: reshaped(entry, 4, 32), "64", "32"),
    "grid": (lambda entry: remade(entry, grid=(2, 8)), "2 x 8", "4 x 4"),
    "dtype": (lambda entry: remade(entry, dtype=torch.bfloat16), "bfloat16", "float32"),
    "form": (lambda entry: remade(entry, form=Form.CROSS_KV_INT8), "cross_kv_int8", "cross_kv"),
}


@pytest.mark.parametrize("field", MISMATCHES)
async def test_an_announcement_that_does_not_fit_is_refused_with_the_field_and_both_values(field: str) -> None:
    """And with no pin left behind: the store of `halves` holds none at its end."""
    change, got, needed = MISMATCHES[field]
    frames = [digits.frame(digits.held_out_digits()[0][0], np.random.default_rng(1))]
    async with halves() as system:
        (ready,) = await system.ready(frames)
        ready.entry.CopyFrom(change(ready.entry))
        with pytest.raises(ServerError) as caught:
            await system.told(system.opened(0, "Read the digits."), sized(1), ready, CLOSE)
        error = caught.value
        assert (error.reason, error.item) == ("FEATURE_COUNT_MISMATCH", "slot 0")
        assert error.facts == {"unit": 0, "field": field, "got": got, "needed": needed}
        assert all(part in str(error) for part in (field, got, needed))


async def test_a_unit_that_was_not_sized_is_refused_with_both_counts() -> None:
    frames = [digits.frame(digits.held_out_digits()[i][0], np.random.default_rng(1)) for i in range(2)]
    async with halves() as system:
        first, second = await system.ready(frames)
        with pytest.raises(ServerError) as caught:
            await system.told(system.opened(0, "Read the digits."), sized(1), first, second, CLOSE)
        assert caught.value.facts == {"unit": 1, "field": "units", "got": "2 or more", "needed": "1"}
        await system.store.release(second.entry.key, second.entry.lease.lease_id)  # nobody knows whose it is


async def test_an_entry_of_another_contract_in_the_store_is_a_miss_that_names_both_values() -> None:
    """What was announced fits, what lies under the key does not, twice."""

    def other(sealed: Sealed) -> Sealed:
        found = Contract.unpack(sealed.header)
        assert found is not None
        return Sealed(replace(found, grid=(2, 8)).pack(), sealed.payload, sealed.tag)

    clip = digits.shipped_clips()[0]
    async with running() as service:
        meddle(service, other, 10**6, each=2)
        with pytest.raises(ServerError) as caught:
            await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
        assert caught.value.reason == "ENTRY_MISSING" and not caught.value.retryable
        assert caught.value.facts == {"field": "grid", "got": "2 x 8", "needed": "4 x 4"}
        await settled(service)


@pytest.mark.parametrize("losing", [0, 3])
async def test_an_answer_over_an_arena_is_the_same_and_leaves_no_pin(regions: list[Region], losing: int) -> None:
    clip = digits.shipped_clips()[1]
    request = question("Read the digits.", video(clip.path.read_bytes()))
    async with running() as service:
        right = await ask(service, request)
    async with running() as service:
        encoding, decoding = ArenaStore(regions[0]), Recording(regions[1], losing)
        service.encoder.store, service.decoder.store = encoding, decoding
        for _ in range(2):
            service.decoder.flush()  # otherwise the second finds its units attached and reads nothing
            answer = await ask(service, request)
            assert answer.ids == right.ids
        assert service.encoder.counts.encoded_units == len(clip.digits) + losing
        assert decoding.stats().hits == 2 * len(clip.digits)
        assert all(isinstance(place, InArena) for place in decoding.places)
        assert encoding.stats().pinned_bytes == decoding.stats().pinned_bytes == 0
        assert encoding.stats().entries == len(clip.digits)


async def test_an_entry_in_another_arena_is_a_miss_that_is_told(regions: list[Region], tmp_path: Path) -> None:
    """Whoever pairs workers of two nodes gets an error, and no wrong answer."""
    clip = digits.shipped_clips()[0]
    other = Region.create(tmp_path / "other", 1 << 20)
    async with running() as service:
        service.encoder.store, service.decoder.store = ArenaStore(regions[0]), ArenaStore(other)
        with pytest.raises(ServerError) as caught:
            await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
        assert caught.value.reason == "ENTRY_MISSING"
        await settled(service)
    other.close()
