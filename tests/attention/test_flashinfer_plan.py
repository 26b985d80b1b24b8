"""The integers handed to FlashInfer: their form, their size, and what is refused before a kernel reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.flashinfer_plan import (
    RECOMMENDED_WORKSPACE,
    PagedPlan,
    plan_cross,
    plan_self,
    workspace_bytes,
)


def rows(start: int, count: int, pages: list[int]) -> SequenceRows:
    return SequenceRows(start, count, pages, np.zeros((count, 2), np.int64), [])


def looking(seen: list[tuple[int, int]], extents: list[tuple[int, int, int]]) -> SequenceRows:
    return SequenceRows(0, len(seen), [0], np.array(seen, dtype=np.int64), extents)


def test_self_attention_takes_whole_pages_and_the_tokens_of_the_last() -> None:
    step = Step([rows(3, 2, [7, 2]), rows(0, 0, []), rows(0, 4, [5]), rows(8, 1, [1, 0, 9, 4])])
    plan = plan_self(step, 4)
    assert plan.parts is not None
    assert plan.parts.qo_indptr.tolist() == [0, 2, 6, 7]
    assert plan.parts.indptr.tolist() == [0, 2, 3, 6]
    assert plan.parts.indices.tolist() == [7, 2, 5, 1, 0, 9], "a page beyond the rows is held and not read"
    assert plan.parts.last_page_len.tolist() == [1, 4, 1]
    assert plan.written.tolist() == [31, 8, 20, 21, 22, 23, 36]
    plan.parts.check(step_rows=7, pages=10)


def test_a_sequence_without_enough_pages_is_a_broken_promise() -> None:
    with pytest.raises(AssertionError, match="fewer pages"):
        plan_self(Step([rows(3, 2, [7])]), 4)


def test_sequences_over_the_same_slots_share_their_parts_and_others_do_not() -> None:
    here, there = [(0, 10, 4), (4, 30, 3)], [(0, 20, 4)]
    step = Step([looking([(0, 7)], here), looking([(0, 4)], there), looking([(0, 0)], []), looking([(0, 7)], here)])
    plan = plan_cross(step)
    assert plan.common is not None and plan.rest is None
    shared, alone = sorted(np.split(plan.common.rows, plan.common.qo_indptr[1:-1]), key=len, reverse=True)
    assert (sorted(shared.tolist()), alone.tolist()) == ([0, 3], [1])
    assert sorted(plan.common.indices.tolist()) == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32]
    assert plan.common.last_page_len.tolist() == [1, 1]


def test_every_row_has_the_slots_it_sees_each_of_them_once() -> None:
    extents = [(0, 10, 2), (2, 20, 2), (4, 30, 2)]
    slots = [10, 11, 20, 21, 30, 31]
    seen = [(0, 0), (0, 2), (0, 4), (0, 4), (2, 4), (2, 6), (0, 6), (5, 6)]
    plan = plan_cross(Step([looking(seen, extents), looking(seen[::-1], extents)]))
    had: dict[int, list[int]] = {}
    for parts in (plan.common, plan.rest):
        if parts is None:
            continue
        parts.check(step_rows=16, pages=32)
        for part in range(parts.parts):
            for row in parts.rows[parts.qo_indptr[part] : parts.qo_indptr[part + 1]].tolist():
                had.setdefault(row, []).extend(parts.indices[parts.indptr[part] : parts.indptr[part + 1]].tolist())
    expected = {row: slots[first:last] for row, (first, last) in enumerate([*seen, *seen[::-1]]) if last > first}
    assert {row: sorted(some) for row, some in had.items()} == expected


def test_a_page_table_costs_less_than_a_mask_of_bits() -> None:
    """2,048 rows, 64 frames of 128 tokens spread evenly over them."""
    units = [(i * 128, i * 128, 128) for i in range(64)]
    seen = [(0, 128 * (1 + row // 32)) for row in range(2048)]
    plan = plan_cross(Step([looking(seen, units)]))
    table = sum(part.indices.nbytes for part in (plan.common, plan.rest) if part is not None)
    assert table < 2048 * 8192 / 8 / 6, table


def sound() -> PagedPlan:
    parts = plan_self(Step([rows(0, 3, [1]), rows(4, 1, [0, 2])]), 4).parts
    assert parts is not None
    parts.check(step_rows=4, pages=3)
    return parts


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("indptr", [0, 1, 3, 3], "(4|parts)"),
        ("indptr", [0, 0, 3], "without pages"),
        ("indptr", [0, 1, 2], "without pages"),
        ("qo_indptr", [0, 3, 3], "without rows"),
        ("qo_indptr", [1, 3, 4], "without rows"),
        ("indices", [1, 0, 3], "not of the pool"),
        ("indices", [1, -1, 2], "not of the pool"),
        ("last_page_len", [3, 5], "last page"),
        ("last_page_len", [0, 1], "last page"),
        ("rows", [0, 1, 2, 4], "not of the step"),
        ("rows", [0, 1, 1, 3], "twice"),
    ],
)
def test_a_plan_that_a_kernel_would_misread_is_stopped_before(field: str, value: list[int], said: str) -> None:
    kind = np.int64 if field == "rows" else np.int32
    changed: dict[str, Any] = {field: np.array(value, dtype=kind)}
    broken = replace(sound(), **changed)
    with pytest.raises(AssertionError, match=said):
        broken.check(step_rows=4, pages=3)


def test_the_workspace_holds_the_largest_split_and_at_least_what_is_recommended() -> None:
    """An 8-billion model's heads on 132 multiprocessors: 33 pieces of 32 heads by 128 rows."""
    eight = workspace_bytes(heads=32, kv_heads=8, head_dim=128, multiprocessors=132)
    assert eight == RECOMMENDED_WORKSPACE
    large = workspace_bytes(heads=64, kv_heads=4, head_dim=128, multiprocessors=132)
    assert large == 64 * 66 * 128 * 129 * 4 + 64 > RECOMMENDED_WORKSPACE
