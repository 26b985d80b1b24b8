"""`InvariantAttention`: right against sums written out, and the same bits for a row in any company, cut anyhow, lying
anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chiasm.attention.backend import Attention, SequenceRows, Step
from chiasm.attention.invariant_backend import InvariantAttention
from chiasm.attention.invariant_plan import BLOCK
from chiasm.attention.pages import Pools
from chiasm.attention.torch_backend import TorchAttention
from tests.attention import judge
from tests.attention.steps import Case, Rows, any_mix, case

HEADS, KV_HEADS, DIM = 6, 2, 16


def check(one: Case) -> None:
    own, crossed = one.run(InvariantAttention(one.pools, heads=one.q.shape[2]))
    judge.close(own, one.own)
    judge.close(crossed, one.crossed)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), dtype=st.sampled_from(list(judge.TOLERANCE)))
def test_any_mix_of_sequences(data: st.DataObject, dtype: torch.dtype) -> None:
    check(any_mix(data, dtype))


@pytest.mark.parametrize("dtype", judge.TOLERANCE)
def test_contexts_around_the_size_of_a_block(dtype: torch.dtype) -> None:
    lengths = [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]
    videos = dict(enumerate([[length] for length in lengths]))
    single = [Rows(length - 1, [(0, length)], i) for i, length in enumerate(lengths)]
    several = [Rows(length - 3, [(0, 0), (0, 1), (length - 1, length)], i) for i, length in enumerate(lengths)]
    check(case([*single, *several], videos, dtype=dtype))


def test_a_long_prefill_over_a_long_video() -> None:
    frames = [45] * 12
    check(case([Rows(70, [(0, 45 * (i // 20)) for i in range(200)])], {0: frames}))


def test_a_window_that_begins_inside_a_block() -> None:
    """Tokens before the window are attached nowhere any more."""
    first = BLOCK + 5
    check(case([Rows(4, [(first, first + 30), (first + 10, first + 40)]), Rows(9, [(0, 7)])], {0: [first, 30, 100]}))


@dataclass(frozen=True)
class Whole:
    """One sequence from its first row to its last: (layers=1, rows, heads, dim) of queries, keys, values; what it sees
    of its video, and that video."""

    q: Tensor
    k: Tensor
    v: Tensor
    spans: np.ndarray
    video: Tensor


def draw(rng: np.random.Generator, rows: int, tokens: int, dtype: torch.dtype, window: int = 0) -> Whole:
    """A sequence whose rows see more and more of a video, and nothing of it that lies further back than a window."""

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    last = np.sort(rng.integers(0, tokens + 1, rows))
    first = np.maximum(last - window, 0) if window else np.zeros_like(last)
    return Whole(
        normal(rows, HEADS, DIM),
        normal(rows, KV_HEADS, DIM),
        normal(rows, KV_HEADS, DIM),
        np.stack([first, last], axis=1),
        normal(2, KV_HEADS, tokens, DIM),
    )


@dataclass
class Laid:
    """A sequence somewhere in the pools, and how far it is computed."""

    whole: Whole
    pages: list[int]
    extents: list[tuple[int, int, int]]
    computed: int = 0

    def rows(self, count: int) -> SequenceRows:
        spans = self.whole.spans[self.computed : self.computed + count]
        seen = spans[spans[:, 1] > spans[:, 0]]
        low, high = (seen[:, 0].min(), seen[:, 1].max()) if len(seen) else (0, 0)
        extents = [one for one in self.extents if one[0] < high and one[0] + one[2] > low]
        return SequenceRows(self.computed, count, self.pages, spans, extents)


def lay(wholes: Sequence[Whole], rng: np.random.Generator, page_size: int) -> tuple[Pools, list[Laid]]:
    """Sequences in pools of their own, pages in any order, videos cut into extents anywhere; the rest is NaN."""
    pages_each = [-(-len(one.q) // page_size) for one in wholes]
    tokens = sum(one.video.shape[2] for one in wholes)
    dtype = wholes[0].q.dtype
    pools = Pools(
        self_layers=1,
        cross_layers=1,
        pages=sum(pages_each) + 2,
        page_size=page_size,
        slots=2 * tokens + 9,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    pools.self_kv.fill_(torch.nan)
    pools.cross_kv.fill_(torch.nan)
    pages = rng.permutation(sum(pages_each) + 2).tolist()
    pieces = []
    for number, one in enumerate(wholes):
        size = one.video.shape[2]
        cuts = sorted({0, size, *rng.integers(0, size + 1, int(rng.integers(0, 5))).tolist()})
        pieces += [(number, first, last - first) for first, last in pairwise(cuts)]
    laid = []
    for one, count in zip(wholes, pages_each, strict=True):
        laid.append(Laid(one, pages[:count], []))
        pages = pages[count:]
    slot = 0
    for number, first, length in (pieces[i] for i in rng.permutation(len(pieces))):
        pools.cross_kv[0, :, :, slot : slot + length] = wholes[number].video[:, :, first : first + length]
        laid[number].extents.append((first, slot, length))
        slot += length + int(rng.integers(0, 2))
    for each in laid:
        each.extents.sort()
    return pools, laid


def steps(laid: Sequence[Laid], rng: np.random.Generator, pieces: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Sequences and how many rows of each, until all are computed."""
    while left := [i for i, one in enumerate(laid) if one.computed < len(one.whole.q)]:
        some = rng.permutation(left)[: int(rng.integers(1, len(left) + 1))].tolist()
        yield [(i, min(int(rng.choice(pieces)), len(laid[i].whole.q) - laid[i].computed)) for i in some]


def run(
    attention: Attention, laid: Sequence[Laid], rng: np.random.Generator, pieces: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """(rows, heads, dim) of self and cross-attention of each sequence, computed in random steps."""
    outs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in laid]
    for shares in steps(laid, rng, pieces):
        attention.plan(Step([laid[i].rows(count) for i, count in shares]))
        q, k, v = (
            torch.cat([getattr(laid[i].whole, name)[laid[i].computed :][:count] for i, count in shares])
            for name in ("q", "k", "v")
        )
        counts = [count for _, count in shares]
        own = attention.attend_self(q, k, v, layer=0).split(counts)
        crossed = attention.attend_cross(q, layer=0).split(counts)
        for (i, count), *both in zip(shares, own, crossed, strict=True):
            outs[i].append((both[0], both[1]))
            laid[i].computed += count
    return [(torch.cat([own for own, _ in each]), torch.cat([crossed for _, crossed in each])) for each in outs]


SIZES = [(150, 200), (9, 300), (40, 1), (300, 140), (1, 30), (133, 129), *[(20, 20)] * 11]
"""Rows of sequences, and the vision tokens of each."""


def differ(
    make: Callable[[Pools], Attention],
    dtype: torch.dtype,
    seed: int,
    *,
    sizes: Sequence[tuple[int, int]] = SIZES,
    pieces: Sequence[int] = (1, 1, 3, 30, 200),
) -> bool:
    """Whether any row's result depends on its company, how its prefill was cut or where it lies."""
    rng = np.random.default_rng(seed)
    wholes = [draw(rng, rows, tokens, dtype, window=int(rng.choice([0, 0, 50, 140]))) for rows, tokens in sizes]

    pools, laid = lay(wholes, rng, page_size=int(rng.choice([1, 4, 16])))
    together = run(make(pools), laid, rng, pieces)
    for whole, (own, crossed) in zip(wholes, together, strict=True):
        pools, (one,) = lay([whole], rng, page_size=int(rng.choice([1, 4, 16])))
        ((own_alone, crossed_alone),) = run(make(pools), [one], rng, [int(rng.choice([*pieces[-2:], 1000]))])
        if not (torch.equal(own, own_alone) and torch.equal(crossed, crossed_alone)):
            return True
    return False


def invariant(pools: Pools) -> Attention:
    return InvariantAttention(pools, heads=HEADS)


@pytest.mark.parametrize("dtype", judge.TOLERANCE)
def test_a_row_has_the_same_bits_in_any_company_cut_anyhow_and_lying_anywhere(dtype: torch.dtype) -> None:
    assert not any(differ(invariant, dtype, seed) for seed in range(2))
    assert differ(TorchAttention, dtype, 0), "what is looked for is there to be seen"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_has_the_same_bits_with_two_threads(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert not differ(invariant, dtype, 7, sizes=SIZES[:5], pieces=(20, 60, 200))
    finally:
        torch.set_num_threads(before)


def test_rows_beyond_the_step_come_out_zero_and_change_nothing() -> None:
    one = case([Rows(9, [(0, 5)] * 3), Rows(0, [(0, 0)] * 4)], {0: [3, 2]})
    attention = InvariantAttention(one.pools, heads=4)
    own, crossed = one.run(attention)
    before = one.pools.self_kv.clone()
    q, k, v = (torch.cat([x, torch.randn(2, 9, *x.shape[2:])], dim=1) for x in (one.q, one.k, one.v))
    attention.plan(one.step)
    for layer in range(2):
        longer = attention.attend_self(q[layer], k[layer], v[layer], layer=layer)
        assert torch.equal(longer[:7], own[layer]) and not longer[7:].any()
        longer = attention.attend_cross(q[layer], layer=layer)
        assert torch.equal(longer[:7], crossed[layer]) and not longer[7:].any()
    assert torch.equal(one.pools.self_kv.nan_to_num(), before.nan_to_num())


def test_results_do_not_depend_on_the_sizes_of_products_that_agree() -> None:
    """Where larger products do not agree, single ones of few rows do the same work."""
    one = case([Rows(9, [(0, 200)] * 3), Rows(150, [(0, 0)] * 70), Rows(0, [(0, 9)])], {0: [150, 50]})
    usual = one.run(InvariantAttention(one.pools, heads=4))
    attention = InvariantAttention(one.pools, heads=4)
    assert len(attention._heights) == 2
    attention._heights = attention._heights[:1]
    attention._items = {attention._heights[0]: [1]}
    least = one.run(attention)
    assert torch.equal(usual[0], least[0]) and torch.equal(usual[1], least[1])
