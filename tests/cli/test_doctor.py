"""`chiasm doctor` on this machine, and its judgement of machines that lack something."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from chiasm.cli import doctor
from chiasm.cli.doctor import machine, media, software
from chiasm.cli.doctor.finding import Finding, Status, judged
from chiasm.models.finding import SHIPPED
from chiasm.rpc.server import Server

NAMES = {
    *("python", "torch", "flashinfer", "protobuf", "in process", "services", "digits"),
    *("codecs", "sandbox"),
    *("processors", "shared memory", "open files", "port", "proxy"),
}


def test_this_machine_is_examined_and_nothing_large_is_loaded() -> None:
    program = (
        "import sys; sys.argv[1:] = ['doctor', '--json']\nfrom chiasm.cli import main\n"
        "try:\n    main()\nfinally:\n    print(sorted({'torch', 'av', 'ray', 'flashinfer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    said, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    result = json.loads(said)
    assert {check["name"] for check in result["checks"]} == NAMES
    assert result["exit"] == done.returncode
    by_name = {check["name"]: check for check in result["checks"]}
    for name in ("python", "protobuf", "in process", "services", "digits", "codecs", "sandbox"):
        assert by_name[name]["status"] == "ok", by_name[name]
    assert by_name["codecs"]["found"].endswith("h264, hevc, vp9, av1")


def test_what_is_wrong_is_told_with_what_should_be_and_what_mends_it() -> None:
    well = judged("a", "one", "1", well=True, expected="", fix="", bad=Status.FAIL)
    bad = judged("b", "two", "2", well=False, expected="3", fix="add one", bad=Status.WARN)
    assert doctor.lines([well, bad])[1:] == [
        "a",
        "  ok    one            1",
        "b",
        "  warn  two            2",
        "        expected       3",
        "        fix            add one",
        "1 ok, 1 warnings, 0 failures",
    ]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [([Status.OK], 0), ([Status.OK, Status.WARN], 1), ([Status.WARN, Status.FAIL, Status.OK], 2)],
)
def test_the_worst_finding_decides_the_exit_code(
    statuses: list[Status], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [lambda status=status: Finding("g", "n", status, "f", "e", "x") for status in statuses]
    assert doctor.run(as_json=False, checks=checks) == code
    assert capsys.readouterr().out.startswith("chiasm ")


def test_a_checkpoint_cut_short_is_found_without_reading_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    shutil.copytree(SHIPPED / "digits", folder, ignore=shutil.ignore_patterns("held_out"))
    assert software.missing(folder) == []
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    assert software.missing(folder) == [f"model.safetensors has {size - 1} bytes of {size}"]
    weights.write_bytes(b"not a checkpoint")
    (folder / "tokenizer.json").unlink()
    assert software.missing(folder)[0] == "tokenizer.json is missing"
    assert software.missing(folder)[1].startswith("model.safetensors cannot be read")


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, "ok"),
        ({"http_proxy": "http://proxy:3128"}, "fail"),
        ({"grpc_proxy": "http://proxy:3128", "no_proxy": "example.com"}, "fail"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "localhost"}, "fail"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost, 127.0.0.1"}, "ok"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "", "no_grpc_proxy": "localhost,127.0.0.1"}, "ok"),
        ({"no_proxy": "localhost"}, "ok"),
    ],
)
def test_a_proxy_that_grpc_would_use_for_this_machine_is_a_failure(environment: dict[str, str], status: str) -> None:
    assert machine.judge_proxies(environment).status == status


async def test_a_port_is_free_or_taken_by_somebody_who_is_named() -> None:
    async with Server() as server:
        found = await asyncio.to_thread(machine.look_at_port, server.port)
        assert (found.status, found.found.partition(" (")[0]) == (Status.OK, f"{server.port} is a server of chiasm")
    assert machine.look_at_port(server.port) == Finding("machine", "port", Status.OK, f"{server.port} is free")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = await asyncio.to_thread(machine.look_at_port, port)
        assert found.status is Status.WARN
        assert f"process {os.getpid()}" in found.found


def test_a_program_that_cannot_be_asked_is_a_failure() -> None:
    found = media.codecs("raise ImportError('libav is missing')")
    assert (found.status, found.found) == (Status.FAIL, "ImportError: libav is missing")
    lacking = {"av": "18", "video": {"h264": True, "av1": False}, "picture": {"webp": True}}
    found = media.codecs(f"import json; print(json.dumps({lacking!r}))")
    assert (found.status, found.found) == (Status.WARN, "PyAV 18: without av1")
    assert media.sandbox("raise SystemExit(3)").status is Status.FAIL
    assert media.sandbox("""print('{"filter": false, "network": true}')""").status is Status.WARN
