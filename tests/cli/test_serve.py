"""`chiasm serve` with the shipped model: what it says, what dies and comes back, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

import chiasm
from tests.cli.serving import CHIASM, Served, processes, until
from tests.cli.serving import chiasm as run

HELD_OUT = Path(chiasm.__file__).parent / "checkpoints" / "digits" / "held_out"
CLIP = str(HELD_OUT / "clip_3.mp4")
DIGITS = "9 5 5"


def ask(served: Served) -> dict[str, object]:
    done = run("ask", "--target", served.target, "--json", "Read the digits.", CLIP)
    assert done.returncode == 0, (done.stderr, [said for said in served.records if said["level"] == "error"])
    said: dict[str, object] = json.loads(done.stdout)
    return said


# -- what it says ------------------------------------------------------------------------------------------------------


def test_every_line_of_the_log_is_json_with_the_role_that_said_it(served: Served) -> None:
    assert served.odd == []
    for said in served.records:
        assert {"timestamp", "level", "logger", "event", "role"} <= set(said), said
    for role in ("encoder-0", "decoder-0", "router"):
        events = [said["event"] for said in served.records if said["role"] == role]
        life = [event for event in events if event in ("starting", "listening", "ready")]
        assert life[:3] == ["starting", "listening", "ready"]
    loaded = served.of("decoder-0", "loading")[-1]
    assert loaded["done"] == loaded["total"] > 0
    assert served.until("encoder-0", "ready")["target"].startswith("unix:")


def test_only_the_owner_can_look_into_the_folder_of_a_run(served: Served) -> None:
    assert served.folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in served.folder.glob("*.secret"))
    assert (served.folder / "arena").stat().st_size == 32 << 20


def test_health_over_grpc_and_over_the_plain_port(served: Served) -> None:
    http = served.until("router", "ready")["http"]
    for target in (served.target, f"http://{http}"):
        for service in ("readiness", "liveness"):
            done = run("health", "--target", target, "--service", service)
            assert (done.returncode, done.stdout.partition(":")[0]) == (0, "ok"), done.stdout


def test_a_second_one_on_the_same_port_is_told_so(served: Served) -> None:
    done = run("serve", "digits", "--listen", served.target, "--arena-bytes", "1MiB")
    assert done.returncode == 2, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "where", "fix"]
    assert served.target in done.stderr


# -- what dies comes back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["encoder-0", "decoder-0", "router"])
def test_a_killed_process_is_started_again_and_questions_are_answered(served: Served, role: str) -> None:
    assert ask(served)["text"] == DIGITS
    count, pid = len(served.of(role, "ready")), served.pid(role)
    os.kill(pid, signal.SIGKILL)
    served.until(role, "ready", count + 1)
    assert served.of(role, "died")[-1]["exit"] == -signal.SIGKILL
    assert served.pid(role) != pid
    until(lambda: run("health", "--target", served.target).returncode == 0)
    assert ask(served)["text"] == DIGITS
    assert (served.folder / "arena").exists()


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_the_banner_ends_with_what_to_do_next_and_ctrl_c_ends_everything(tmp_path: Path) -> None:
    # Whatever lies where one happens to be is not what runs.
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "__main__.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    process = subprocess.Popen(
        [*CHIASM, "serve", "digits", "--listen", "127.0.0.1:0", "--arena-bytes", "32MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
    )
    with process:
        try:
            assert process.stdout is not None
            told: list[str] = []
            for line in process.stdout:
                told.append(line.rstrip())
                if line.startswith("ready in"):
                    break
            # What one is told to try works as it stands.
            answer = run(*shlex.split(told[-1].partition("try: chiasm ")[2]))
            pids = processes("--tenants-secret-file") + processes("encoder_service") + processes("decoder_service")
            mine = [pid for pid in pids if parent(pid) == process.pid]
            assert len(mine) == 3
            folder = Path(next(word for word in words(mine[0]) if word.endswith(".secret"))).parent
            os.killpg(process.pid, signal.SIGINT)
            rest, errors = process.communicate(timeout=40)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert errors == ""
    assert [line.split()[0] for line in told[:6]] == ["chiasm", "roles", "model", "device", "address", "cache"]
    assert told[0].endswith("digits")
    assert re.fullmatch(r'ready in \d+\.\d s · try: chiasm ask --target localhost:\d+ "Read the digits\." .+', told[-1])
    assert answer.stdout == "1 6 9 0 8 7 4 3\n", answer.stderr
    assert not folder.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in mine)
    assert "Traceback" not in rest


def test_a_killed_supervisor_takes_its_processes_along_and_the_next_sweeps_what_it_left() -> None:
    first = Served("digits", "--listen", "127.0.0.1:0")
    try:
        assert first.target
        folder, pids = first.folder, [first.pid(role) for role in ("encoder-0", "decoder-0", "router")]
    finally:
        first.process.kill()
        first.stop()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert folder.exists()
    assert run("serve", "digits", "--arena-bytes", "900TiB").returncode == 2
    assert not folder.exists()


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words_told"),
    [
        (["nobody"], ["nobody"]),
        (["digits", "--listen", "0.0.0.0:0"], ["0.0.0.0:0", "--insecure"]),
        (["digits", "--listen", "[::]:0"], ["[::]:0", "--insecure"]),
        (["digits", "--http", "here"], ["here"]),
        (["digits", "--listen", "here"], ["here"]),
        (["digits", "--listen", "127.0.0.1:70000"], ["127.0.0.1:70000"]),
        (["digits", "--arena-bytes", "900TiB"], ["--arena-bytes"]),
    ],
)
def test_what_cannot_be_served_is_told_in_three_lines(arguments: list[str], words_told: list[str]) -> None:
    if "--listen" not in arguments:
        arguments = [*arguments, "--listen", "127.0.0.1:0"]
    if "--arena-bytes" not in arguments:
        arguments = [*arguments, "--arena-bytes", "1MiB"]
    done = run("serve", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "where", "fix"]
    for word in words_told:
        assert word in done.stderr


def test_a_broken_checkpoint_is_told_and_nothing_is_left_running(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Nobody"]}', encoding="utf-8")
    done = run("serve", str(folder), "--listen", "127.0.0.1:0", "--arena-bytes", "1MiB")
    assert done.returncode == 2, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "where", "fix"]
    assert "Nobody" in done.stderr
    assert processes(str(folder)) == []


def test_an_address_that_others_reach_is_served_with_a_warning_when_one_insists() -> None:
    served = Served("digits", "--listen", "0.0.0.0:0", "--insecure", "--arena-bytes", "900TiB")
    assert served.process.wait(40) == 2
    served.stop()
    assert served.odd == []
    failed = served.records[-1]
    assert (failed["level"], "900" not in failed["fix"], failed["role"]) == ("error", True, "serve")
    warned = [said for said in served.records if said["level"] == "warning"]
    assert warned[0]["address"] == "0.0.0.0:0"
    assert "neither keys nor TLS" in warned[0]["event"]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
