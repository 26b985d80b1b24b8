"""What `chiasm serve` turns its options into: command lines, an environment, an arena."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chiasm.cli.failure import CommandFailed
from chiasm.cli.run_folder import RunFolder
from chiasm.cli.system import ARENA_BYTES, Options, arena_bytes, check_listen, cores, roles, threads


def test_workers_listen_in_the_folder_and_the_router_where_it_was_said(tmp_path: Path) -> None:
    options = Options(
        folder=Path("/models/m"), name="m", listen="127.0.0.1:7", http="127.0.0.1:8", dtype="bfloat16", encoders=2
    )
    with RunFolder(tmp_path) as folder:
        router, workers = roles(options, folder)
        assert [role.name for role in workers] == ["encoder-0", "encoder-1", "decoder-0"]
        for role in workers:
            words = role.words
            assert words[:4] == [sys.executable, "-P", "-m", f"{role.name.partition('-')[0]}_service"]
            assert words[words.index("--listen") + 1] == f"unix:{folder.path}/{role.name}.sock"
            assert words[words.index("--http") + 1] == "none"
            assert words[words.index("--dtype") + 1] == "bfloat16"
            assert words[words.index("--model") + 1 : words.index("--model") + 4] == ["/models/m", "--name", "m"]
            assert "--supervised" in words
            assert "--insecure" not in words
        words = router.words
        assert words[words.index("--encoders") + 1] == f"{folder.socket('encoder-0')},{folder.socket('encoder-1')}"
        assert words[words.index("--decoders") + 1] == folder.socket("decoder-0")
        assert words[words.index("--listen") + 1 :] == ["127.0.0.1:7", "--http", "127.0.0.1:8"]
        # A command line can be read by every user: a secret is a file.
        secrets = {path.read_text(encoding="ascii").strip() for path in (folder.workers_secret, folder.tenants_secret)}
        assert not any(secret in word for role in (router, *workers) for word in role.words for secret in secrets)


def test_workers_are_told_how_the_cache_is_kept_if_anything_was_said(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        _, told = roles(Options(folder=tmp_path, name="m", cache_tenant_bytes=1 << 20, cache_ttl=90.5), folder)
        router, untold = roles(Options(folder=tmp_path, name="m"), folder)
    for role in told:
        words = role.words
        assert words[words.index("--cache-tenant-bytes") + 1] == f"{1 << 20}"
        assert words[words.index("--cache-ttl") + 1] == "90.5"
    assert not any("--cache" in word for role in (router, *untold) for word in role.words)


def test_what_is_said_of_the_shared_store_is_handed_to_workers_and_to_nobody_else(tmp_path: Path) -> None:
    said = {"--redis": "rediss://user@host:1", "--redis-password-file": "/run/secrets/redis"}
    with RunFolder(tmp_path) as folder:
        router, workers = roles(Options(folder=tmp_path, name="m", redis=said), folder)
        for role in workers:
            for flag, value in said.items():
                assert role.words[role.words.index(flag) + 1] == value
        assert "--redis" not in router.words


def test_only_the_router_may_be_reached_and_only_when_one_insists(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        open_, workers = roles(Options(folder=tmp_path, name="m", insecure=True), folder)
        closed, _ = roles(Options(folder=tmp_path, name="m"), folder)
    assert "--insecure" in open_.words
    assert "--insecure" not in closed.words
    assert not any("--insecure" in role.words for role in workers)


def test_a_port_that_was_free_once_stays_the_port(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        router, _ = roles(Options(folder=tmp_path, name="m", listen="127.0.0.1:0", http="127.0.0.1:0"), folder)
    again = router.at({"--listen": "127.0.0.1:4000", "--http": "127.0.0.1:4001"})
    assert again.words[-4:] == ["--listen", "127.0.0.1:4000", "--http", "127.0.0.1:4001"]
    assert again.at({}).words == again.words


def test_what_keeps_the_processes_loads_no_large_library() -> None:
    program = (
        "import sys, chiasm.cli.serve, chiasm.cli.demo, chiasm.cli.ask, chiasm.cli.doctor, "
        "chiasm.cli.cache\n"
        "print(sorted({'torch', 'av', 'ray', 'transformers', 'uvloop'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_form_of_entries_is_said_to_decoders_alone_and_only_if_it_was_said(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for form, said in ((None, []), ("states", ["--forms", "states"])):
        front, workers = roles(Options(folder=tmp_path, name="m", form=form, encoders=2, decoders=2), folder)
        for role in (front, *workers):
            at = role.command.index("--forms") if "--forms" in role.command else len(role.command)
            assert role.command[at : at + 2] == (said if role.name.startswith("decoder") else [])


def test_cores_are_shared_out_unless_the_user_has_said_how() -> None:
    assert threads({"OMP_NUM_THREADS": "7"}, 2)["OMP_NUM_THREADS"] == "7"
    assert threads({"PATH": "/bin"}, 1) == {"PATH": "/bin", "OMP_NUM_THREADS": str(cores())}
    assert threads({}, 1000)["OMP_NUM_THREADS"] == "1"
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_what_a_role_can_be_told_and_serve_cannot_goes_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHIASM_MAX_WAIT", "2.5")
    monkeypatch.setenv("CHIASM_TENANT_REQUESTS", "7")
    with RunFolder(tmp_path) as folder:
        front, _ = roles(Options(folder=tmp_path, name="m"), folder)
        heard = subprocess.run(
            [*front.words, "--print-config"], env=front.environment, capture_output=True, text=True, check=True
        ).stdout
    rows = [row.split() for row in heard.splitlines()]
    assert ["--max-wait", "2.5", "environment"] in rows and ["--tenant-requests", "7", "environment"] in rows


def test_an_arena_takes_half_of_what_is_free_at_most(tmp_path: Path) -> None:
    assert arena_bytes(Options(folder=tmp_path, name="m", arena_bytes=123)) == 123
    default = arena_bytes(Options(folder=tmp_path, name="m", parent=tmp_path))
    assert 0 < default <= min(ARENA_BYTES, shutil.disk_usage(tmp_path).total // 2)


@pytest.mark.parametrize(
    ("listen", "reachable"),
    [
        ("127.0.0.1:0", False),
        ("127.8.9.10:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("unix:/run/x", False),
        ("0.0.0.0:1", True),
        ("[::]:1", True),
        ("192.0.2.1:1", True),
        ("example.invalid:1", True),
    ],
)
def test_what_other_machines_reach_is_refused_unless_one_insists(listen: str, reachable: bool) -> None:
    assert check_listen(listen, insecure=True) is reachable
    if reachable:
        with pytest.raises(CommandFailed, match="neither keys nor TLS") as caught:
            check_listen(listen, insecure=False)
        assert caught.value.exit_code == 2
    else:
        assert check_listen(listen, insecure=False) is False


@pytest.mark.parametrize("listen", ["", "here", ":1", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(CommandFailed, match="is not an address"):
        check_listen(listen, insecure=True)
