"""Records of media in a store: believed as they were written, by who wrote them, and in no other state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chiasm.cache.arena import ArenaStore
from chiasm.cache.form import Form
from chiasm.cache.memory import MemoryStore
from chiasm.cache.sealed import EntryKey, Sealed
from chiasm.cache.store import NOBODY, EntryStore, Lease
from chiasm.media.sample import SamplingOptions
from chiasm.models.family import MediumPlan
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service.memo import MOST_BYTES, Asked, Memo, Remembered
from tests.cache.arenas import KIB, entry, key, small_region

ROOT, IDENTITY, SECRET = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
PLAN = MediumPlan("video", 3, 64, 64, (16, 16), 5, False)
ASKED = Asked(ROOT, bytes([4]) * 32, pb.MEDIA_KIND_VIDEO, SamplingOptions(), Form.CROSS_KV)
PROBE = pb.Probe(kind=pb.MEDIA_KIND_VIDEO, format="mov,mp4", frames_in_file=9, flags=["rotation_applied"])


def remembered(units: int = 3) -> Remembered:
    grid = pb.Grid(t=1, h=16, w=16)
    sized = epb.EncodeSized(
        final=True,
        units=[
            pb.Unit(index=i, grid=grid, tokens=5, frames=[pb.UnitFrame(file_index=2 * i)], key=key(f"unit {i}"))
            for i in range(units)
        ],
    )
    return Remembered(sized, pb.MediaUsage(frames_decoded=units, units=units, flags=["truncated"]))


@pytest.fixture(params=["memory", "arena"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EntryStore]:
    if request.param == "memory":
        yield MemoryStore(300 * KIB)
        return
    region = small_region(tmp_path / "arena", 300 * KIB)
    yield ArenaStore(region)
    region.close()


def memo(store: EntryStore, *, identity: bytes = IDENTITY, secret: bytes = SECRET) -> Memo:
    return Memo(store, identity=identity, workers_secret=secret)


async def knows(one: Memo, asked: Asked = ASKED, plan: MediumPlan = PLAN) -> tuple[bool, bool]:
    """Whether it knows what a medium is, and what became of it under a plan."""
    return await one.probe(asked) is not None, await one.units(asked, plan) is not None


async def test_what_was_remembered_is_known_to_every_encoder_of_the_store(store: EntryStore) -> None:
    await memo(store).remember(ASKED, PLAN, PROBE, remembered())
    other = memo(store)
    assert await other.probe(ASKED) == PROBE
    assert await other.units(ASKED, PLAN) == remembered()
    assert (other.hits, other.misses, other.rejected) == (1, 0, 0)
    assert store.stats().pinned_bytes == 0


async def test_a_video_of_which_fewer_frames_came_is_known_as_it_came(store: EntryStore) -> None:
    await memo(store).remember(ASKED, PLAN, PROBE, remembered(2))
    assert await memo(store).units(ASKED, PLAN) == remembered(2)


async def test_whatever_is_asked_otherwise_is_unknown(store: EntryStore) -> None:
    one = memo(store)
    await one.remember(ASKED, PLAN, PROBE, remembered())
    for asked in (
        ASKED._replace(root=bytes(32)),
        ASKED._replace(digest=bytes(32)),
        ASKED._replace(kind=pb.MEDIA_KIND_IMAGE),
        ASKED._replace(options=SamplingOptions(fps=1.0)),
        ASKED._replace(options=SamplingOptions(every_frame=True)),
        ASKED._replace(options=SamplingOptions(timestamps=(0.0, 1.0))),
    ):
        assert await knows(one, asked) == (False, False)
    for plan in (
        replace(PLAN, frames=2),
        replace(PLAN, span=2),
        replace(PLAN, height=32, width=128),
        replace(PLAN, upscaled=True),
    ):
        assert await knows(one, plan=plan) == (True, False)
    assert await knows(memo(store, identity=bytes(32))) == (False, False)
    assert one.rejected == 0, "none of it was even found"


async def test_a_record_under_another_secret_is_not_believed(store: EntryStore) -> None:
    await memo(store, secret=bytes(32)).remember(ASKED, PLAN, PROBE, remembered())
    one = memo(store)
    assert await knows(one) == (False, False)
    assert one.rejected == 2
    assert store.stats().entries == 0, "nor kept"


class Altered(MemoryStore):
    """A store that gives out its entries as `change` makes them."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.change: dict[EntryKey, Sealed] = {}

    async def get(self, key: EntryKey, place: object = None, *, owner: bytes = NOBODY) -> Sealed | None:
        return self.change.get(key) or await super().get(key)


def changed(sealed: Sealed, rng: random.Random) -> Iterator[Sealed]:
    """The record with one byte changed, at every byte; cut at every length; and longer."""
    parts = [sealed.header, bytes(sealed.payload), sealed.tag]
    for number, part in enumerate(parts):
        for at in range(len(part)):
            flipped = bytearray(part)
            flipped[at] ^= 1 << rng.randrange(8)
            for other in (bytes(flipped), part[:at], part + part[: at + 1]):
                made = [*parts]
                made[number] = other
                yield Sealed(made[0], memoryview(made[1]), made[2])


async def test_a_record_that_was_changed_anywhere_is_not_believed() -> None:
    rng = random.Random(5)
    store = Altered()
    await memo(store).remember(ASKED, PLAN, PROBE, remembered())
    whole = {name: await store.get(name) for name in store.held()}
    tried = 0
    for name, sealed in whole.items():
        assert sealed is not None
        for other in changed(sealed, rng):
            store.change = {name: other}
            one = memo(store)
            known = await knows(one)
            assert known in ((True, False), (False, True)) and one.rejected == 1
            await store.put(sealed, name)  # it was forgotten
            tried += 1
    assert tried > 1000
    store.change = {}
    assert await knows(memo(store)) == (True, True)


async def test_records_in_each_others_place_are_not_believed() -> None:
    store = Altered()
    await memo(store).remember(ASKED, PLAN, PROBE, remembered())
    await memo(store).remember(ASKED._replace(digest=bytes(32)), PLAN, pb.Probe(format="another"), remembered(1))
    records = {name: sealed for name in store.held() if (sealed := await store.get(name)) is not None}
    for name in records:
        for other, sealed in records.items():
            if other != name:
                store.change = {name: sealed}
                for asked in (ASKED, ASKED._replace(digest=bytes(32))):
                    probe, units = await memo(store).probe(asked), await memo(store).units(asked, PLAN)
                    assert probe is None or probe.format == ("another" if asked is not ASKED else PROBE.format)
                    assert units is None or len(units.sized.units) == (1 if asked is not ASKED else 3)
                await store.put(records[name], name)


@pytest.mark.parametrize(
    "lacking",
    ["final", "key", "short key", "frame", "order", "grid", "tokens", "units", "more units"],
)
async def test_a_record_that_says_less_than_all_is_not_believed(lacking: str) -> None:
    """As another release might have written it."""
    sized = remembered().sized
    first = sized.units[0]
    if lacking == "final":
        sized.final = False
    elif lacking == "key":
        first.ClearField("key")
    elif lacking == "short key":
        first.key = bytes(31)
    elif lacking == "frame":
        first.ClearField("frames")
    elif lacking == "order":
        first.index = 1
    elif lacking == "grid":
        first.grid.h = 8
    elif lacking == "tokens":
        first.tokens = 6
    elif lacking == "units":
        sized.ClearField("units")
    else:
        sized.units.append(sized.units[-1])
        sized.units[-1].index = 3
    one = memo(MemoryStore(1 << 20))
    await one.remember(ASKED, PLAN, PROBE, Remembered(sized, pb.MediaUsage()))
    assert await knows(one) == (True, False)


async def test_a_medium_too_large_for_a_record_is_not_remembered() -> None:
    store, large = MemoryStore(1 << 24), remembered()
    large.usage.flags.append("x" * MOST_BYTES)
    await memo(store).remember(ASKED, PLAN, PROBE, large)
    assert await knows(memo(store)) == (False, False)


async def test_a_store_that_is_full_of_pinned_entries_has_no_memory(store: EntryStore) -> None:
    await store.put(entry(300 * KIB), key("all"), lease=Lease.of(60))
    await memo(store).remember(ASKED, PLAN, PROBE, remembered())
    assert await knows(memo(store)) == (False, False)


async def test_records_are_evicted_as_entries_are(store: EntryStore) -> None:
    await memo(store).remember(ASKED, PLAN, PROBE, remembered())
    await store.put(entry(300 * KIB), key("all"))
    assert await knows(memo(store)) == (False, False)
