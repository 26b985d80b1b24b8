"""The life of a process, seen from outside: what it logs, how it ends, and with what."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.errors import ChiasmError
from chiasm.rpc.call import answered
from chiasm.rpc.channel import connect
from chiasm.rpc.v1 import router_pb2, router_pb2_grpc
from tests.rpc.plain import fetch
from tests.rpc.running import ROOT, Running, outcome, started

ROLE = str(Path(__file__).with_name("role.py"))


def role(script: str, *flags: str) -> AbstractAsyncContextManager[Running]:
    return started(ROLE, script, "--log-format", "json", *flags, env={"PYTHONPATH": str(ROOT)})


async def models(target: str, *, seconds: float = 0) -> str:
    """What a call answered that took `seconds`: whether the process was draining."""
    async with connect(target) as channel:
        stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
        call = stub.ListModels(router_pb2.ListModelsRequest(), metadata=(("seconds", str(seconds)),), timeout=60)
        return (await answered(call)).models[0].name


def until_dead(http: str) -> None:
    """Asks until the process says that it hangs."""
    while fetch(http, "/healthz").status == 200:
        time.sleep(0.1)


async def test_it_logs_its_life_in_order_and_ends_well() -> None:
    async with role("fine", "--http", "127.0.0.1:0", "--drain-seconds", "5") as running:
        ready = await running.logged("ready")
        assert await models(ready["target"]) == "False"
        assert "chiasm_calls_total 1.0" in fetch(ready["http"], "/metrics").body
        running.process.terminate()
        assert await running.ended() == 0
    assert running.events == ["starting", "listening", "ready", "called", "draining", "stopped"]
    starting, listening, ready, _, draining, _ = running.lines
    assert (starting["role"], starting["pid"]) == ("front", running.pid)
    assert starting["version"]
    assert (listening["target"], listening["http"]) == (ready["target"], ready["http"])
    assert ready["target"].startswith("127.0.0.1:")
    assert ready["seconds"] >= 0
    assert draining["seconds"] == 5
    assert running.text == []


async def test_a_process_that_drains_finishes_its_calls_and_is_not_ready() -> None:
    async with role("fine", "--http", "127.0.0.1:0") as running:
        ready = await running.logged("ready")
        assert fetch(ready["http"], "/readyz").status == 200
        async with connect(ready["target"]) as channel:
            watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="readiness")))
            assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
            calling = asyncio.create_task(models(ready["target"], seconds=2))
            await running.logged("called")
            running.process.terminate()
            assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        waiting = fetch(ready["http"], "/readyz")
        assert (waiting.status, waiting.told["missing"]) == (503, ["draining"])
        assert await calling == "True", "it knew, and went on"
        assert await running.ended() == 0


async def test_calls_that_outlast_the_drain_are_cancelled() -> None:
    async with role("fine", "--http", "127.0.0.1:0", "--drain-seconds", "0.1") as running:
        ready = await running.logged("ready")
        calling = asyncio.create_task(models(ready["target"], seconds=3600))
        await running.logged("called")
        running.process.send_signal(signal.SIGINT)
        with pytest.raises(ChiasmError) as caught:
            await calling
        assert caught.value.code in ("UNAVAILABLE", "CANCELLED")
        assert await running.ended() == 0


async def test_a_second_signal_cuts_the_drain_short() -> None:
    async with role("fine", "--http", "127.0.0.1:0", "--drain-seconds", "3600") as running:
        ready = await running.logged("ready")
        calling = asyncio.create_task(models(ready["target"], seconds=3600))
        await running.logged("called")
        running.process.terminate()
        await running.logged("draining")
        running.process.terminate()
        with pytest.raises(ChiasmError):
            await calling
        assert await running.ended() == 0
    assert running.events[-1] == "stopped"


async def test_a_supervised_process_ends_with_its_input_and_another_does_not() -> None:
    async with role("fine", "--supervised") as running, role("fine") as other:
        await running.logged("ready")
        await other.logged("ready")
        for process in (running.process, other.process):
            assert process.stdin is not None
            process.stdin.close()
        assert await running.ended() == 0
        assert await models((await other.logged("ready"))["target"]) == "False"
    assert running.events[-1] == "stopped"


async def test_a_supervised_process_ends_while_it_loads() -> None:
    async with role("load", "--supervised") as running:
        line = await running.logged("loading")
        assert (line["model"], line["total"]) == ("tiny", 10_000)
        assert running.process.stdin is not None
        running.process.stdin.close()
        assert await running.ended() == 0
    assert running.events == ["starting", "loading", "stopped"]


async def test_it_is_ready_when_all_it_needs_is_there() -> None:
    async with role("lacking", "--http", "127.0.0.1:0") as running:
        listening = await running.logged("listening")
        assert fetch(listening["http"], "/readyz").told["missing"] == ["an encoder"]
        assert fetch(listening["http"], "/healthz").status == 200
        await models(listening["target"])
        ready = await running.logged("ready")
        assert (await running.logged("not ready"))["missing"] == ["an encoder"]
        await running.logged("ready again")
        assert fetch(ready["http"], "/readyz").status == 200
    assert running.events == ["starting", "listening", "ready", "not ready", "ready again", "called"]


async def test_the_plain_port_answers_while_it_loads(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        http = f"127.0.0.1:{free.getsockname()[1]}"
    async with role("load", "--http", http, "--listen", f"unix:{tmp_path}/s") as running:
        await running.logged("loading")
        assert fetch(http, "/healthz").status == 200
        assert fetch(http, "/readyz").told["missing"] == ["start"]


@pytest.mark.parametrize(
    ("script", "flags", "lines"),
    [
        ("fine", ["--lisen", "x"], ["error: --lisen is not a setting", "python role.py", "did you mean --listen?"]),
        ("fine", ["--listen", "unix:/none/s"], ["error: there is no such folder", "/none", "--listen"]),
        ("checkpoint", [], ["error: a.weight is missing; b.weight is missing", "tiny", "--model"]),
        ("arena", [], ["error: there is no arena at /dev/shm/none", "ARENA_MISSING", "--arena-bytes"]),
    ],
)
async def test_what_cannot_work_is_told_in_three_lines(script: str, flags: list[str], lines: list[str]) -> None:
    async with role(script, *flags) as running:
        assert await running.ended() == 2
    assert len(running.text) == 3, running.text
    assert running.text[0] == lines[0]
    assert running.text[1].startswith("  where  ")
    assert running.text[2].startswith("  fix    ")
    assert lines[1] in running.text[1]
    assert lines[2] in running.text[2]


async def test_a_process_that_learns_that_it_will_never_be_ready_says_so_in_three_lines_and_lets_nobody_wait() -> None:
    async with role("hopeless", "--drain-seconds", "60") as running:
        target = (await running.logged("listening"))["target"]
        waiting = asyncio.create_task(models(target, seconds=60))
        assert await running.ended() == 2
        with pytest.raises(ChiasmError):
            await waiting
    assert running.text == [
        "error: no encoder will come",
        "  where  encoder digits",
        "  fix    name another model",
    ]


async def test_a_process_that_was_ready_once_does_not_give_up() -> None:
    async with role("hopeless-late") as running:
        target = (await running.logged("ready"))["target"]
        assert await models(target) == await models(target) == "False"
        running.process.terminate()
        assert await running.ended() == 0
    assert running.text == []


async def test_an_address_in_use_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    async with role("fine", "--http", "127.0.0.1:0", "--listen", f"unix:{tmp_path}/s") as first:
        ready = await first.logged("ready")
        for flags in (["--listen", ready["target"]], ["--http", ready["http"]]):
            async with role("load", *flags) as second:
                assert await second.ended() == 2
            assert len(second.text) == 3, second.text
            assert "loading" not in second.events
        async with connect(ready["target"]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1, "the first was left alone"


async def test_a_fault_that_nobody_foresaw_is_logged_with_its_traceback() -> None:
    async with role("bug") as running:
        assert await running.ended() == 1
    failed = running.lines[-1]
    assert (failed["event"], failed["level"]) == ("failed", "error")
    assert "ZeroDivisionError: unforeseen" in failed["exception"]
    assert running.text == []


async def test_a_process_whose_loop_hangs_is_told_dead_and_still_ends_with_its_supervisor() -> None:
    async with role("hasty", "--http", "127.0.0.1:0", "--supervised", "--drain-seconds", "0") as running:
        ready = await running.logged("ready")
        async with connect(ready["target"]) as channel:
            stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
            hanging = asyncio.ensure_future(answered(stub.Estimate(router_pb2.EstimateRequest())))
            await asyncio.to_thread(until_dead, ready["http"])
            assert running.process.stdin is not None
            running.process.stdin.close()
            assert await running.ended() == 1
            hanging.cancel()
            with pytest.raises((asyncio.CancelledError, ChiasmError)):
                await hanging
    assert running.lines[-1]["event"] == "the process did not end by itself"


async def test_a_killed_process_leaves_a_socket_that_the_next_one_takes(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/s"
    async with role("fine", "--listen", listen) as running:
        await running.logged("ready")
        os.kill(running.pid, signal.SIGKILL)
        assert await running.ended() == -signal.SIGKILL
    assert (tmp_path / "s").exists()
    async with role("fine", "--listen", listen) as again:
        await again.logged("ready")
        assert await models(listen) == "False"
        again.process.terminate()
        assert await again.ended() == 0
    assert not (tmp_path / "s").exists()


async def test_help_is_an_answer_and_no_fault() -> None:
    code, text = await outcome("-c", "from chiasm.settings import *; load(RoleSettings, ['--help'], program='x')")
    assert (code, text) == (0, [])
