"""Whole steps for an attention backend, with what must come out: pools filled, rows drawn, sums written out beside.

Videos lie scattered over the cross pool; sequences that name the same video share its slots. What is not written is
NaN, so that whatever is read before it is written shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from chiasm.attention.backend import Attention, SequenceRows, Step
from chiasm.attention.pages import Pools
from tests.attention import judge

LAYERS = 2


@dataclass(frozen=True)
class Rows:
    """One sequence's share of a step.

    Attributes:
        start: rows computed before.
        seen: vision tokens [first, last) of each new row.
        video: which one it looks at.
    """

    start: int
    seen: Sequence[tuple[int, int]]
    video: int = 0


@dataclass(frozen=True)
class Case:
    """A step and its answer. Queries, keys, values and answers are (layers, rows, heads, dim)."""

    pools: Pools
    step: Step
    q: Tensor
    k: Tensor
    v: Tensor
    own: Tensor
    crossed: Tensor

    def run(self, attention: Attention) -> tuple[Tensor, Tensor]:
        """What a backend gives for self and cross-attention, all layers of one plan."""
        attention.plan(self.step)
        own, crossed = [], []
        for layer in range(LAYERS):
            own.append(attention.attend_self(self.q[layer], self.k[layer], self.v[layer], layer=layer))
            crossed.append(attention.attend_cross(self.q[layer], layer=layer))
        return torch.stack(own), torch.stack(crossed)


def case(
    sequences: Sequence[Rows],
    videos: Mapping[int, Sequence[int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    page_size: int = 4,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    spare: bool = False,
) -> Case:
    """A step over those sequences.

    Args:
        videos: the vision tokens of each unit of each video.
        spare: the pools have room for rows that are nobody's, which stays as it is made.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    pages_each = [-(-(one.start + len(one.seen)) // page_size) for one in sequences]
    total = sum(sum(units) + len(units) for units in videos.values())
    pools = Pools(
        self_layers=LAYERS,
        cross_layers=LAYERS,
        pages=max(1, sum(pages_each) + 3),
        page_size=page_size,
        slots=total + 5,
        kv_heads=kv_heads,
        head_dim=head_dim,
        device=torch.device(device),
        dtype=dtype,
        spare=spare,
    )
    count = pools.self_kv.shape[2] // page_size - spare
    pools.self_kv[:, :, : count * page_size].fill_(torch.nan)
    pools.cross_kv[:, :, :, : total + 5].fill_(torch.nan)

    seen_of = {video: draw(LAYERS, 2, kv_heads, sum(units), head_dim) for video, units in videos.items()}
    extents_of = _scatter(videos, pools, seen_of, rng)
    pages = rng.permutation(count).tolist()
    parts, q, k, v, own, crossed = [], [], [], [], [], []
    for one, count in zip(sequences, pages_each, strict=True):
        held, pages = pages[:count], pages[count:]
        rows, context = len(one.seen), one.start + len(one.seen)
        spans = np.array(one.seen, dtype=np.int64).reshape(-1, 2)
        parts.append(SequenceRows(one.start, rows, held, spans, _looked_at(spans, extents_of.get(one.video, []))))
        queries, keys, values = (
            draw(LAYERS, rows, heads, head_dim),
            *(draw(LAYERS, context, kv_heads, head_dim) for _ in range(2)),
        )
        slots = torch.tensor([held[at // page_size] * page_size + at % page_size for at in range(one.start)]).long()
        pools.self_kv[:, 0, slots.to(device)] = keys[:, : one.start]
        pools.self_kv[:, 1, slots.to(device)] = values[:, : one.start]
        q.append(queries)
        k.append(keys[:, one.start :])
        v.append(values[:, one.start :])
        vision = seen_of.get(one.video)
        for at in range(rows):
            end = one.start + at + 1
            first, last = one.seen[at]
            own.append(_judged(queries[:, at], keys[:, :end], values[:, :end]))
            if vision is None:
                crossed.append(torch.zeros_like(queries[:, at]))
            else:
                looked = vision[:, :, :, first:last].transpose(2, 3)
                crossed.append(_judged(queries[:, at], looked[:, 0], looked[:, 1]))
    empty = draw(LAYERS, 0, heads, head_dim)
    return Case(
        pools=pools,
        step=Step(parts),
        q=torch.cat([empty, *q], dim=1),
        k=torch.cat([draw(LAYERS, 0, kv_heads, head_dim), *k], dim=1),
        v=torch.cat([draw(LAYERS, 0, kv_heads, head_dim), *v], dim=1),
        own=torch.stack(own, dim=1) if own else empty,
        crossed=torch.stack(crossed, dim=1) if crossed else empty,
    )


def _judged(q_lhd: Tensor, k_lskd: Tensor, v_lskd: Tensor) -> Tensor:
    return torch.stack([judge.attend(q, k, v) for q, k, v in zip(q_lhd, k_lskd, v_lskd, strict=True)])


def _looked_at(spans: np.ndarray, extents: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The extents that some row sees, as a sequence hands them to a step."""
    seen = spans[spans[:, 1] > spans[:, 0]]
    if not len(seen):
        return []
    first, last = seen[:, 0].min(), seen[:, 1].max()
    return [extent for extent in extents if extent[0] < last and extent[0] + extent[2] > first]


def _scatter(
    videos: Mapping[int, Sequence[int]], pools: Pools, seen_of: Mapping[int, Tensor], rng: np.random.Generator
) -> dict[int, list[tuple[int, int, int]]]:
    """Lays every unit somewhere in the cross pool, often with a hole behind it."""
    units = [(video, number) for video, lengths in videos.items() for number in range(len(lengths))]
    slot_of = {}
    at = 0
    for video, number in (units[i] for i in rng.permutation(len(units))):
        slot_of[video, number] = at
        at += videos[video][number] + int(rng.integers(2))
    extents: dict[int, list[tuple[int, int, int]]] = {}
    for video, lengths in videos.items():
        first = 0
        extents[video] = []
        for number, length in enumerate(lengths):
            slot = slot_of[video, number]
            pools.cross_kv[:, :, :, slot : slot + length] = seen_of[video][:, :, :, first : first + length]
            extents[video].append((first, slot, length))
            first += length
    return extents


def any_mix(data: st.DataObject, dtype: torch.dtype) -> Case:
    """A step of up to five sequences, some of which look at the same video."""
    videos = {i: data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)) for i in range(2)}
    sequences = []
    for _ in range(data.draw(st.integers(0, 5))):
        video = data.draw(st.integers(0, 2))
        bound = st.integers(0, sum(videos.get(video, [])))
        span = st.tuples(bound, bound).map(lambda pair: (min(pair), max(pair)))
        seen = data.draw(st.lists(span, max_size=6))
        sequences.append(Rows(data.draw(st.sampled_from([0, 0, 1, 3, 8, 30])), sorted(seen), video))
    heads, kv_heads = data.draw(st.sampled_from([(2, 2), (4, 2), (6, 1)]))
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    seed = data.draw(st.integers(0, 99))
    return case(sequences, videos, heads=heads, kv_heads=kv_heads, page_size=page_size, seed=seed, dtype=dtype)
