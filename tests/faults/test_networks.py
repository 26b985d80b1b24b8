"""Clients behind a network of their own, which loses packets, or the client. What this takes of a machine says
`tests/faults/injectors/network.py`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chiasm.rpc.limits import SERVER_KEEPALIVE_MS, SERVER_KEEPALIVE_TIMEOUT_MS
from tests.faults.injectors import needed
from tests.faults.injectors.network import Loss, Namespace, Unplug, cabled
from tests.processes import Trio, trio

NOTICED = 2 * (SERVER_KEEPALIVE_MS + SERVER_KEEPALIVE_TIMEOUT_MS) / 1000
"""Seconds in which a server promises to miss a client that has gone without a word."""

MANY = 1500
"""Tokens: far more than are drawn until then."""


@contextmanager
def routed(folder: Path, there: Namespace) -> Iterator[Trio]:
    """A system whose router is in a namespace. Its workers are reached by socket files."""
    open_to_it = ["--listen", f"{there.address}:0", "--insecure", "--http", f"{there.address}:0"]
    with trio(folder, router=open_to_it, decoder=["--deterministic"], within={"router": there.within}) as made:
        yield made


@contextmanager
def client(there: Namespace, target: str, tokens: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*there.within, sys.executable, "-m", "tests.faults.streaming_client", target, str(tokens)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    told: dict[str, Any] = json.loads(process.stdout.readline())
    return told


def until_heard(process: subprocess.Popen[str], event: str) -> None:
    while heard(process)["event"] != event:
        pass


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_a_client_whose_cable_is_pulled_is_missed_and_no_more_is_drawn_for_it(tmp_path: Path) -> None:
    """M53: one client is being told tokens, which nobody acknowledges; the other's answer has not begun."""
    with cabled() as (here, there):
        await asyncio.to_thread(_cable_pulled, tmp_path, here, there)


def _cable_pulled(folder: Path, here: Namespace, there: Namespace) -> None:
    with routed(folder, here) as served:
        port = int(served.target.rpartition(":")[2])

        def running() -> float:
            return here.call(served.router.counted)["chiasm_num_requests_running"]

        with client(there, served.target, MANY) as telling:
            until_heard(telling, "token")
            served.encoder.pause()  # so that the other one waits
            with client(there, served.target, 1) as waiting:
                try:
                    until_heard(waiting, "asking")
                    _until(lambda: running() == 2, seconds=30)
                    fault = Unplug(there, here, port)
                    fault.inject()
                    try:
                        fault.verify()
                        _until(lambda: running() == 0, seconds=NOTICED)
                    finally:
                        fault.end()
                finally:
                    served.encoder.go_on()
        assert here.call(served.router.counted)["chiasm_requests_total:generate:CANCELLED"] == 2
        assert served.decoder.counted()["chiasm_generation_tokens_total"] < MANY


def _until(holds: Any, *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.05)


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_through_a_network_that_loses_a_third_of_all_packets_an_answer_is_exact(tmp_path: Path) -> None:
    """M67"""
    needed("nft")
    with cabled() as (here, there):
        truth, ids = await asyncio.to_thread(_lossy, tmp_path, here, there)
    assert ids == truth


def answered(there: Namespace, target: str) -> list[int]:
    ids: list[int] = []
    with client(there, target, 40) as telling:
        while (told := heard(telling))["event"] != "ended":
            ids += told.get("ids", [])
    return ids


def _lossy(folder: Path, here: Namespace, there: Namespace) -> tuple[list[int], list[int]]:
    """The ids of an answer before, and the same answer's meanwhile."""
    with routed(folder, here) as served:
        truth = answered(there, served.target)
        losses = [Loss(namespace, 30) for namespace in (here, there)]
        try:
            for loss in losses:
                loss.inject()
            ids = answered(there, served.target)
            for loss in losses:
                loss.verify()
            return truth, ids
        finally:
            for loss in losses:
                loss.end()
