"""Where every recorded token stands: text and units laid on a timeline give the recorded positions of all cases."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch

from chiasm.timeline import Timeline, unit_name
from tests.oracles.qwen3_vl import recorded
from tests.oracles.qwen3_vl.recorded import Case


def readings() -> list[tuple[str, Case]]:
    """Every case, and once more in the other reading of the wrapper where it holds a video."""
    return [("", case) for case in recorded.cases()] + [("flat/", case) for case in recorded.cases("flat")]


@pytest.mark.parametrize(("reading", "case"), readings(), ids=lambda one: one if isinstance(one, str) else one["name"])
def test_units_and_text_take_the_recorded_positions(reading: str, case: Case) -> None:
    said, where = recorded.tensors(), f"{case['name']}/{reading}"
    processor = recorded.processor()
    grids = {
        kind: iter([(h, w) for t, h, w in case.get(f"{name}_grid_thw", []) for _ in range(t)])
        for kind, name in ((1, "image"), (2, "video"))
    }
    ids, kinds = said[f"{where}input_ids"].tolist(), said[f"{where}mm_token_type_ids"].tolist()
    timeline = Timeline()
    for number, (kind, run) in enumerate(groupby(range(len(ids)), key=lambda row: int(kinds[row]))):
        laid = [ids[row] for row in run]
        if not kind:
            timeline.append_text(laid)
            continue
        layout = processor.unit_layout(next(grids[kind]))
        assert layout.vision_tokens == len(layout.placeholder_ids) == len(laid)
        timeline.append_unit(unit_name(number, 0), layout)
    assert all(next(rest, None) is None for rest in grids.values())
    assert torch.equal(torch.from_numpy(timeline.positions()), said[f"{where}position_ids"])
    assert timeline.rope_delta == said[f"{where}rope_delta"].item()
