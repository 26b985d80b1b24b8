"""What a region may cost and when it is given back: memory that runs out, files that are cut, processes that end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chiasm.cache.arena import ArenaStore
from chiasm.cache.region import Region, sweep
from chiasm.cache.store import Lease
from chiasm.cli import run_folder
from chiasm.errors import Unsupported
from chiasm.models.finding import SHIPPED
from tests.cache.arenas import KIB, entry, key, same, small_region
from tests.cache.test_region import ROOT, goes_on, process, says
from tests.cli.serving import processes as processes_of
from tests.cli.serving import until
from tests.mounts import fill, free, tmpfs

WRITER = """
import asyncio
from chiasm.cache.arena import ArenaStore
from tests.cache.arenas import entry, key
region = Region.open(path)
store = ArenaStore(region)
print("there", flush=True)
sys.stdin.readline()
budget = store.stats().budget
for number in range(200):
    asyncio.run(store.put(entry(budget // 7, number), key(f"{number}")))
    assert asyncio.run(store.get(key(f"{number}"))) is not None
print("done", flush=True)
"""


def test_a_region_that_a_full_file_system_has_no_room_for_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", "1m") as path:
        before = free(path)
        with pytest.raises(Unsupported) as caught:
            Region.create(path / "arena", 2 << 20)
        assert caught.value.reason == "ARENA_NO_SPACE"
        assert (caught.value.facts["needed"], int(caught.value.facts["free"]) > 0) == (2 << 20, True)
        assert list(path.iterdir()) == [] and free(path) == before


def test_a_file_system_that_becomes_full_kills_no_writer(tmp_path: Path) -> None:
    """All of a region was taken when it was made: not one page is left to be refused later, which would be SIGBUS."""
    with tmpfs(tmp_path / "shm", "2m") as path:
        region = Region.create(path / "arena", 1 << 20)
        fill(path)
        with process(WRITER, path / "arena") as writer:
            assert says(writer) == "there"
            goes_on(writer)
            assert says(writer) == "done"
            assert writer.wait() == 0
        region.close()


def test_a_run_folder_that_a_full_file_system_has_no_room_for_leaves_nothing(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", "64k") as path:
        fill(path)
        with pytest.raises(OSError, match="No space left"):
            run_folder.RunFolder(path)
        assert [file.name for file in path.iterdir()] == ["filling"]


def test_a_file_that_is_cut_short_ends_who_touches_it_and_is_not_opened_again(tmp_path: Path) -> None:
    """Only its own user can do that. It costs processes, never an answer: a page that is gone cannot be read."""
    path = tmp_path / "arena"
    region = Region.create(path, 1 << 20)
    with process(WRITER, path) as writer:
        assert says(writer) == "there"
        os.truncate(path, 64 * KIB)
        goes_on(writer)
        assert writer.wait() == -signal.SIGBUS
    with pytest.raises(Unsupported, match="its header says 1048576 bytes, it has 65536"):
        Region.open(path)
    region.close()
    assert sweep(tmp_path) == [path]


async def test_a_reader_that_ends_leaves_the_region_to_the_others(tmp_path: Path) -> None:
    region = small_region(tmp_path / "arena", 800 * KIB)
    store = ArenaStore(region)
    put = entry(300 * KIB, 5)
    place = await store.put(put, key("a"), lease=Lease.of(60))
    code = """
import asyncio
from chiasm.cache.arena import ArenaStore
from chiasm.cache.store import Lease
from tests.cache.arenas import entry, key, same
region = Region.open(path)
store = ArenaStore(region)
assert asyncio.run(store.pin(key("a"), Lease.of(3600))) is not None
assert same(asyncio.run(store.get(key("a"))), entry(300 * 1024, 5))
"""
    with process(code, region.path) as reader:
        assert await asyncio.to_thread(reader.wait) == 0
    assert region.path.exists() and not region.alive(1)
    assert same(await store.get(key("a"), place), put)
    await store.put(entry(400 * KIB, 6), key("b"))
    region.close()


SYSTEM = """
import asyncio, sys
from pathlib import Path
from chiasm.cli.interrupts import Interrupts
from chiasm.cli.system import Options, running
from chiasm.client import AsyncClient, Video

async def main():
    options = Options(
        folder=Path(sys.argv[2]), name="digits", listen="127.0.0.1:0", arena_bytes=16 << 20, parent=Path(sys.argv[1])
    )
    async with running(options, lambda line: None, Interrupts()) as system, AsyncClient(system.target) as client:
        answer = await client.generate("digits", [Video(Path(sys.argv[3])), "Read the digits."])
        print(answer.text, flush=True)
        await system.supervisor.wait()

asyncio.run(main())
"""


def killed(path: Path) -> Path:
    """Starts a system in `path`, waits for an answer, kills all of its processes. Returns the folder it leaves."""
    clip = SHIPPED / "digits" / "held_out" / "clip_8.mp4"
    system = subprocess.Popen(
        [sys.executable, "-c", SYSTEM, str(path), str(SHIPPED / "digits"), str(clip)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        assert system.stdout is not None and system.stdout.readline(), "it answers"
        (folder,) = path.glob("chiasm-*")
        region = Region.open(folder / "arena")
        assert ArenaStore(region).stats().entries >= 8
        others = [slot for slot in range(8) if slot != region.slot and region.alive(slot)]
        assert len(others) == 3, "supervisor, encoder and decoder"
    finally:
        # The supervisor itself first, so that it does not even begin to end the others in order.
        system.kill()
        system.communicate()
        for pid in processes_of(str(path)):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not processes_of(str(path)) and not any(region.alive(slot) for slot in others))
    region.close()
    return folder


def test_a_system_whose_processes_are_all_killed_gives_its_memory_back_to_the_next(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "shm", "64m") as path:
        before = free(path)
        for _ in range(2):
            folder = killed(path)
            assert free(path) <= before - (16 << 20)
            assert run_folder.sweep(path) == [folder]
            assert list(path.iterdir()) == []
            until(lambda: free(path) == before)  # the kernel takes a moment to take a killed process apart
