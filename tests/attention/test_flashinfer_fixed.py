"""`FixedRows` with its kernels interpreted: decode steps in buckets give the sums written out, from buffers that stay
where they are. Whether the kernels can be captured is asked on a CUDA device (`tests/gpu`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.flashinfer_backend import FlashInferAttention
from chiasm.attention.flashinfer_fixed import FixedAttention, FixedRows
from chiasm.attention.flashinfer_plan import RECOMMENDED_WORKSPACE, plan_rows, workspace_bytes
from tests.attention.flashinfer_interpreter import Interpreter
from tests.attention.steps import LAYERS, Case, Rows, case

MOST_ROWS = 16


def made(one: Case, heads: int = 4, *, largest_table: int = 1 << 16) -> tuple[FixedAttention, Interpreter]:
    kernels = Interpreter()
    workspace = torch.zeros(16, dtype=torch.uint8)
    shared = FixedAttention(
        one.pools,
        heads=heads,
        kernels=kernels,
        workspace=workspace,
        most_rows=MOST_ROWS,
        largest_table=largest_table,
    )
    return shared, kernels


def hold(one: Case, attention: FixedRows, rows: int) -> None:
    """Holds a step in a bucket of so many rows against the sums written out. Rows that are nobody's bring anything."""
    generator = torch.Generator().manual_seed(1)

    def padded(x: Tensor) -> Tensor:
        more = torch.randn(rows - x.shape[0], *x.shape[1:], generator=generator).to(x.dtype)
        return torch.cat([x, more])

    attention.plan(one.step)
    crossing = bool(one.step.sees().any())
    for layer in range(LAYERS):
        q = padded(one.q[layer])
        own = attention.attend_self(q, padded(one.k[layer]), padded(one.v[layer]), layer=layer)
        torch.testing.assert_close(own[: one.step.rows], one.own[layer], rtol=1e-5, atol=2e-6)
        assert own.shape == q.shape and own.isfinite().all()
        if crossing:
            crossed = attention.attend_cross(q, layer=layer)
            torch.testing.assert_close(crossed[: one.step.rows], one.crossed[layer], rtol=1e-5, atol=2e-6)
            assert crossed.shape == q.shape and not crossed[one.step.rows :].any(), "nobody sees anything"


VIDEOS = {0: [5, 1, 7], 1: [4, 2]}


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_decode_step_in_a_bucket_that_it_does_not_fill(heads: int, kv_heads: int, page_size: int) -> None:
    sequences = [
        Rows(7, [(0, 13)]),
        Rows(15, [(0, 13)]),
        Rows(0, [(0, 0)], video=2),
        Rows(3, [(5, 6)]),
        Rows(16, [(0, 4)], video=1),
    ]
    one = case(sequences, VIDEOS, heads=heads, kv_heads=kv_heads, page_size=page_size, spare=True)
    shared, kernels = made(one, heads)
    hold(one, shared.bucket(8), 8)
    hold(one, shared.bucket(5), 5)
    assert {kind for kind, _ in kernels.calls} == {"decode", "prefill"}


def test_rows_that_see_nothing_come_out_zero_beside_rows_that_see_something() -> None:
    one = case([Rows(2, [(0, 0)]), Rows(9, [(0, 7)]), Rows(1, [(3, 3)])], {0: [4, 3]}, spare=True)
    shared, _ = made(one)
    assert not one.crossed[:, [0, 2]].any()
    hold(one, shared.bucket(4), 4)
    assert not shared.cross_kv[:, :, shared.nowhere].any(), "the spare slot is as it was"


def test_nobody_writes_to_the_spare_page_alone() -> None:
    one = case([Rows(5, [(0, 0)])], {}, page_size=4, spare=True)
    shared, _ = made(one)
    before = one.pools.self_kv.clone()
    hold(one, shared.bucket(4), 4)
    slot = one.step.sequences[0].pages[1] * 4 + 1
    changed = (one.pools.self_kv != before).logical_and(~before.isnan() | ~one.pools.self_kv.isnan())
    assert one.pools.spare_page is not None
    assert changed.any(-1).any(-1).any(0).any(0).nonzero().flatten().tolist() == [slot, one.pools.spare_page * 4]


def test_neighbours_that_look_at_the_same_slots_are_one_part() -> None:
    one = case([Rows(at, [(0, 40)]) for at in range(6)] + [Rows(3, [(0, 39)])], {0: [8] * 5}, spare=True)
    shared, kernels = made(one)
    hold(one, shared.bucket(8), 8)
    parts = next(parts for kind, parts in kernels.calls if kind == "prefill")
    assert parts == [(6, 40), (1, 39), (1, 1), *[(0, 1)] * 5]


def test_a_step_in_which_nobody_sees_anything_plans_no_cross_attention() -> None:
    one = case([Rows(4, [(0, 0)]), Rows(0, [(0, 0)])], VIDEOS, spare=True)
    shared, kernels = made(one)
    shared.bucket(2).plan(one.step)
    assert kernels.plans == [[2, 1]], "self-attention alone"


def test_cross_attention_is_planned_anew_when_a_row_looks_elsewhere_or_another_bucket_did() -> None:
    one = case([Rows(3, [(0, 5)]), Rows(9, [(0, 5)])], {0: [5, 4]}, page_size=4, spare=True)
    shared, kernels = made(one)
    two, four = shared.bucket(2), shared.bucket(4)

    def planned(attention: FixedRows, step: Step) -> list[list[int]]:
        before = len(kernels.plans)
        attention.plan(step)
        return kernels.plans[before:]

    first, last = one.step.sequences
    blind = replace(first, boundaries=np.zeros((1, 2), np.int64), extents=[])
    assert planned(two, one.step) == [[1, 3], [5, 0]]
    assert planned(two, Step([replace(first, start=4, pages=[0, 1]), last])) == [[2, 3]]
    assert planned(two, Step([blind, blind])) == [[1, 1]], "and what was planned for the others is still there"
    assert planned(two, one.step) == [[1, 3]]
    assert planned(four, one.step) == [[1, 3, 1, 1], [5, 1, 0, 0]]
    assert planned(two, one.step) == [[1, 3], [5, 0]], "the table holds the other bucket's"
    assert planned(two, Step([last])) == [[3, 1], [5, 1]]
    hold(one, two, 2)


def test_what_the_tables_cannot_hold_is_told_before_it_is_planned() -> None:
    one = case([Rows(3, [(0, 5)]), Rows(9, [(0, 9)])], {0: [5, 4]}, page_size=4, spare=True)
    assert made(one, largest_table=14 + MOST_ROWS)[0].fits(one.step)
    assert not made(one, largest_table=13 + MOST_ROWS)[0].fits(one.step), "visual tokens"
    long = Step([SequenceRows(40, 1, range(11), np.zeros((1, 2), np.int64), [])])
    assert made(one, largest_table=11 + MOST_ROWS)[0].fits(long)
    assert not made(one, largest_table=10 + MOST_ROWS)[0].fits(long), "pages"


def test_tables_are_no_larger_than_all_rows_could_fill() -> None:
    one = case([Rows(3, [(0, 5)])], {0: [5]}, page_size=4, spare=True)
    shared, _ = made(one)
    assert len(shared.self_table.numpy) == MOST_ROWS * shared.self_kv.shape[2]
    assert len(shared.cross_table.numpy) == MOST_ROWS * shared.cross_kv.shape[2]


def test_more_rows_than_the_bucket_has_and_several_rows_of_a_sequence_are_broken_promises() -> None:
    one = case([Rows(3, [(0, 0)]), Rows(0, [(0, 0)])], {}, spare=True)
    shared, _ = made(one)
    with pytest.raises(AssertionError, match="more rows"):
        shared.bucket(1).plan(one.step)
    with pytest.raises(AssertionError, match="several rows"):
        shared.bucket(4).plan(case([Rows(0, [(0, 0)] * 2)], {}, spare=True).step)


def test_pools_without_a_spare_page_serve_no_fixed_rows() -> None:
    one = case([Rows(0, [(0, 0)])], {})
    attention = FlashInferAttention(
        one.pools, heads=4, kernels=Interpreter(), workspace=torch.zeros(16, dtype=torch.uint8)
    )
    with pytest.raises(AssertionError, match="no place"):
        attention.fixed(4)


def test_parts_are_in_the_order_of_the_step() -> None:
    one = case([Rows(1, [(0, 2)]), Rows(1, [(0, 0)]), Rows(2, [(0, 2)]), Rows(3, [(0, 2)])], {0: [2]}, spare=True)
    plan = plan_rows(one.step, nowhere=77)
    slots = one.step.sequences[0].extents[0][1] + np.arange(2)
    assert plan.rows.tolist() == [0, 1, 2, 3]
    assert plan.qo_indptr.tolist() == [0, 1, 2, 4] and plan.indptr.tolist() == [0, 2, 3, 5]
    assert plan.indices.tolist() == [*slots, 77, *slots] and plan.last_page_len.tolist() == [1, 1, 1]


def test_the_workspace_holds_a_tile_for_each_fixed_row() -> None:
    """What `PrefillPlan` takes of it for 32 query heads on 8 key heads of 128 dimensions, on 132 multiprocessors."""
    for rows in (0, 64, 512):
        pieces = max(2 * 132 // 8, -(-rows * 4 // 16) + rows - 1) if rows else 0
        need = 32 * pieces * 16 * (128 + 1) * 4
        got = workspace_bytes(heads=32, kv_heads=8, head_dim=128, multiprocessors=132, fixed_rows=rows)
        assert got >= max(need, RECOMMENDED_WORKSPACE)
        assert rows < 512 or need > RECOMMENDED_WORKSPACE


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_decode_step_in_any_bucket(data: st.DataObject) -> None:
    videos = {
        number: data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5), label=f"video {number}")
        for number in range(2)
    }
    sequences = []
    for _ in range(data.draw(st.integers(1, 7), label="sequences")):
        video = data.draw(st.integers(0, 2))
        ends = np.cumsum([0, *videos.get(video, [])]).tolist()
        first, last = sorted(data.draw(st.tuples(st.sampled_from(ends), st.sampled_from(ends))))
        sequences.append(Rows(data.draw(st.integers(0, 20)), [(first, last)], video))
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    heads, kv_heads = data.draw(st.sampled_from([(2, 2), (4, 2), (6, 2)]))
    one = case(sequences, videos, page_size=page_size, heads=heads, kv_heads=kv_heads, head_dim=4, spare=True)
    shared, _ = made(one, heads)
    rows = len(sequences) + data.draw(st.integers(0, 5))
    attention = shared.bucket(rows)
    hold(one, attention, rows)
    hold(one, attention, rows)
