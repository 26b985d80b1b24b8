"""`chiasm load` as a person runs it: against the shipped model, and against a router that answers as it is told."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from chiasm.errors import Overloaded
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc
from tests.cli.serving import Served, chiasm, serving

NUMBERS = (
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "mean_concurrency",
    *(f"{share}_{name}_ms" for share in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
)  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("digits", "--listen", "127.0.0.1:0") as running:
        yield running


def load(target: str, *arguments: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """What the command said, and the numbers it wrote."""
    written = folder / "load.json"
    done = chiasm("load", "--target", target, "--json", str(written), *arguments)
    assert written.exists(), done.stderr
    return done, json.loads(written.read_text(encoding="utf-8"))


def test_a_closed_loop_is_answered_right_and_written_down(served: Served, tmp_path: Path) -> None:
    shown = tmp_path / "load.html"
    arguments = ("--scenario", "questions", "--concurrency", "3", "--requests", "24", "--html", str(shown))
    done, said = load(served.target, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (said["completed"], said["judged"], said["wrong"], said["failed"], said["refused"]) == (24, 24, 0, 0, 0)
    assert all(isinstance(said[name], float) for name in NUMBERS)
    assert said["model_id"] == "digits" and said["total_output_tokens"] >= 24 and said["units"] > 0
    assert said["max_concurrent_requests"] <= 3
    littles = said["request_throughput"] * said["mean_e2el_ms"] / 1000
    assert said["mean_concurrency"] == pytest.approx(littles) and littles <= 3
    assert done.stdout == "" and "verdict   Everything held at 3 at once" in done.stderr
    told = shown.read_text(encoding="utf-8")
    assert "Everything held at 3 at once" in told and not re.search(r"https?:|src=|href=|url\(", told)


def test_an_open_loop_sends_what_its_rate_and_time_give(served: Served, tmp_path: Path) -> None:
    arguments = ("--scenario", "growing", "--rate", "8", "--duration", "2", "--fresh", "--seed", "5")
    done, said = load(served.target, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (said["num_prompts"], said["completed"], said["wrong"]) == (16, 16, 0)
    assert said["request_rate"] == 8.0 and said["arrivals"] == "poisson"
    assert said["units_cached"] < said["units"]


class Scripted(router_pb2_grpc.RouterServicer):
    """Takes its time between tokens, is always wrong, and refuses every third question but the first."""

    def __init__(self) -> None:
        self.asked = 0

    async def ListModels(self, request: rpb.ListModelsRequest, context: Any) -> rpb.ListModelsResponse:
        return rpb.ListModelsResponse(models=[rpb.Model(name="digits", ready=True)])

    async def Generate(self, request: rpb.GenerateRequest, context: Any) -> AsyncIterator[rpb.GenerateResponse]:
        self.asked += 1
        if self.asked % 3 == 0:
            raise Overloaded("QUEUE_FULL", "no room", retry_after=0.001)
        yield rpb.GenerateResponse(started=pb.Started(prompt_tokens=4))
        for index in range(3):
            await asyncio.sleep(0.02)
            yield rpb.GenerateResponse(tokens=pb.Tokens(index=index, ids=[index], text=b"x", attempt=1))
        usage = pb.Usage(prompt_tokens=4, output_tokens=3)
        yield rpb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP, usage=usage, tokens=3))


async def test_wrong_slow_and_refused_answers_are_counted_and_missed(tmp_path: Path) -> None:
    scripted = Scripted()
    server = Server().add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, scripted)
    async with server:
        arguments = ("--concurrency", "2", "--requests", "12", "--slo", "itl_ms=1,refused=0.1")
        done, said = await asyncio.to_thread(load, server.target, *arguments, folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert scripted.asked == 13, "one question before the load, and what is refused is not asked again"
    assert (said["completed"], said["refused"], said["failed"], said["wrong"]) == (8, 4, 0, 8)
    assert said["reasons"] == {"QUEUE_FULL": 4}
    assert said["request_goodput"] == 0.0 and said["p50_itl_ms"] >= 15
    faults = " ".join(said["missed"])
    assert "8 of 8 answers were wrong" in faults and "p99 itl_ms" in faults and "33.3% were refused" in faults


def three_lines(done: subprocess.CompletedProcess[str]) -> str:
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["error:", "where", "fix"], done.stderr
    return done.stderr


def test_without_the_harness_the_extra_is_named() -> None:
    script = "import sys; sys.modules['guidellm'] = None; from chiasm.cli import main; main()"
    command = [sys.executable, "-c", script, "load"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "pip install 'chiasm[load]'" in three_lines(done)


def test_where_nobody_answers_or_options_contradict_it_is_said_in_three_lines() -> None:
    assert "no server answers at 127.0.0.1:1" in three_lines(chiasm("load", "--target", "127.0.0.1:1"))
    assert "both --rate and --concurrency" in three_lines(chiasm("load", "--rate", "1", "--concurrency", "1"))
    assert "both --duration and --requests" in three_lines(chiasm("load", "--duration", "1", "--requests", "1"))
    assert "slo" in three_lines(chiasm("load", "--slo", "ttft=1"))
