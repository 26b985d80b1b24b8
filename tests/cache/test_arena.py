"""The arena between processes: nothing wrong is ever read, and a process that dies or stops anywhere takes nothing with
it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chiasm.cache.arena import ArenaStore
from chiasm.cache.entry import HEADER_BYTES as ENTRY_HEADER_BYTES
from chiasm.cache.entry import open_entry, seal
from chiasm.cache.place import InArena
from chiasm.cache.region import HEADER_BYTES, Region
from chiasm.cache.sealed import TAG_BYTES
from chiasm.cache.store import Lease
from chiasm.errors import Overloaded
from tests.cache.arenas import KIB, entry, key, same, small_region
from tests.cache.test_entry import SECRET, contract
from tests.waiting import until

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def region(path: Path) -> Iterator[Region]:
    """Of 8 units of 100 KiB."""
    region = small_region(path, 800 * KIB)
    yield region
    region.close()


class Forking:
    """Kills and stops processes in the middle of a put (`tests.cache.forking`)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cache.forking"],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._said()

    def put(self, region: Region, step: str, number: int, *, name: str, size: int) -> int:
        """The id of the process that was killed or stopped at a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{step} {number} {name} {size} {region.path}\n")
        self._process.stdin.flush()
        pid, told = self._said().split()
        assert int(told) == number, f"it never came to {step}"
        return int(pid)

    def end(self) -> None:
        self._process.communicate()

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture(scope="module")
def forking() -> Iterator[Forking]:
    forking = Forking()
    yield forking
    forking.end()


def at_once(put: Coroutine[Any, Any, T]) -> T:
    """Runs what has nothing to wait for, where an event loop runs already."""
    with pytest.raises(StopIteration) as caught:
        put.send(None)
    value: T = caught.value.value
    return value


KILLED_AT = ["locked", "evicting", "reserving", "reserved", "pinning", "copying", "publishing", "replacing"]


async def test_a_writer_killed_anywhere_loses_nothing_announced_and_leaks_nothing(
    region: Region, forking: Forking
) -> None:
    """A full arena; the one that dies would evict the oldest and replace one that is there."""
    for step in KILLED_AT:
        store = ArenaStore(region)
        announced = {name: entry(100 * KIB, ord(name)) for name in "abcdefgh"}
        leases = {name: Lease.of(3600) for name in "abcde"}
        places = {
            name: await store.put(sealed, key(name), lease=leases.get(name)) for name, sealed in announced.items()
        }
        forking.put(region, step, signal.SIGKILL, name="e", size=200 * KIB)

        for name in "abcd":
            assert same(await store.get(key(name), places[name]), announced[name]), (step, name)
        found = await store.get(key("e"), places["e"])
        assert same(found, announced["e"]) or same(found, entry(200 * KIB, 99)), step
        if step != "replacing":
            assert same(found, announced["e"]), "the old one is there until the new one is"

        for name in "abcde":
            await store.discard(key(name))
        rest = entry(800 * KIB, 1)
        await store.put(rest, key("all of it"))
        assert same(await store.get(key("all of it")), rest), step
        await store.flush()
        stats = store.stats()
        assert (stats.entries, stats.bytes, stats.pinned_bytes) == (0, 0, 0), step


async def test_what_one_left_half_written_is_taken_back_by_the_next_who_gets_its_slot(
    region: Region, forking: Forking
) -> None:
    forking.put(region, "copying", signal.SIGKILL, name="a", size=300 * KIB)
    mine = ArenaStore(region)
    assert mine.stats().bytes == 300 * KIB and mine.stats().entries == 0
    next_one = Region.open(region.path)
    assert next_one.slot == 1, "the dead one's"
    assert await ArenaStore(next_one).pin(key("a"), Lease.of(1)) is None
    assert mine.stats().bytes == 0
    next_one.close()


async def test_a_stopped_writer_keeps_what_it_is_writing_and_nothing_else(region: Region, forking: Forking) -> None:
    store = ArenaStore(region)
    pid = forking.put(region, "copying", signal.SIGSTOP, name="a", size=300 * KIB)
    await store.put(entry(500 * KIB), key("b"))
    with pytest.raises(Overloaded) as caught:
        await store.put(entry(600 * KIB), key("c"))
    assert caught.value.retryable
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not region.alive(1))
    await store.put(entry(600 * KIB), key("c"))
    assert await store.get(key("a")) is None


async def test_who_stops_with_the_lock_hangs_nobody(region: Region, forking: Forking) -> None:
    store = ArenaStore(region, patience=0.05)
    lease = Lease.of(3600)
    put = entry(100 * KIB, 1)
    place = await store.put(put, key("a"), lease=lease)
    pid = forking.put(region, "reserving", signal.SIGSTOP, name="b", size=100 * KIB)
    with pytest.raises(Overloaded) as caught:
        await store.put(put, key("c"))
    assert caught.value.reason == "CACHE_BUSY" and caught.value.retryable
    assert await store.pin(key("a"), Lease.of(1)) is None
    assert same(await store.get(key("a"), place), put), "reading takes no lock"
    assert same(await store.get(key("a")), put)
    await store.release(key("a"), lease.id)
    await store.discard(key("a"))
    assert store.stats().refusals == 1
    os.kill(pid, signal.SIGCONT)
    patient = ArenaStore(region, patience=30.0)
    await patient.release(key("a"), lease.id)
    await until(lambda: not region.alive(1))
    assert same(await patient.get(key("b")), entry(100 * KIB, 99)), "it went on where it was stopped"


async def test_a_worker_that_starts_again_finds_what_was_announced(path: Path, region: Region) -> None:
    first = Region.open(path)
    put = entry(200 * KIB, 5)
    place = await ArenaStore(first).put(put, key("a"), lease=Lease.of(60))
    first.close()
    again = Region.open(path)
    store = ArenaStore(again)
    assert same(await store.get(key("a"), place), put)
    assert store.stats().pinned_bytes == 200 * KIB, "pins outlive who took them, until they end"
    again.close()


async def test_what_one_process_puts_another_pins_gets_and_releases(path: Path, region: Region) -> None:
    other_region = Region.open(path)
    writer, reader = ArenaStore(region), ArenaStore(other_region)
    lease = Lease.of(60)
    put = entry(300 * KIB, 5)
    place = await writer.put(put, key("a"), lease=lease)
    assert isinstance(place, InArena) and place.arena_id == region.arena_id
    at = place.byte_offset - HEADER_BYTES
    assert region.body[at : at + put.payload.nbytes] == put.payload, "it lies where it is said to"
    pinned = await reader.pin(key("a"), Lease.of(0.0))
    assert pinned is not None and pinned.place == place
    assert same(await reader.get(key("a"), place), put)
    assert reader.stats().pinned_bytes == writer.stats().pinned_bytes == 300 * KIB
    await reader.release(key("a"), lease.id)
    assert writer.stats().pinned_bytes == 0
    await reader.discard(key("a"))
    assert await writer.get(key("a"), place) is None
    other_region.close()


async def test_a_place_that_was_given_away_is_a_miss(region: Region) -> None:
    store = ArenaStore(region)
    place = await store.put(entry(800 * KIB, 1), key("a"))
    await store.put(entry(800 * KIB, 2), key("b"))
    assert await store.get(key("a"), place) is None
    assert await store.get(key("b"), place) is not None, "under its own key it is found wherever it lies"


async def test_an_entry_put_again_is_found_from_its_old_place(region: Region) -> None:
    store = ArenaStore(region)
    place = await store.put(entry(100 * KIB, 1), key("a"))
    again = entry(100 * KIB, 2)
    assert await store.put(again, key("a")) != place
    assert same(await store.get(key("a"), place), again)


@pytest.mark.parametrize("size", [4 * KIB, 400 * KIB])
async def test_an_entry_that_is_overwritten_while_it_is_copied_out_is_a_miss(
    path: Path, region: Region, size: int
) -> None:
    """Where it is copied here and now, and where a thread does it."""
    other_region = Region.open(path)
    other = ArenaStore(other_region)

    def overwrite() -> None:
        at_once(other.discard(key("a")))
        for i in range(800 * KIB // (4 * KIB)):
            at_once(other.put(entry(4 * KIB, 2), key(f"b{i}")))

    steps: list[str] = []

    def told(step: str) -> None:
        if step == "reading" and step not in steps:
            overwrite()
        steps.append(step)

    store = ArenaStore(region, step=told)
    place = await store.put(entry(size, 1), key("a"))
    assert await store.get(key("a"), place) is None
    assert "reading" in steps
    assert same(await store.get(key("b7")), entry(4 * KIB, 2))
    assert (store.stats().hits, store.stats().misses) == (1, 1)
    other_region.close()


async def test_a_caller_that_leaves_while_its_entry_is_copied_leaves_nothing(region: Region) -> None:
    copying, gate = threading.Event(), threading.Event()

    def held(step: str) -> None:
        if step == "copying" and not gate.is_set():
            copying.set()
            gate.wait()

    store = ArenaStore(region, step=held)
    task = asyncio.create_task(store.put(entry(500 * KIB, 1), key("a"), lease=Lease.of(60)))
    await until(copying.is_set)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        await store.put(entry(500 * KIB, 2), key("b"))
    assert store.stats().bytes == 500 * KIB, "a thread still writes there"
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.pinned_bytes, stats.puts) == (0, 0, 0, 0)
    await store.put(entry(800 * KIB, 2), key("b"))


async def test_puts_of_one_key_at_once_leave_one_entry(path: Path, region: Region) -> None:
    other_region = Region.open(path)
    stores = [ArenaStore(region), ArenaStore(other_region)]
    leases = [Lease.of(60) for _ in range(4)]
    puts = [stores[i % 2].put(entry(190 * KIB, i), key("a"), lease=lease) for i, lease in enumerate(leases)]
    places = await asyncio.gather(*puts)
    stats = stores[0].stats()
    assert (stats.entries, stats.bytes, stats.pinned_bytes) == (1, 190 * KIB, 190 * KIB)
    for place in places:
        assert await stores[1].get(key("a"), place) is not None
    for lease in leases:
        assert stores[0].stats().pinned_bytes, "each has a pin of its own"
        await stores[0].release(key("a"), lease.id)
    assert stores[0].stats().pinned_bytes == 0
    other_region.close()


def test_processes_that_write_read_and_die_in_a_small_arena_read_nothing_wrong_and_lose_nothing(path: Path) -> None:
    region = small_region(path, 800 * KIB)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.cache.hammering", str(path), "300"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    counts = json.loads(ran.stdout)
    assert (counts["failed"], counts["killed"]) == (0, 20)
    assert counts.get("wrong", 0) == counts.get("lost", 0) == 0
    assert counts["put"] > 100 and counts["right"] > 100 and counts["evicted"] > 100, counts
    store = ArenaStore(region)
    everything = entry(800 * KIB, 1)
    # What the dead had pinned stays so for up to ten seconds.
    for number in range(40):
        asyncio.run(store.discard(key(f"{number}")))
    asyncio.run(store.put(everything, key("all of it")))
    assert same(asyncio.run(store.get(key("all of it"))), everything)
    region.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Region, ArenaStore, InArena]]:
    """A real entry in an arena."""
    region = small_region(tmp_path_factory.mktemp("arena") / "arena", 200 * KIB)
    store = ArenaStore(region)
    payload = torch.arange(contract().payload_bytes // 4, dtype=torch.float32).reshape(contract().shape)
    place = asyncio.run(store.put(seal(contract(), payload, SECRET), contract().key))
    assert isinstance(place, InArena)
    yield region, store, place
    region.close()


@given(st.data())
def test_one_byte_of_an_entry_that_is_changed_is_always_noticed(
    kept: tuple[Region, ArenaStore, InArena], data: st.DataObject
) -> None:
    region, store, place = kept
    sealed = asyncio.run(store.get(contract().key, place))
    assert sealed is not None and isinstance(open_entry(sealed, contract(), SECRET), torch.Tensor)
    size = contract().payload_bytes + ENTRY_HEADER_BYTES + TAG_BYTES
    at = place.byte_offset - HEADER_BYTES + data.draw(st.integers(0, size - 1))
    before = region.body[at]
    region.body[at] = before ^ data.draw(st.integers(1, 255))
    changed = asyncio.run(store.get(contract().key, place))
    region.body[at] = before
    assert changed is not None and isinstance(open_entry(changed, contract(), SECRET), str)
