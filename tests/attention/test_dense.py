"""`DenseAttention`, which training differentiates through, against sums written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chiasm.attention.backend import Step
from chiasm.attention.dense import DenseAttention, grouped_attention
from tests.attention import judge

B, T, S, D = 3, 5, 9, 8


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def boundaries() -> Tensor:
    return torch.tensor(
        [
            [[0, 0], [0, 4], [0, 4], [0, 9], [4, 9]],
            [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0]],
            [[0, 9], [2, 3], [0, 0], [8, 9], [0, 1]],
        ]
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
def test_a_batch_of_sequences(heads: int, kv_heads: int) -> None:
    cross = [(draw(10 + i, B, kv_heads, S, D), draw(20 + i, B, kv_heads, S, D)) for i in range(2)]
    attention = DenseAttention(B, cross, boundaries())
    attention.plan(Step([]))
    q, k, v = draw(1, B * T, heads, D), draw(2, B * T, kv_heads, D), draw(3, B * T, kv_heads, D)
    causal = [judge.causal(*parts) for parts in zip(q.split(T), k.split(T), v.split(T), strict=True)]
    judge.close(attention.attend_self(q, k, v, layer=0), torch.cat(causal))
    for layer, (keys, values) in enumerate(cross):
        expected = [
            judge.spans(q[b * T : (b + 1) * T], keys[b].transpose(0, 1), values[b].transpose(0, 1), boundaries()[b])
            for b in range(B)
        ]
        got = attention.attend_cross(q, layer=layer)
        judge.close(got, torch.cat(expected))
        assert not got[T : 2 * T].any(), "a sequence that sees nothing gets zero"


def test_gradients_flow_to_what_is_seen_and_to_nothing_else() -> None:
    keys, values = draw(1, B, 2, S, D).requires_grad_(), draw(2, B, 2, S, D).requires_grad_()
    q = draw(3, B * T, 4, D).requires_grad_()
    DenseAttention(B, [(keys, values)], boundaries()).attend_cross(q, layer=0).square().sum().backward()
    assert q.grad is not None and keys.grad is not None and values.grad is not None
    for grad in (q.grad, keys.grad, values.grad):
        assert grad.isfinite().all()
    assert not values.grad[1].any() and values.grad[0].any()
    assert not q.grad[T : 2 * T].any()


def test_without_cross_layers_it_is_plain_causal_attention() -> None:
    attention = DenseAttention(B, [], torch.zeros(B, T, 2, dtype=torch.long))
    q, k, v = (draw(seed, B * T, 2, D) for seed in (1, 2, 3))
    causal = [judge.causal(*parts) for parts in zip(q.split(T), k.split(T), v.split(T), strict=True)]
    judge.close(attention.attend_self(q, k, v, layer=0), torch.cat(causal))
    full = attention.varlen(q, k, v, [T] * B, causal=True)
    judge.close(full, torch.cat(causal))


def test_a_mask_says_where_a_row_may_look() -> None:
    q, k, v = draw(1, 1, 4, T, D), draw(2, 1, 2, S, D), draw(3, 1, 2, S, D)
    mask = torch.zeros(1, 1, T, S, dtype=torch.bool)
    mask[..., 2:6] = True
    got = grouped_attention(q, k, v, mask=mask)[0].transpose(0, 1)
    expected = judge.full(q[0].transpose(0, 1), k[0, :, 2:6].transpose(0, 1), v[0, :, 2:6].transpose(0, 1))
    judge.close(got, expected)
