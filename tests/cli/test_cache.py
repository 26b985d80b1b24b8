"""`chiasm cache` on regions that are in use: what they hold, and emptying them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
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
from tests.redis_server import RedisServer, redis_server, store_at


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


# -- the store that nodes share ----------------------------------------------------------------------------------------

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """With the user that the page for operators shows, whose password is in `tmp_path / "password"`. It holds two
    entries, one of three values, and something of somebody else."""
    (line,) = [line for line in OPERATIONS.read_text("utf-8").splitlines() if line.startswith("user chiasm-cache ")]
    users = tmp_path / "users.acl"
    users.write_text(f"user default on nopass ~* &* +@all\n{line.replace('#SHA256', '>a-password')}\n")
    (tmp_path / "password").write_text("a-password\n")
    (tmp_path / "password").chmod(0o600)

    async def fill(server: RedisServer) -> None:
        store = store_at(server)
        await store.put(entry(2500 * KIB), key("a"))
        await store.put(entry(KIB), key("b"))
        await store.claim(key("c"), 60.0)
        await store.close()

    with redis_server("--aclfile", str(users)) as server:
        asyncio.run(fill(server))
        server.admin.set("chiasm-of-others:entry:1", "something else")
        yield server


def as_clearing(server: RedisServer, tmp_path: Path) -> dict[str, str]:
    return {
        "CHIASM_REDIS": f"unix://chiasm-cache@{server.socket}",
        "CHIASM_REDIS_PASSWORD_FILE": str(tmp_path / "password"),
    }


def test_stats_count_the_entries_that_nodes_share(server: RedisServer, region: Region, tmp_path: Path) -> None:
    asyncio.run(used(ArenaStore(region)))
    done = chiasm("cache", "stats", "--arena", str(region.path), "--json", **as_clearing(server, tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    arena, redis = json.loads(done.stdout)["tiers"]
    assert (arena["tier"], arena["entries"]) == ("arena", 8)
    assert redis == {
        "tier": "redis",
        "where": f"unix://chiasm-cache@{server.socket}",
        "entries": 2,
        "bytes": None,
        "budget": None,
        "pinned_bytes": None,
        "evictions": None,
        "hit_ratio": None,
    }
    done = chiasm("cache", "stats", "--arena", str(region.path), **as_clearing(server, tmp_path))
    assert re.split(r"\s{2,}", done.stdout.splitlines()[-1]) == ["redis", "2", f"unix://chiasm-cache@{server.socket}"]


def test_a_flush_takes_all_of_the_namespace_and_nothing_else(
    server: RedisServer, region: Region, tmp_path: Path
) -> None:
    asyncio.run(used(ArenaStore(region)))
    told = chiasm("cache", "flush", "--arena", str(region.path), **as_clearing(server, tmp_path))
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == "arena: 7 entries forgotten, 1 in use stay\nredis: 2 entries forgotten\n"
    assert server.names("*") == ["chiasm-of-others:entry:1"]


def test_another_namespace_is_left_alone(server: RedisServer, region: Region, tmp_path: Path) -> None:
    server.admin.execute_command("ACL", "SETUSER", "chiasm-cache", "%W~chiasm-of-others:*")
    arguments = ("--arena", str(region.path), "--redis-namespace", "chiasm-of-others", "--json")
    done = chiasm("cache", "flush", *arguments, **as_clearing(server, tmp_path))
    assert json.loads(done.stdout)["tiers"][1]["entries"] == 0, done
    assert not server.names("chiasm-of-others:*")
    assert server.names("chiasm:entry:*")


@pytest.mark.parametrize("user", ["gone", "wrong password", "may not"])
def test_a_store_that_does_not_answer_fails_the_command_when_the_arena_is_done(
    user: str, server: RedisServer, region: Region, tmp_path: Path
) -> None:
    asyncio.run(used(ArenaStore(region)))
    environment = as_clearing(server, tmp_path)
    if user == "gone":
        server.kill()
    elif user == "wrong password":
        (tmp_path / "password").write_text("another")
    else:
        server.admin.execute_command("ACL", "SETUSER", "chiasm-cache", "-scan")
    for command, said in (("stats", "arena  8"), ("flush", "arena: 7 entries forgotten, 1 in use stay")):
        done = chiasm("cache", command, "--arena", str(region.path), **environment)
        assert done.returncode == 1 and said in done.stdout, done
        error, where, fix = done.stderr.splitlines()
        assert error.startswith("error: the store that nodes share ")
        assert {"gone": "connecting", "wrong password": "password pair", "may not": "permissions"}[user] in error
        assert str(server.socket) in where and "SCAN" in fix
    assert asyncio.run(ArenaStore(region).get(key("7"))) is None


def test_what_does_not_go_together_is_told_before_anything_is_done(region: Region, tmp_path: Path) -> None:
    asyncio.run(used(ArenaStore(region)))
    (tmp_path / "open").write_text("a-password")
    (tmp_path / "open").chmod(0o644)
    for environment, said in (
        ({"CHIASM_REDIS_PASSWORD_FILE": "none"}, "redis_password_file needs redis"),
        ({"CHIASM_REDIS": "redis://localhost", "CHIASM_REDIS_CA_FILE": "none"}, "not rediss://"),
        ({"CHIASM_REDIS": "redis://localhost", "CHIASM_REDIS_PASSWORD_FILE": str(tmp_path / "open")}, "mode 0644"),
        ({"CHIASM_REDIS": "redis://localhost", "CHIASM_REDIS_NAMESPACE": "a:*"}, "match"),
        ({"CHIASM_REDIS": "redis://user:hunter2@localhost"}, "no password"),
    ):
        done = chiasm("cache", "flush", "--arena", str(region.path), **environment)
        assert done.returncode == 2 and said in done.stderr and "hunter2" not in done.stderr, done
    assert tier("stats", region.path)["entries"] == 8


def test_the_commands_load_no_torch(server: RedisServer, region: Region, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom chiasm.cli import main\n"
        "try:\n    main()\nfinally:\n    print(sorted({'torch', 'av', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "cache", "stats", "--arena", str(region.path)],
        capture_output=True, text=True, timeout=50, check=True,
        env={**os.environ, **as_clearing(server, tmp_path)},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"
