"""A short slice of `python -m tests.chaos`. Whether its judge finds anything at all shows `--control`."""

from __future__ import annotations

import random

import pytest

from tests.chaos.faults import StoreFaults
from tests.chaos.system import SCENARIOS, chaos
from tests.faults.injectors import NoEffect
from tests.faults.proxy import Proxy
from tests.redis_server import redis_server


@pytest.mark.timeout(300)
async def test_two_nodes_under_chaos_answer_rightly_or_say_why_not() -> None:
    report = await chaos(SCENARIOS["nodes"], seconds=8, seed=3, concurrency=4)
    assert not report.verdict.wrong, report.told
    assert report.verdict.right > 0 and report.faults.total() > 0, report.told


@pytest.mark.parametrize("name", ["link slow", "link cut"])
async def test_a_fault_of_something_that_nobody_uses_fails_its_run(name: str) -> None:
    with redis_server() as server:
        beside = Proxy(server.socket, server.socket)
        with pytest.raises(NoEffect):
            await StoreFaults(server, beside, random.Random(0)).faults[name]()
