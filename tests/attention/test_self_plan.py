"""The plan of self-attention, read back: every row finds its sequence's rows, and no other row of the pool."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.pages import Run
from chiasm.attention.self_plan import VIEW_FROM, SelfPlan, plan_self

PAGE = 4

steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no fault of what is tested."""


def rows(start: int, count: int, pages: list[int]) -> SequenceRows:
    return SequenceRows(start, count, pages, np.zeros((count, 2), dtype=np.int64), [])


def places(where: Run | np.ndarray) -> list[int]:
    return list(range(where.start, sum(where))) if isinstance(where, Run) else where.tolist()


def read_back(plan: SelfPlan) -> dict[int, list[int]]:
    """Rows of the pool that each row of the step sees."""
    seen: dict[int, list[int]] = {}
    for whole in plan.fresh:
        at = whole.start
        for length in whole.lengths:
            seen |= {at + i: plan.written[at : at + i + 1].tolist() for i in range(length)}
            at += length
        assert at == whole.stop
    for part in plan.continued:
        for row in range(part.start, part.stop):
            seen[row] = places(part.before) + plan.written[part.start : row + 1].tolist()
    seen |= {one.row: places(one.context) for one in plan.viewed}
    for batch in plan.padded:
        for row, slots, length in zip(batch.rows.tolist(), batch.slots.tolist(), batch.lengths.tolist(), strict=True):
            seen[row] = slots[:length]
            assert set(slots[length:]) <= set(slots[:length]), "padding is of the sequence's own"
    return seen


@steady
@given(data=st.data(), width=st.sampled_from([1, VIEW_FROM // 8]))
def test_every_row_finds_its_own_context(data: st.DataObject, width: int) -> None:
    pages = list(range(40))
    if data.draw(st.booleans()):
        pages = data.draw(st.permutations(pages))
    sequences: list[SequenceRows] = []
    expected: dict[int, list[int]] = {}
    at = 0
    for _ in range(data.draw(st.integers(0, 6))):
        start, count = data.draw(st.integers(0, 15)), data.draw(st.integers(0, 8))
        need = -(-(start + count) // PAGE)
        held, pages = list(pages[:need]), pages[need:]
        slots = [page * PAGE + i for page in held for i in range(PAGE)]
        sequences.append(rows(start, count, held))
        expected |= {at + i: slots[: start + i + 1] for i in range(count)}
        at += count
    plan = plan_self(Step(sequences), page_size=PAGE, width=width)
    assert read_back(plan) == expected
    assert plan.written.tolist() == [slots[-1] for _, slots in sorted(expected.items())]


def test_single_rows_of_like_length_are_one_batch() -> None:
    starts = (30, 100, 3, 37)
    step = Step([rows(start, 1, list(range(30 * i, 30 * i + 30))) for i, start in enumerate(starts)])
    batches = plan_self(step, page_size=PAGE, width=8).padded
    assert [(one.rows.tolist(), one.lengths.tolist()) for one in batches] == [
        ([2], [4]),
        ([0, 3], [31, 38]),
        ([1], [101]),
    ]
    assert [one.slots.shape for one in batches] == [(1, 4), (2, 38), (1, 101)]


def test_a_long_context_in_neighbouring_pages_is_read_in_place() -> None:
    together, scattered = [5, 6, 7, 8], [5, 7, 6, 8]
    plan = plan_self(Step([rows(14, 1, together), rows(14, 1, scattered)]), page_size=PAGE, width=VIEW_FROM // 15 + 1)
    assert [(one.row, one.context) for one in plan.viewed] == [(0, Run(20, 15))]
    assert [batch.rows.tolist() for batch in plan.padded] == [[1]]
    short = rows(14, 1, together)
    beside = plan_self(Step([short, rows(14, 1, scattered)]), page_size=PAGE, width=8)
    assert not beside.viewed and len(beside.padded) == 1
    alone = plan_self(Step([short]), page_size=PAGE, width=8)
    assert len(alone.viewed) == 1 and not alone.padded, "there is nobody to be batched with"


def test_whole_sequences_beside_each_other_are_taken_together() -> None:
    plan = plan_self(
        Step([rows(0, 3, [0]), rows(0, 4, [1]), rows(2, 2, [2]), rows(0, 1, [3])]), page_size=PAGE, width=1
    )
    assert [(one.start, one.stop, one.lengths) for one in plan.fresh] == [(0, 7, [3, 4]), (9, 10, [1])]
    assert [(one.start, one.stop, one.before) for one in plan.continued] == [(7, 9, Run(8, 2))]
