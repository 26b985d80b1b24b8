"""`FlashInferAttention` with its kernels interpreted: the plans it makes, read as FlashInfer reads them, give the sums
written out. Whether the kernels themselves agree is asked on a CUDA device (`tests/gpu`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiasm.attention.backend import Step
from chiasm.attention.flashinfer_backend import FlashInferAttention
from tests.attention.flashinfer_interpreter import Interpreter
from tests.attention.steps import Case, Rows, case


def made(one: Case, heads: int = 4) -> tuple[FlashInferAttention, Interpreter]:
    kernels = Interpreter()
    workspace = torch.zeros(16, dtype=torch.uint8)
    return FlashInferAttention(one.pools, heads=heads, kernels=kernels, workspace=workspace), kernels


def run(one: Case, heads: int = 4) -> Interpreter:
    """Holds what comes out against the sums written out, and returns the kernels with the calls they had."""
    attention, kernels = made(one, heads)
    own, crossed = one.run(attention)
    torch.testing.assert_close(own, one.own, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(crossed, one.crossed, rtol=1e-5, atol=2e-6)
    return kernels


def cumulative(units: list[int]) -> list[int]:
    ends = [0]
    for unit in units:
        ends.append(ends[-1] + unit)
    return ends


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_mixed_step_of_prefill_and_decode_rows(heads: int, kv_heads: int, page_size: int) -> None:
    sequences = [
        Rows(0, [(0, 0), (0, 5), (0, 5), (0, 6), (0, 13)]),
        Rows(7, [(0, 13)]),
        Rows(15, [(0, 0)], video=2),
        Rows(3, [(5, 6), (5, 13), (0, 0)]),
        Rows(16, [(0, 4)], video=1),
    ]
    one = case(sequences, {0: [5, 1, 7], 1: [4, 2]}, heads=heads, kv_heads=kv_heads, page_size=page_size)
    run(one, heads)


def test_rows_that_see_nothing_come_out_zero_and_reach_no_kernel() -> None:
    one = case([Rows(0, [(0, 0), (0, 4), (0, 0), (4, 7), (3, 3)])], {0: [4, 3]})
    kernels = run(one)
    crossing = [parts for kind, parts in kernels.calls[1:2]]
    assert all(tokens > 0 for parts in crossing for _, tokens in parts)
    assert not one.crossed[:, [0, 2, 4]].any()


def test_a_step_in_which_nobody_sees_anything_runs_no_cross_kernel() -> None:
    kernels = run(case([Rows(0, [(0, 0)] * 3), Rows(4, [(0, 0)])], {}))
    assert [kind for kind, _ in kernels.calls] == ["prefill"] * 2, "self-attention of two layers"


def test_a_step_without_rows_and_sequences_without_rows() -> None:
    assert run(case([], {0: [3]})).calls == []
    run(case([Rows(4, []), Rows(0, [(0, 3)]), Rows(0, [])], {0: [3]}))


def test_a_decode_step_uses_the_decode_kernels() -> None:
    kernels = run(case([Rows(7, [(0, 5)]), Rows(3, [(0, 2)], video=1), Rows(0, [(0, 0)])], {0: [5], 1: [2]}))
    assert [kind for kind, _ in kernels.calls] == ["decode"] * 4
    assert kernels.calls[1][1] == [(1, 5), (1, 2)]


def test_questions_about_one_video_read_its_keys_once() -> None:
    """Sixteen decode rows over the same slots are one part of sixteen rows."""
    kernels = run(case([Rows(at, [(0, 40)]) for at in range(16)], {0: [8] * 5}))
    assert [parts for _, parts in kernels.calls[1::2]] == [[(16, 40)]] * 2


def test_frames_spread_over_the_text_are_tabled_once_for_many_rows() -> None:
    """200 rows with a new frame of 9 tokens every tenth: pages of a fraction of what the rows see one by one."""
    units = [9] * 20
    ends = cumulative(units)
    kernels = run(case([Rows(0, [(0, ends[row // 10]) for row in range(200)])], {0: units}))
    common, rest = (parts for _, parts in kernels.calls[1:3])
    assert len(rest) == 19, "a part for each number of frames seen"
    table = sum(tokens for _, tokens in [*common, *rest])
    assert table * 8 < sum(ends[row // 10] for row in range(200)), table


def test_one_row_over_eight_thousand_tokens_and_as_many_visual_ones() -> None:
    one = case([Rows(8191, [(0, 8120)]), Rows(8192, [(145, 290)])], {0: [145] * 56}, page_size=16, head_dim=4)
    run(one)


def test_keys_of_a_layer_are_kept_for_the_next_step() -> None:
    """What a step writes is read by the step after it: the pool holds the rows where its pages say."""
    one = case([Rows(2, [(0, 0)] * 6)], {}, page_size=4)
    run(one)
    pages = one.step.sequences[0].pages
    for row in range(6):
        at = row + 2
        slot = pages[at // 4] * 4 + at % 4
        torch.testing.assert_close(one.pools.self_kv[:, 0, slot], one.k[:, row], rtol=0, atol=0)
        torch.testing.assert_close(one.pools.self_kv[:, 1, slot], one.v[:, row], rtol=0, atol=0)


def test_cross_attention_is_planned_anew_only_when_a_row_looks_elsewhere() -> None:
    """Decode steps at the same video, then one that sees a frame more, then one of a single sequence."""
    one = case([Rows(3, [(0, 5)]), Rows(9, [(0, 5)])], {0: [5, 4]}, page_size=4)
    attention, kernels = made(one)
    one.run(attention)
    assert kernels.plans == [[1, 3], [5]], "self-attention, then cross-attention of both rows together"
    first, last = one.step.sequences
    attention.plan(Step([replace(first, start=4, pages=[0, 1]), last]))
    assert kernels.plans[2:] == [[2, 3]], "self-attention alone"
    further = case([Rows(9, [(0, 9)])], {0: [5, 4]}).step.sequences[0]
    attention.plan(Step([first, replace(last, boundaries=further.boundaries, extents=further.extents)]))
    assert kernels.plans[3] == [1, 3]
    assert len(kernels.plans) > 4, "and cross-attention"
    before = len(kernels.plans)
    attention.plan(Step([first]))
    assert kernels.plans[before:] == [[1], [5]]


def test_in_sixteen_bits_merging_loses_no_more_than_the_type() -> None:
    units = [9] * 20
    ends = cumulative(units)
    one = case([Rows(30, [(0, ends[row // 4]) for row in range(80)])], {0: units}, dtype=torch.bfloat16)
    attention, kernels = made(one)
    own, crossed = one.run(attention)
    assert len(kernels.calls) == 6, "two layers of self-attention, of what is in common and of the rest"
    for got, expected in ((own, one.own), (crossed, one.crossed)):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_what_is_not_attached_cannot_be_seen() -> None:
    with pytest.raises(AssertionError, match="not attached"):
        run(case([Rows(0, [(0, 9)])], {0: [4, 3]}))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    videos = {
        number: data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6), label=f"video {number}")
        for number in range(2)
    }
    sequences = []
    for _ in range(data.draw(st.integers(0, 6), label="sequences")):
        video = data.draw(st.integers(0, 2))
        ends = cumulative(videos.get(video, []))
        rows = data.draw(st.sampled_from([0, 1, 1, 2, 5, 9, 70]))
        pairs = st.tuples(st.sampled_from(ends), st.sampled_from(ends)).map(lambda pair: (min(pair), max(pair)))
        seen = data.draw(st.lists(pairs, min_size=rows, max_size=rows))
        sequences.append(Rows(data.draw(st.integers(0, 9)), seen, video))
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    heads, kv_heads = data.draw(st.sampled_from([(2, 2), (4, 2), (6, 2)]))
    run(case(sequences, videos, page_size=page_size, heads=heads, kv_heads=kv_heads, head_dim=4), heads)
