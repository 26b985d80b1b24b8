"""One attention product and the merging of parts against sums written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from chiasm.attention.kernel import FEW_KEYS, attend, fold, merge, products, single, unfold
from tests.attention import judge

ROWS, HEADS, D = 7, 6, 16

Product: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(kv_heads: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (N, H, D), keys and values (1, K, S, D) that lie as a pool of rows keeps them."""
    k, v = (draw(seed, keys, kv_heads, D, dtype=dtype).transpose(0, 1).unsqueeze(0) for seed in (2, 3))
    return draw(1, ROWS, HEADS, D, dtype=dtype), k, v


@pytest.mark.parametrize("dtype", judge.TOLERANCE)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("keys", [1, 5, 700])
@pytest.mark.parametrize("how", [attend, products])
def test_folded_heads_read_each_key_once(how: Product, dtype: torch.dtype, kv_heads: int, keys: int) -> None:
    q, k, v = inputs(kv_heads, keys, dtype)
    out, lse = how(fold(q, kv_heads).unsqueeze(0), k, v)
    expected = judge.full(q, k[0].transpose(0, 1), v[0].transpose(0, 1))
    judge.close(unfold(out[0], ROWS), expected)
    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("how", [attend, products])
def test_a_causal_product_of_grouped_heads(how: Product) -> None:
    q, k, v = inputs(2, ROWS, torch.float32)
    out, _ = how(q.transpose(0, 1).unsqueeze(0), k, v, causal=True)
    expected = judge.causal(q, k[0].transpose(0, 1), v[0].transpose(0, 1))
    judge.close(out[0].transpose(0, 1), expected)


@pytest.mark.parametrize("how", [attend, products])
@pytest.mark.parametrize("dtype", judge.TOLERANCE)
def test_a_bias_hides_keys_from_rows(how: Product, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 20, dtype)
    seen = torch.arange(1, 3 * ROWS, 3)
    bias = torch.zeros(ROWS, 20, dtype=dtype).masked_fill_(torch.arange(20) >= seen.unsqueeze(1), -math.inf)
    out, _ = how(fold(q, 2).unsqueeze(0), k, v, bias=bias.repeat_interleave(HEADS // 2, dim=0))
    spans = torch.stack([torch.zeros_like(seen), seen], dim=1)
    expected = judge.spans(q, k[0].transpose(0, 1), v[0].transpose(0, 1), spans)
    judge.close(unfold(out[0], ROWS), expected)


@pytest.mark.parametrize("how", [attend, products])
def test_a_batch_hides_the_padding_of_each(how: Product) -> None:
    k, v = draw(2, 3, 2, 9, D), draw(3, 3, 2, 9, D)
    q = draw(1, 3, HEADS, D)
    lengths = torch.tensor([9, 1, 4])
    hidden = torch.arange(9) >= lengths.unsqueeze(1)
    bias = torch.zeros(3, 1, 1, 9).masked_fill_(hidden[:, None, None], -math.inf)
    out, _ = how(q.unflatten(1, (2, -1)), k, v, bias=bias)
    for row, length in enumerate(lengths.tolist()):
        expected = judge.attend(q[row], k[row, :, :length].transpose(0, 1), v[row, :, :length].transpose(0, 1))
        judge.close(out[row].flatten(0, 1), expected)


@pytest.mark.parametrize("keys", [9, FEW_KEYS, FEW_KEYS + 1])
@pytest.mark.parametrize("kv_heads", [1, HEADS // 2, HEADS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_rows_attend_alike_however_their_heads_are_taken(dtype: torch.dtype, kv_heads: int, keys: int) -> None:
    q = draw(1, 3, HEADS, D, dtype=dtype)
    k, v = (draw(seed, 3, kv_heads, keys, D, dtype=dtype) for seed in (2, 3))
    out, _ = attend(single(q, kv_heads, keys), k, v)
    for row in range(3):
        expected = judge.attend(q[row], k[row].transpose(0, 1), v[row].transpose(0, 1))
        judge.close(out[row].flatten(0, 1), expected)


@pytest.mark.parametrize("dtype", judge.TOLERANCE)
@pytest.mark.parametrize("cuts", [[40], [1, 39], [13, 2, 25], [1] * 40])
def test_parts_of_the_keys_merge_to_all_of_them(dtype: torch.dtype, cuts: list[int]) -> None:
    q, k, v = inputs(2, 40, dtype)
    k = k * 6  # some parts weigh next to nothing
    folded = fold(q, 2).unsqueeze(0)
    parts = zip(k.split(cuts, dim=2), v.split(cuts, dim=2), strict=True)
    merged = merge([attend(folded, *part) for part in parts])
    assert merged.dtype == dtype
    expected = judge.full(q, k[0].transpose(0, 1), v[0].transpose(0, 1))
    judge.close(unfold(merged[0], ROWS), expected)


def test_parts_of_very_different_weight_stay_finite() -> None:
    one, other = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), 3.0)
    for heavy in (-4e4, 4e4):
        merged = merge([(one, torch.tensor([[[heavy]]])), (other, torch.zeros(1, 1, 1))])
        assert torch.equal(merged, one if heavy > 0 else other)


def test_folding_is_taken_back() -> None:
    q = draw(1, ROWS, HEADS, D)
    folded = fold(q, 2)
    assert folded.shape == (2, ROWS * 3, D)
    assert torch.equal(folded[1, 3:6], q[1, 3:]), "the second key head's queries of the second row"
    assert torch.equal(unfold(folded, ROWS), q)


def test_attention_over_no_keys_is_refused() -> None:
    q, k, v = inputs(2, 1, torch.float32)
    with pytest.raises(AssertionError, match="no keys"):
        attend(fold(q, 2).unsqueeze(0), k[:, :, :0], v[:, :, :0])
