"""`TorchAttention` over whole steps against sums written out: kinds of sequences mixed, videos shared, both precisions,
long ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.pages import Pools
from chiasm.attention.self_plan import VIEW_FROM
from chiasm.attention.torch_backend import LARGE_PIECE, PIECE, TorchAttention
from tests.attention import judge
from tests.attention.steps import Case, Rows, any_mix, case


def check(one: Case) -> None:
    own, crossed = one.run(TorchAttention(one.pools))
    judge.close(own, one.own)
    judge.close(crossed, one.crossed)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), dtype=st.sampled_from(list(judge.TOLERANCE)))
def test_any_mix_of_sequences(data: st.DataObject, dtype: torch.dtype) -> None:
    made = any_mix(data, dtype)
    check(made)


@pytest.mark.parametrize("dtype", judge.TOLERANCE)
def test_single_rows_of_all_lengths(dtype: torch.dtype) -> None:
    """One step of 20 decoding sequences; two thirds look at one of two videos, a third sees nothing."""
    videos = {0: [9, 30, 4], 1: [12]}
    totals = [43, 12, 0]
    sequences = [Rows(i * i % 53, [(0, totals[i % 3])], i % 3) for i in range(20)]
    check(case(sequences, videos, dtype=dtype))


@pytest.mark.parametrize("dtype", judge.TOLERANCE)
def test_a_long_context_read_where_it_lies(dtype: torch.dtype) -> None:
    page = VIEW_FROM // (2 * 64)
    one = case([Rows(page - 1, [(0, 0)]), Rows(3, [(0, 0)])], {}, head_dim=64, page_size=page, dtype=dtype)
    check(one)


@pytest.mark.parametrize("dtype", judge.TOLERANCE)
def test_a_step_of_one_row_writes_its_own_key_and_sees_it(dtype: torch.dtype) -> None:
    """The longer context is read where it lies, the shorter one is copied; what is not written is NaN."""
    page = VIEW_FROM // (2 * 64)
    for rows in (page, 40):
        one = case([Rows(rows - 1, [(0, 0)])], {}, head_dim=64, page_size=page, dtype=dtype)
        check(one)
        (sequence,) = one.step.sequences
        at = sequence.pages[0] * page + rows - 1
        assert torch.equal(one.pools.self_kv[:, 0, at], one.k[:, 0])
        assert torch.equal(one.pools.self_kv[:, 1, at], one.v[:, 0])


@pytest.mark.parametrize("dtype", judge.TOLERANCE)
@pytest.mark.parametrize("rows", [1, 5])
def test_many_questions_about_one_video_in_pieces(dtype: torch.dtype, rows: int) -> None:
    """Long frames, read in place and in several pieces, and short ones between them that are copied together."""
    frames = [PIECE + 7, 3, 5, 2 * PIECE - 1, 40, PIECE // 2, 9]
    check(case([Rows(4, [(0, sum(frames))] * rows)] * 16, {0: frames}, dtype=dtype))


def test_a_video_longer_than_the_largest_piece() -> None:
    check(case([Rows(0, [(0, LARGE_PIECE + 9)] * 60)], {0: [LARGE_PIECE + 9]}))


@pytest.mark.parametrize("dtype", judge.TOLERANCE)
def test_a_staircase_over_scattered_frames(dtype: torch.dtype) -> None:
    frames = [7] * 40
    seen = [(0, 7 * (row // 5)) for row in range(203)]
    check(case([Rows(0, seen), Rows(11, seen[60:]), Rows(0, [(0, 0)])], {0: frames}, dtype=dtype))


@pytest.mark.parametrize("start", [0, 5000])
def test_8192_rows_in_one_step(start: int) -> None:
    """Too many to judge each: every 401st row is, and the last."""
    rows, frames, frame, kv_heads, dim = 8192, 100, 33, 1, 8
    pools = judge.pools(pages=(start + rows) // 64 + 1, page_size=64, slots=frames * frame, layers=1, kv_heads=kv_heads)
    generator = torch.Generator().manual_seed(start)
    q = torch.randn(rows, 2, dim, generator=generator)
    k, v = torch.randn(2, start + rows, kv_heads, dim, generator=generator)
    pools.self_kv[0, :, :start] = torch.stack([k[:start], v[:start]])
    pools.cross_kv.normal_(generator=generator)
    last = np.arange(rows) * (frames + 1) // rows * frame
    spans = np.stack([np.zeros_like(last), last], axis=1)
    extents = [(i * frame, i * frame, frame) for i in range(frames)]
    attention = TorchAttention(pools)
    attention.plan(Step([SequenceRows(start, rows, range(len(pools.self_kv[0, 0]) // 64), spans, extents)]))
    own = attention.attend_self(q, k[start:], v[start:], layer=0)
    crossed = attention.attend_cross(q, layer=0)
    keys, values = pools.cross_kv[0].transpose(1, 2)
    for row in [*range(0, rows, 401), rows - 1]:
        expected = judge.attend(q[row], k[: start + row + 1], v[: start + row + 1])
        judge.close(own[row], expected)
        expected = judge.attend(q[row], keys[: last[row]], values[: last[row]])
        judge.close(crossed[row], expected)


def test_shared_video_and_copies_of_it_answer_alike() -> None:
    rows = [Rows(5, [(0, 50)])] * 4
    shared = case(rows, {0: [20, 30]})
    copied = case(rows, {0: [20, 30]})
    more = copied.pools.cross_kv
    copied.pools.cross_kv = torch.cat([more] * 4, dim=3)
    size = more.shape[3]
    sequences = [
        SequenceRows(one.start, one.rows, one.pages, one.boundaries, [(f, s + i * size, n) for f, s, n in one.extents])
        for i, one in enumerate(copied.step.sequences)
    ]
    together = shared.run(TorchAttention(shared.pools))[1]
    attention = TorchAttention(copied.pools)
    attention.plan(Step(sequences))
    for layer in range(2):
        judge.close(attention.attend_cross(copied.q[layer], layer=layer), together[layer])


def test_a_backend_serves_inside_and_outside_inference_mode() -> None:
    one = case([Rows(9, [(0, 0)]), Rows(12, [(0, 0)])], {})
    attention = TorchAttention(one.pools)
    with torch.inference_mode():
        inside = one.run(attention)[0]
    assert torch.equal(one.run(attention)[0], inside)


def test_pools_without_cross_layers_serve_text() -> None:
    one = case([Rows(0, [(0, 0)] * 3), Rows(7, [(0, 0)])], {})
    pools = Pools(
        self_layers=2,
        cross_layers=0,
        pages=one.pools.self_kv.shape[2] // 4,
        page_size=4,
        slots=0,
        kv_heads=2,
        head_dim=8,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    pools.self_kv.copy_(one.pools.self_kv)
    attention = TorchAttention(pools)
    attention.plan(one.step)
    for layer in range(2):
        own = attention.attend_self(one.q[layer], one.k[layer], one.v[layer], layer=layer)
        torch.testing.assert_close(own, one.own[layer])
