"""States after layers are those of the undivided model: what `python -m tests.oracles.conditioning` does."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from chiasm.models.qwen3_vl.text import Qwen3VLLayers
from tests.oracles.conditioning.__main__ import main
from tests.oracles.conditioning.compare import cases, compare, cut_of
from tests.oracles.qwen3_vl.compare import TAPS

SEEDS = range(7)
"""Among them: as many taps as layers are kept, more, fewer, none; cut after the first layer and after the last."""


@pytest.mark.parametrize("seed", SEEDS)
async def test_states_after_every_layer_are_those_of_the_undivided_model(seed: int) -> None:
    report = await compare(seed)
    assert report.worst.keys() == {f"{name}, {side}" for name, _ in cases(seed) for side in ("whole", "cut")}
    assert report.ok, report.faults


def test_the_seeds_cut_before_among_and_behind_the_taps_and_at_the_very_end() -> None:
    cuts = [(cut_of(seed, 3 + seed % 3), len(TAPS[seed % len(TAPS)]), 3 + seed % 3) for seed in SEEDS]
    assert any(cut < taps for cut, taps, _ in cuts) and any(cut == taps for cut, taps, _ in cuts)
    assert any(cut > taps > 0 for cut, taps, _ in cuts) and any(not taps for _, taps, _ in cuts)
    assert any(cut == depth for cut, _, depth in cuts) and any(cut == 1 for cut, _, _ in cuts)


def test_the_command_tells_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    levels = Qwen3VLLayers._levels
    with mock.patch.object(Qwen3VLLayers, "_levels", lambda self, features: levels(self, features)[::-1]):
        assert main(["--seed", "4", "--json"]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not told["ok"] and told["worst"]["text, whole"] < 1e-5
    assert {"image", "odd video", "both"} <= {fault.partition(",")[0] for fault in told["faults"]}
