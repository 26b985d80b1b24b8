"""Regions: made once and whole or not at all, opened only as what they say they are, gone with the last who has them
open."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chiasm.cache.region import HEADER_BYTES, MIN_BYTES, Region, sweep
from chiasm.errors import Unsupported

ROOT = Path(__file__).parents[2]


@contextmanager
def process(code: str, *args: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a few lines with `path` and `Region` at hand, says when it is there, and is killed."""
    given = "import sys\nfrom pathlib import Path\nfrom chiasm.cache.region import Region\npath = Path(sys.argv[1])\n"
    started = subprocess.Popen(
        [sys.executable, "-c", given + code, *map(str, args)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def says(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def goes_on(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()


def test_a_region_is_zero_allocated_in_full_and_its_users_alone(tmp_path: Path) -> None:
    region = Region.create(tmp_path / "arena", MIN_BYTES + 123)
    found = (tmp_path / "arena").stat()
    assert found.st_size == MIN_BYTES + 123 == HEADER_BYTES + region.body.nbytes
    assert found.st_blocks * 512 >= found.st_size
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert not any(region.body)
    region.close()


def test_all_who_open_it_share_its_bytes_and_its_name_and_have_slots_of_their_own(tmp_path: Path) -> None:
    made = Region.create(tmp_path / "arena", MIN_BYTES)
    opened = Region.open(tmp_path / "arena")
    opened.body[1000] = 77
    assert made.body[1000] == 77
    assert made.arena_id == opened.arena_id and len(made.arena_id) == 16
    assert made.slot != opened.slot
    assert made.alive(opened.slot) and opened.alive(made.slot) and made.alive(made.slot)
    slot = opened.slot
    opened.close()
    assert not made.alive(slot)
    made.close()


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    region = Region.create(tmp_path / "arena", MIN_BYTES)
    with pytest.raises(FileExistsError):
        Region.create(tmp_path / "arena", MIN_BYTES)
    again = Region.open_or_create(tmp_path / "arena", 2 * MIN_BYTES)
    assert (again.arena_id, again.nbytes) == (region.arena_id, MIN_BYTES)
    region.close()
    again.close()


def test_two_regions_have_two_names(tmp_path: Path) -> None:
    one, other = (Region.create(tmp_path / name, MIN_BYTES) for name in "ab")
    assert one.arena_id != other.arena_id
    one.close()
    other.close()


def test_processes_that_start_at_once_get_one_region(tmp_path: Path) -> None:
    code = """
print("there", flush=True)
sys.stdin.readline()
region = Region.open_or_create(path, 8 << 20)
print(region.arena_id.hex(), region.slot, "torch" in sys.modules, flush=True)
sys.stdin.readline()
"""
    path = tmp_path / "arena"
    with process(code, path) as a, process(code, path) as b, process(code, path) as c, process(code, path) as d:
        all_of_them = (a, b, c, d)
        assert [says(one) for one in all_of_them] == ["there"] * 4
        for one in all_of_them:
            goes_on(one)
        told = [says(one).split() for one in all_of_them]
    ids, slots, torches = zip(*told, strict=True)
    assert len(set(ids)) == 1
    assert len(set(slots)) == 4
    assert set(torches) == {"False"}, "who makes regions loads no torch"
    assert [file.name for file in tmp_path.iterdir()] == ["arena"]


def test_a_maker_that_is_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    """It dies of the signal that a file larger than allowed gives, in the middle of making one."""
    code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
Region.create(path, 1 << 20)
"""
    for name in "ab":
        with process(code, tmp_path / name) as maker:
            assert maker.wait() < 0
        assert (tmp_path / name).exists()
    region = Region.open_or_create(tmp_path / "a", MIN_BYTES)
    assert region.nbytes == MIN_BYTES
    assert sweep(tmp_path) == [tmp_path / "b"]
    region.close()


def test_opening_waits_for_the_one_who_makes(tmp_path: Path) -> None:
    """It is opened as soon as there is a file of that name."""
    path = tmp_path / "arena"
    maker_code = """
import os, threading, time
def watch():
    while not path.exists():
        pass
    print("there", flush=True)
    sys.stdin.readline()
threading.Thread(target=watch).start()
region = Region.create(path, 64 << 20)
print(region.arena_id.hex(), flush=True)
sys.stdin.readline()
"""
    with process(maker_code, path) as maker:
        assert says(maker) == "there"
        opened = Region.open(path)
        assert says(maker) == opened.arena_id.hex()
        opened.close()


def test_a_region_that_does_not_fit_is_refused_with_both_numbers_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as caught:
        Region.create(tmp_path / "arena", 1 << 50)
    assert caught.value.reason == "ARENA_NO_SPACE"
    assert caught.value.facts["needed"] == 1 << 50
    assert 0 < int(caught.value.facts["free"]) < 1 << 50
    assert "--arena-bytes" in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_refuses_on_the_way_is_told_alike(tmp_path: Path) -> None:
    code = f"""
import resource
from chiasm.errors import Unsupported
resource.setrlimit(resource.RLIMIT_FSIZE, ({MIN_BYTES}, {MIN_BYTES}))
try:
    Region.create(path, 1 << 20)
except Unsupported as error:
    print(error.reason, error.facts["needed"], path.exists(), flush=True)
"""
    with process(code, tmp_path / "arena") as maker:
        assert says(maker) == f"ARENA_NO_SPACE {1 << 20} False"


def test_one_that_is_too_small_or_has_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as caught:
        Region.create(tmp_path / "arena", MIN_BYTES - 1)
    assert caught.value.facts["needed"] == MIN_BYTES
    with pytest.raises(Unsupported, match="No such file"):
        Region.open_or_create(tmp_path / "none" / "arena", MIN_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_none_is_told_from_one_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as caught:
        Region.open(tmp_path / "arena")
    assert caught.value.reason == "ARENA_MISSING"


def refused(path: Path) -> str:
    with pytest.raises(Unsupported) as caught:
        Region.open(path)
    assert caught.value.reason == "ARENA_REFUSED"
    with pytest.raises(Unsupported):
        Region.open_or_create(path, MIN_BYTES)
    assert sweep(path.parent) == [], "what cannot be told is left alone"
    return caught.value.message


@pytest.mark.parametrize("size", [HEADER_BYTES, MIN_BYTES, MIN_BYTES * 4])
def test_a_file_that_is_cut_or_longer_is_refused_before_it_is_mapped(tmp_path: Path, size: int) -> None:
    region = Region.create(tmp_path / "arena", 2 * MIN_BYTES)
    os.truncate(tmp_path / "arena", size)
    assert str(size) in refused(tmp_path / "arena")
    region.close()


@pytest.mark.parametrize("content", [b"not a region", bytes(MIN_BYTES), bytes(8)])
def test_a_file_that_is_something_else_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "arena").write_bytes(content)
    (tmp_path / "arena").chmod(0o600)
    refused(tmp_path / "arena")
    assert (tmp_path / "arena").read_bytes() == content


def test_a_region_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    region = Region.create(tmp_path / "arena", MIN_BYTES)
    (tmp_path / "arena").chmod(0o640)
    assert "0640" in refused(tmp_path / "arena")
    region.close()


def test_links_folders_and_pipes_are_refused(tmp_path: Path) -> None:
    region = Region.create(tmp_path / "real", MIN_BYTES)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "folder", "pipe"):
        refused(tmp_path / name)
    region.close()


def test_a_region_of_another_version_is_refused_with_both(tmp_path: Path) -> None:
    region = Region.create(tmp_path / "arena", MIN_BYTES)
    with (tmp_path / "arena").open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    assert "version 99" in refused(tmp_path / "arena")
    region.close()


def test_one_at_a_time_has_the_lock(tmp_path: Path) -> None:
    one = Region.create(tmp_path / "arena", MIN_BYTES)
    other = Region.open(tmp_path / "arena")
    assert one.try_lock()
    assert not other.try_lock()
    assert not one.try_lock(), "not even for another thread of the same process"
    one.unlock()
    assert other.try_lock()
    other.close()
    assert one.try_lock(), "a lock goes with who has it"
    one.unlock()
    one.close()


def test_lock_and_slot_go_with_a_process_that_is_killed(tmp_path: Path) -> None:
    region = Region.create(tmp_path / "arena", MIN_BYTES)
    code = """
region = Region.open(path)
assert region.try_lock()
print(region.slot, flush=True)
sys.stdin.readline()
"""
    with process(code, tmp_path / "arena") as holder:
        slot = int(says(holder))
        assert not region.try_lock()
        assert region.alive(slot)
        holder.kill()
        holder.wait()
        assert region.try_lock()
        assert not region.alive(slot)
    region.close()


def test_children_do_not_inherit_a_slot(tmp_path: Path) -> None:
    region = Region.create(tmp_path / "arena", MIN_BYTES)
    with process("print('there', flush=True)\nsys.stdin.readline()", tmp_path) as child:
        assert says(child) == "there"
        region.close()
        assert sweep(tmp_path) == [tmp_path / "arena"]


def test_a_sweep_removes_regions_of_the_dead_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not mine to remove")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    mine = Region.create(tmp_path / "mine", MIN_BYTES)
    code = "region = Region.create(path, 1 << 20)\nprint('there', flush=True)\nsys.stdin.readline()"
    with process(code, tmp_path / "others") as living, process(code, tmp_path / "deads") as dead:
        assert says(living) == says(dead) == "there"
        assert sweep(tmp_path) == []
        dead.kill()
        dead.wait()
        assert sweep(tmp_path) == [tmp_path / "deads"]
        assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "folder", "mine", "notes", "others"]
        used = Region.open(tmp_path / "others")
        living.kill()
        living.wait()
        assert sweep(tmp_path) == [], "its maker is dead, and it is in use"
        used.close()
    assert sweep(tmp_path) == [tmp_path / "others"]
    mine.close()


def test_taking_the_name_away_leaves_the_bytes_to_those_who_have_them_and_another_region_alone(tmp_path: Path) -> None:
    old = Region.create(tmp_path / "arena", MIN_BYTES)
    reader = Region.open(tmp_path / "arena")
    old.unlink()
    old.unlink()
    old.body[5] = 1
    assert reader.body[5] == 1
    new = Region.create(tmp_path / "arena", MIN_BYTES)
    reader.unlink()
    assert (tmp_path / "arena").exists(), "that name is another's now"
    for region in (old, reader, new):
        region.close()
