"""A short slice of `python -m tests.chaos`."""

from __future__ import annotations

import pytest

from tests.chaos.system import SCENARIOS, chaos


@pytest.mark.timeout(300)
async def test_two_nodes_under_chaos_answer_rightly_or_say_why_not() -> None:
    report = await chaos(SCENARIOS["nodes"], seconds=20, seed=3, concurrency=4)
    assert not report.verdict.wrong, report.told
    assert report.verdict.right > report.verdict.asked / 2, report.told
    assert report.faults.total() >= 5, report.told
