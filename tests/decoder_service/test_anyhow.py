"""Any chunking, any interleaving, any batch, any loss of room: the tokens of one undivided pass. A short slice of
`tests/fuzz/timelines.py`, the same every time."""

from __future__ import annotations

import hypothesis
import pytest

from tests.fuzz import timelines


@pytest.mark.timeout(400)
def test_whatever_the_engine_does_with_a_timeline_its_tokens_are_those_of_one_undivided_pass() -> None:
    # What fails is made small by the long run.
    timelines.examine(4, seed=10, phases=[hypothesis.Phase.generate])
    counts = timelines.counts
    # Were room never lost, nothing asked for again and all answers the same, this would say little.
    assert counts["preempted"] >= counts["examples"] / 5
    assert counts["asked again"] >= 1
    assert counts["resumed"] >= counts["answered"] / 10
    assert counts["refused"] <= counts["answered"] / 20
    assert len(timelines.answers) >= counts["answered"] / 4
    assert all(counts[f"of {model}"] >= counts["examples"] / 8 for model in timelines.MODELS)
