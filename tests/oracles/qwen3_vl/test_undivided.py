"""Divided equals undivided, for random checkpoints of several shapes: what `python -m tests.oracles.qwen3_vl` does."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from chiasm.models.qwen3_vl.text import Qwen3VLDecoder
from tests.oracles.qwen3_vl.__main__ import main
from tests.oracles.qwen3_vl.compare import TAPS, cases, compare


@pytest.mark.parametrize("seed", range(len(TAPS)))
async def test_logits_and_greedy_answers_are_those_of_the_undivided_model(seed: int) -> None:
    report = await compare(seed)
    assert report.worst.keys() == {name for name, _ in cases(seed)}
    assert report.ok, report.faults


def test_the_command_tells_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    levels = Qwen3VLDecoder._levels
    with mock.patch.object(Qwen3VLDecoder, "_levels", lambda self, features: levels(self, features)[::-1]):
        assert main(["--seed", "4", "--json"]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not told["ok"] and told["worst"]["text"] < 1e-5
    assert {"image", "odd video", "mixed"} <= {fault.partition(":")[0] for fault in told["faults"]}
