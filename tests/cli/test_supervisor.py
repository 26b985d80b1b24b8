"""The supervisor over cheap stand-ins: small programs that log what a role logs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chiasm.cli.child import Role, record_of
from chiasm.cli.failure import CommandFailed, lines
from chiasm.cli.run_folder import RunFolder, sweep
from chiasm.cli.supervisor import Policy, Supervisor
from tests.waiting import alive, gone

FAST = Policy(first_delay=0.01, longest_delay=0.04, steady=60, attempts=3, grace=20)

ROLE = """
import json, os, signal, sys, time

def say(event, **facts):
    # Past the buffers: a signal may come in the middle of a line, and its handler says something too.
    said = {"timestamp": "t", "level": "info", "logger": "role", "event": event, **facts}
    os.write(2, json.dumps(said).encode() + b"\\n")

def stop(*_):
    say("draining", seconds=0)
    say("stopped")
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
say("starting", pid=os.getpid())
say("ready", target="there:1", http=None, seconds=0.1)
"""
"""The head of a stand-in that becomes ready."""

FOR_EVER = ROLE + "sys.stdin.read()\nsay('alone')\n"
"""Ends when its standard input does, as `--supervised` asks."""


ROLE_DEAF = ROLE.replace("signal.SIGTERM, stop", "signal.SIGTERM, signal.SIG_IGN") + "while True: time.sleep(1)\n"
"""Ends by being killed only."""


def role(name: str, source: str, *arguments: str) -> Role:
    return Role(name, [sys.executable, "-c", textwrap.dedent(source), *arguments])


class Heard(list[dict[str, Any]]):
    """Records that were told."""

    def events(self, name: str | None = None) -> list[str]:
        return [said["event"] for said in self if name is None or said["role"] == name]

    async def until(self, holds: Callable[[Heard], bool]) -> None:
        while not holds(self):  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(0.005)


async def test_the_front_ends_before_its_workers_and_nothing_is_left() -> None:
    heard = Heard()
    workers = [role("encoder", FOR_EVER), role("decoder", FOR_EVER)]
    async with Supervisor(role("router", FOR_EVER), workers, heard.append, policy=FAST) as supervisor:
        await supervisor.ready()
        assert supervisor.target == "there:1"
        pids = supervisor.pids()
        assert set(pids) == {"router", "encoder", "decoder"}
    assert not any(alive(pid) for pid in pids.values())
    ends = [said["role"] for said in heard if said["event"] == "stopped"]
    assert ends[0] == "router"
    assert sorted(ends) == ["decoder", "encoder", "router"]
    assert "alone" not in heard.events()


async def test_a_dead_process_is_started_again_and_its_delay_grows_to_a_bound() -> None:
    heard = Heard()
    async with Supervisor(role("router", FOR_EVER), [role("encoder", FOR_EVER)], heard.append, policy=FAST) as kept:
        await kept.ready()
        for deaths in range(1, 5):
            pid = kept.pids()["encoder"]
            os.kill(pid, signal.SIGKILL)
            await heard.until(lambda said, n=deaths: said.events("encoder").count("ready") == n + 1)  # type: ignore[misc]
            assert kept.pids()["encoder"] != pid
    died = [(said["exit"], said["again_in"]) for said in heard if said["event"] == "died"]
    assert died == [(-9, 0.01), (-9, 0.02), (-9, 0.04), (-9, 0.04)]
    assert heard.events("router").count("ready") == 1


async def test_the_delay_begins_anew_after_a_steady_time() -> None:
    heard = Heard()
    policy = Policy(first_delay=0.01, longest_delay=1, steady=0, attempts=3, grace=20)
    async with Supervisor(role("router", FOR_EVER), [role("encoder", FOR_EVER)], heard.append, policy=policy) as kept:
        await kept.ready()
        for deaths in range(1, 4):
            os.kill(kept.pids()["encoder"], signal.SIGKILL)
            await heard.until(lambda said, n=deaths: said.events("encoder").count("ready") == n + 1)  # type: ignore[misc]
    assert [said["again_in"] for said in heard if said["event"] == "died"] == [0.01, 0.01, 0.01]


async def test_a_role_that_never_becomes_ready_ends_all_with_its_last_lines() -> None:
    heard = Heard()
    broken = role("decoder", "import sys; print('the last word', file=sys.stderr); sys.exit(7)")
    with pytest.raises(CommandFailed) as caught:
        async with Supervisor(role("router", FOR_EVER), [broken], heard.append, policy=FAST) as supervisor:
            await supervisor.ready()
    assert (caught.value.exit_code, caught.value.before) == (1, ("the last word",))
    assert lines(caught.value)[0] == "error: decoder ended with exit status 7 3 times before it was ready"
    assert heard.events("decoder").count("the last word") == 3


async def test_a_role_asked_for_what_cannot_be_is_told_at_once() -> None:
    heard = Heard()
    misused = role(
        "encoder",
        """
        import sys
        print("error: no such model", "  where  nobody", "  fix    name another", sep="\\n", file=sys.stderr)
        sys.exit(2)
        """,
    )
    with pytest.raises(CommandFailed) as caught:
        async with Supervisor(role("router", FOR_EVER), [misused], heard.append, policy=FAST) as supervisor:
            await supervisor.ready()
    assert caught.value.exit_code == 2
    assert lines(caught.value) == ("error: no such model", "  where  encoder · nobody", "  fix    name another")
    assert "died" not in heard.events()


async def test_of_several_that_cannot_start_one_is_told_and_the_rest_is_silent(tmp_path: Path) -> None:
    broken = "import sys; sys.exit(2)"
    program = tmp_path / "supervise.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            from chiasm.cli.child import Role
            from chiasm.cli.failure import CommandFailed
            from chiasm.cli.supervisor import Supervisor

            async def main():
                roles = [Role(name, [sys.executable, "-c", {broken!r}]) for name in ("router", "encoder", "decoder")]
                try:
                    async with Supervisor(roles[0], roles[1:], lambda said: None) as supervisor:
                        await asyncio.wait(supervisor._keeping.values())
                        await supervisor.ready()
                except CommandFailed as failed:
                    print(failed.exit_code)

            asyncio.run(main())
            """
        ),
        encoding="utf-8",
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert await process.communicate() == (b"1\n", b"")


async def test_what_a_dead_process_had_started_dies_with_it() -> None:
    heard = Heard()
    parent = role(
        "encoder",
        ROLE
        + """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
say("child", pid=child.pid)
sys.stdin.read()
""",
    )
    async with Supervisor(role("router", FOR_EVER), [parent], heard.append, policy=FAST) as supervisor:
        await heard.until(lambda said: "child" in said.events())
        os.kill(supervisor.pids()["encoder"], signal.SIGKILL)
        await heard.until(lambda said: "died" in said.events())
        first = next(said["pid"] for said in heard if said["event"] == "child")
        await gone(first)


async def test_one_that_does_not_end_is_killed() -> None:
    heard = Heard()
    deaf = role("encoder", ROLE_DEAF)
    policy = Policy(first_delay=0.01, longest_delay=0.04, steady=60, attempts=3, grace=0.1)
    async with Supervisor(role("router", FOR_EVER), [deaf], heard.append, policy=policy) as supervisor:
        await supervisor.ready()
        pid = supervisor.pids()["encoder"]
    assert not alive(pid)
    assert "stopped" not in heard.events("encoder")


async def test_one_that_drains_is_given_the_time_it_says() -> None:
    heard = Heard()
    policy = Policy(first_delay=0.01, longest_delay=0.04, steady=60, attempts=3, grace=0.3)
    slow = (
        ROLE.replace('say("draining", seconds=0)', 'say("draining", seconds=30); time.sleep(1)') + "sys.stdin.read()\n"
    )
    async with Supervisor(role("router", slow), [role("encoder", FOR_EVER)], heard.append, policy=policy) as supervisor:
        await supervisor.ready()
    assert heard.events("router")[-2:] == ["draining", "stopped"]


async def test_one_that_does_not_end_is_killed_at_once_when_it_is_said_so() -> None:
    heard = Heard()
    deaf = role("router", ROLE_DEAF)
    async with Supervisor(deaf, [role("encoder", FOR_EVER)], heard.append, policy=FAST) as supervisor:
        await supervisor.ready()
        pids = supervisor.pids()
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0)
        assert not stopping.done()
        supervisor.kill()
        await stopping
        assert not any(alive(pid) for pid in pids.values())


async def test_workers_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    program = tmp_path / "supervise.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            from chiasm.cli.child import Role
            from chiasm.cli.supervisor import Supervisor

            async def main():
                roles = [Role(name, [sys.executable, "-c", {FOR_EVER!r}]) for name in ("router", "encoder")]
                async with Supervisor(roles[0], roles[1:], lambda said: None) as supervisor:
                    await supervisor.ready()
                    print(*supervisor.pids().values(), flush=True)
                    await supervisor.wait()

            asyncio.run(main())
            """
        ),
        encoding="utf-8",
    )
    process = await asyncio.create_subprocess_exec(sys.executable, str(program), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pids = [int(word) for word in (await process.stdout.readline()).split()]
    assert len(pids) == 2
    process.kill()
    await process.wait()
    await gone(*pids)


def test_lines_of_a_log_become_records() -> None:
    assert record_of('{"event": "ready", "target": "x"}') == {"event": "ready", "target": "x"}
    for text in ("plain", "{broken", "[1]", '{"no": "event"}'):
        said = record_of(text)
        assert (said["event"], said["logger"]) == (text, "stderr")


async def test_a_line_without_end_is_dropped_and_the_next_is_heard() -> None:
    heard = Heard()
    loud = role("encoder", ROLE + "print('x' * 5_000_000, file=sys.stderr)\nsay('after')\nsys.stdin.read()\n")
    async with Supervisor(role("router", FOR_EVER), [loud], heard.append, policy=FAST):
        await heard.until(lambda said: "after" in said.events())
    assert max(len(said["event"]) for said in heard) < 2_000_000


# -- the folder of a run -----------------------------------------------------------------------------------------------


def test_a_run_folder_is_its_owners_alone_and_goes_with_the_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        for path in (folder.workers_secret, folder.tenants_secret):
            assert path.stat().st_mode & 0o777 == 0o600
            assert len(bytes.fromhex(path.read_text(encoding="ascii").strip())) == 32
        assert folder.workers_secret.read_bytes() != folder.tenants_secret.read_bytes()
        assert folder.socket("encoder-0") == f"unix:{folder.path}/encoder-0.sock"
        assert sweep(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_run_is_swept_and_that_of_a_running_one_is_not(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as running:
        program = (
            "import os, pathlib; from chiasm.cli.run_folder import RunFolder\n"
            f"folder = RunFolder(pathlib.Path({str(tmp_path)!r})); os.kill(os.getpid(), 9)"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
        dead = [path for path in tmp_path.iterdir() if path != running.path]
        assert len(dead) == 1
        assert sweep(tmp_path) == dead
        assert list(tmp_path.iterdir()) == [running.path]
