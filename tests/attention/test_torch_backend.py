"""`TorchAttention` against sums written out: pages, chunks, several sequences, rows that see nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.pages import ExtentAllocator, PageAllocator, Pools
from chiasm.attention.torch_backend import TorchAttention, TorchVarlen
from tests.attention import judge

D = 8


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Sequence:
    """A sequence with everything it will ever ask, and how far it is."""

    q: Tensor  # (rows, heads, dim) per layer: (layers, rows, heads, dim)
    k: Tensor
    v: Tensor
    units: list[int]
    boundaries: Tensor
    vision: Tensor  # (layers, K|V, kv heads, vision tokens, dim)
    pages: list[int] = field(default_factory=list)
    extents: list[tuple[int, int, int]] = field(default_factory=list)
    done: int = 0
    outs: list[list[Tensor]] = field(default_factory=lambda: [[], []])
    crossed: list[list[Tensor]] = field(default_factory=lambda: [[], []])


def sequence(
    seed: int, rows: int, units: list[int], heads: int, kv_heads: int, seen: list[tuple[int, int]]
) -> Sequence:
    """`seen`: per row the units [first, last) it sees."""
    starts = np.concatenate([[0], np.cumsum(units)]).astype(int).tolist()
    spans = [(starts[a], starts[b]) if b > a else (0, 0) for a, b in seen]
    return Sequence(
        q=draw(seed, 2, rows, heads, D),
        k=draw(seed + 1, 2, rows, kv_heads, D),
        v=draw(seed + 2, 2, rows, kv_heads, D),
        units=units,
        boundaries=torch.tensor(spans, dtype=torch.int64).reshape(-1, 2),
        vision=draw(seed + 3, 2, 2, kv_heads, sum(units), D),
    )


def attach(one: Sequence, pools: Pools, allocator: ExtentAllocator) -> None:
    first = 0
    for length in one.units:
        for run in allocator.take(length):
            pools.cross_kv[:, :, :, run.start : run.start + run.length] = one.vision[
                :, :, :, first : first + run.length
            ]
            one.extents.append((first, run.start, run.length))
            first += run.length


def step(pools: Pools, pages: PageAllocator, work: list[tuple[Sequence, int]]) -> None:
    """Computes the next rows of several sequences in both layers and keeps what comes out."""
    parts = []
    for one, rows in work:
        pages.grow(one.pages, one.done + rows)
        spans = one.boundaries[one.done : one.done + rows].numpy()
        parts.append(SequenceRows(one.done, rows, one.pages, spans, one.extents))
    attention = TorchAttention(pools)
    attention.plan(Step(parts))
    for layer in range(2):
        q, k, v = (
            torch.cat([getattr(one, name)[layer, one.done : one.done + rows] for one, rows in work]) for name in "qkv"
        )
        counts = [rows for _, rows in work]
        for (one, _), out in zip(work, attention.attend_self(q, k, v, layer=layer).split(counts), strict=True):
            one.outs[layer].append(out)
        for (one, _), out in zip(work, attention.attend_cross(q, layer=layer).split(counts), strict=True):
            one.crossed[layer].append(out)
    for one, rows in work:
        one.done += rows


def check(one: Sequence) -> None:
    for layer in range(2):
        judge.close(torch.cat(one.outs[layer]), judge.causal(one.q[layer], one.k[layer], one.v[layer]))
        k, v = (x.transpose(0, 1) for x in one.vision[layer])
        judge.close(torch.cat(one.crossed[layer]), judge.spans(one.q[layer], k, v, one.boundaries))


def prefix(rows: int, units: int) -> list[tuple[int, int]]:
    """Rows that see one unit more every other row, from none on."""
    return [(0, min(row // 2, units)) for row in range(rows)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("cuts", [[13], [1] * 13, [4, 4, 4, 1], [3, 1, 9], [5, 8]])
def test_a_prefill_in_chunks_over_page_boundaries(heads: int, kv_heads: int, page_size: int, cuts: list[int]) -> None:
    pools = judge.pools(pages=-(-13 // page_size), page_size=page_size, kv_heads=kv_heads)
    pages, extents = PageAllocator(-(-13 // page_size), page_size), ExtentAllocator(64)
    one = sequence(1, 13, [5, 1, 7], heads, kv_heads, prefix(13, 3))
    attach(one, pools, extents)
    for rows in cuts:
        step(pools, pages, [(one, rows)])
    check(one)


def test_rows_that_see_nothing_come_out_zero_wherever_they_stand() -> None:
    pools, pages, extents = judge.pools(), PageAllocator(16, 4), ExtentAllocator(64)
    one = sequence(3, 7, [4, 3], 4, 2, [(0, 0), (0, 1), (0, 0), (0, 2), (1, 2), (2, 2), (0, 0)])
    attach(one, pools, extents)
    step(pools, pages, [(one, 7)])
    check(one)
    for row in (0, 2, 5, 6):
        assert not one.crossed[0][0][row].any()


def test_a_step_in_which_nobody_sees_anything() -> None:
    pools, pages = judge.pools(), PageAllocator(16, 4)
    many = [sequence(seed, 3, [], 4, 2, [(0, 0)] * 3) for seed in (1, 2)]
    step(pools, pages, [(one, 3) for one in many])
    for one in many:
        check(one)
        assert not one.crossed[0][0].any()


def test_extents_that_do_not_begin_at_the_first_vision_token() -> None:
    """Units that were dropped and freed are no longer attached; what is left keeps its numbers."""
    pools, pages, extents = judge.pools(), PageAllocator(16, 4), ExtentAllocator(64)
    one = sequence(5, 4, [4, 3, 6], 4, 2, [(1, 2), (1, 3), (2, 3), (1, 3)])
    attach(one, pools, extents)
    freed = one.extents.pop(0)
    pools.cross_kv[:, :, :, freed[1] : freed[1] + freed[2]] = torch.nan
    step(pools, pages, [(one, 4)])
    check(one)


def test_extents_scattered_over_the_pool() -> None:
    pools, pages, extents = judge.pools(slots=40), PageAllocator(16, 4), ExtentAllocator(40)
    blocker = extents.take(3)
    gap = extents.take(4)
    extents.take(2)
    extents.give_back(gap)
    one = sequence(7, 6, [4, 9, 2, 6], 2, 2, prefix(6, 4))
    attach(one, pools, extents)
    slots = [slot for _, slot, _ in one.extents]
    assert slots == [3, 9, 18, 20], "the first unit lies in the gap"
    extents.give_back(blocker)
    step(pools, pages, [(one, 6)])
    check(one)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_several_sequences_in_any_chunks(data: st.DataObject) -> None:
    pools, pages, extents = judge.pools(pages=24, page_size=3), PageAllocator(24, 3), ExtentAllocator(64)
    many = []
    for number in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.integers(1, 9))
        units = data.draw(st.lists(st.integers(1, 5), max_size=3))
        counts = sorted(data.draw(st.lists(st.integers(0, len(units)), min_size=rows, max_size=rows)))
        firsts = sorted(data.draw(st.lists(st.integers(0, len(units)), min_size=rows, max_size=rows)))
        one = sequence(10 * number, rows, units, 4, 2, list(zip(firsts, counts, strict=True)))
        attach(one, pools, extents)
        many.append(one)
    while any(one.done < len(one.boundaries) for one in many):
        left = [(one, len(one.boundaries) - one.done) for one in many if one.done < len(one.boundaries)]
        step(pools, pages, [(one, data.draw(st.integers(1, rows))) for one, rows in left])
    for one in many:
        check(one)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [4, 4, 2, 7, 7, 7], [3, 1, 3]])
def test_independent_sequences_one_after_another(lengths: list[int], causal: bool) -> None:
    q, k, v = draw(1, sum(lengths), 6, D), draw(2, sum(lengths), 2, D), draw(3, sum(lengths), 2, D)
    expected = [
        (judge.causal if causal else judge.full)(*parts)
        for parts in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    judge.close(TorchVarlen().varlen(q, k, v, lengths, causal=causal), torch.cat(expected))


def test_a_sequence_does_not_see_its_neighbours() -> None:
    """Not even NaN of another grid gets in."""
    q, k, v = (draw(seed, 8, 2, D) for seed in (1, 2, 3))
    alone = TorchVarlen().varlen(q[:4], k[:4], v[:4], [4], causal=False)
    k[4:], v[4:] = torch.nan, torch.nan
    beside = TorchVarlen().varlen(q, k, v, [4, 4], causal=False)
    assert torch.equal(beside[:4], alone)
    assert beside[4:].isnan().all()


def test_what_is_not_attached_cannot_be_seen() -> None:
    pools, pages = judge.pools(), PageAllocator(16, 4)
    one = sequence(1, 2, [4], 4, 2, [(0, 1), (0, 1)])
    with pytest.raises(AssertionError, match="not attached"):
        step(pools, pages, [(one, 2)])


def test_which_rows_of_a_step_see_anything() -> None:
    spans = np.array([[0, 0], [0, 3], [2, 2], [3, 5]], dtype=np.int64)
    parts = [SequenceRows(0, 4, [0], spans, []), SequenceRows(0, 1, [1], spans[:1], [])]
    assert Step(parts).sees().tolist() == [False, True, False, True, False]
    assert Step(parts).rows == 5
    assert Step([]).sees().tolist() == []
