"""`chiasm cache` on regions that are in use: what they hold, and emptying them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chiasm import Client, Video
from chiasm.cache.arena import ArenaStore
from chiasm.cache.region import Region
from chiasm.cache.store import Lease
from chiasm.cli.run_folder import RunFolder, arenas
from tests.cache.arenas import KIB, entry, key, small_region
from tests.cli.serving import Served, chiasm
from tests.digits import shipped_clips


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    region = small_region(tmp_path / "arena", 800 * KIB)
    yield region
    region.close()


def tier(command: str, path: Path) -> dict[str, Any]:
    """The arena's figures after a command, and nothing but them was printed."""
    done = chiasm("cache", command, "--arena", str(path), "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    (only,) = json.loads(done.stdout)["tiers"]
    assert isinstance(only, dict)
    return only


async def used(store: ArenaStore) -> None:
    """Nine are put where eight have room, the last pinned; two are looked for, one of them in vain."""
    for number in range(9):
        await store.put(entry(100 * KIB), key(f"{number}"), lease=Lease.of(600) if number == 8 else None)
    assert await store.pin(key("0"), Lease.of(0)) is None
    assert await store.pin(key("7"), Lease.of(0)) is not None


def test_stats_tell_what_all_processes_of_the_node_hold_and_did(region: Region) -> None:
    asyncio.run(used(ArenaStore(region)))
    assert tier("stats", region.path) == {
        "tier": "arena",
        "where": str(region.path),
        "entries": 8,
        "bytes": 800 * KIB,
        "budget": 800 * KIB,
        "pinned_bytes": 100 * KIB,
        "evictions": 1,
        "hit_ratio": 0.5,
    }


def test_stats_are_a_table_for_people(region: Region) -> None:
    asyncio.run(used(ArenaStore(region)))
    done = chiasm("cache", "stats", CHIASM_ARENA=str(region.path))
    head, row = (re.split(r"\s{2,}", text) for text in done.stdout.splitlines())
    assert head == ["tier", "entries", "bytes", "budget", "pinned", "evictions", "hits", "where"]
    assert row == ["arena", "8", "800 KiB", "800 KiB", "100 KiB", "1", "50.0%", str(region.path)]


def test_an_empty_region_has_no_ratio(region: Region) -> None:
    assert (tier("stats", region.path)["entries"], tier("stats", region.path)["hit_ratio"]) == (0, None)


def test_a_flush_forgets_what_nobody_has_pinned(region: Region) -> None:
    store = ArenaStore(region)
    asyncio.run(used(store))
    told = chiasm("cache", "flush", "--arena", str(region.path))
    assert told.stdout == "arena: 7 entries forgotten, 1 in use stay\n"
    assert asyncio.run(store.get(key("7"))) is None
    assert asyncio.run(store.get(key("8"))) is not None
    assert tier("flush", region.path)["entries"] == 1


def test_a_served_model_goes_on_after_a_flush_and_encodes_again(served: Served) -> None:
    clip = shipped_clips()[0]
    arena = served.folder / "arena"
    with Client(served.target) as client:
        answer = client.generate("digits", [Video(clip.path), "Read the digits."])
        # Behind another text the frames lie elsewhere, so the decoder does not hold them and they are looked for.
        again = client.generate("digits", ["Look: ", Video(clip.path), "Read the digits."])
        held = tier("stats", arena)
        assert again.usage.media[0].units_cached == len(clip.digits)
        assert held["entries"] >= len(clip.digits) and held["hit_ratio"] > 0
        assert tier("flush", arena)["entries"] == 0
        again = client.generate("digits", [Video(clip.path), "Read the digits."])
    assert again.usage.media[0].units_cached == 0
    assert again.text == answer.text == clip.answer


def test_a_region_that_is_none_is_told_in_three_lines(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"something else")
    (tmp_path / "file").chmod(0o600)
    for path, said in ((tmp_path / "none", "there is no arena"), (tmp_path / "file", "it is no arena")):
        done = chiasm("cache", "stats", "--arena", str(path))
        assert done.returncode == 2 and said in done.stderr
        assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "where", "fix"]
    assert (tmp_path / "file").read_bytes() == b"something else"


def test_the_arenas_of_running_systems_are_found_and_those_of_the_dead_are_not(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as one, RunFolder(tmp_path) as other:
        (tmp_path / "chiasm-dead").mkdir()
        (tmp_path / "chiasm-dead" / "lock").touch()
        assert arenas(tmp_path) == sorted([one.arena, other.arena])
    assert arenas(tmp_path) == []
