"""One attention product that also says how much it weighed, and the sum that puts parts of one softmax together.

Softmax over a set of keys is a weighted mean of softmaxes over its parts, weighted by the exponentials of their
log-sums. So keys may lie in several places and rows may share most of what they see. Nothing here knows of sequences,
pages or units.

Grouped heads are folded: the queries that share a key head lie one after another as if they were further rows, so
keys are read once per group and never copied. On CPU the folded kernel serves single tokens in bfloat16 as well: beside
two products and a softmax it took 0.35 to 1.2 times as long over keys that lie together, and 0.13 to 0.45 times over a
head's keys that lie apart, as the self pool keeps them (1 to 96 sequences, 150 to 4,096 keys; torch 2.13, one core).

Shape suffixes: N rows of a step, H query heads, K key heads, M = N * H / K folded rows, S keys, D head dimension, B
independent problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FEW_KEYS = 512
"""Keys up to which the query heads of a single row may be attended each by itself."""


def fold(q_nhd: Tensor, kv_heads: int) -> Tensor:
    """(N, H, D) queries as (K, M, D): of each key head, row by row, the query heads that share it."""
    folded: Tensor = q_nhd.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    return folded


def unfold(out_kmd: Tensor, rows: int) -> Tensor:
    """`fold` taken back: (K, M, D) to (N, H, D) with N = `rows`."""
    unfolded: Tensor = out_kmd.unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)
    return unfolded


def single(q_bhd: Tensor, kv_heads: int, keys: int) -> Tensor:
    """(B, H, D) queries of single rows as `attend` takes them, in the shape in which it is soonest done with them: by
    key head, or each head by itself. The result, its middle axes flattened, is (B, H, D) either way.

    Measured on CPU in bfloat16 with two queries to a key head, each by itself takes 0.5 to 0.9 times as long up to 512
    keys: a product of one row needs no keys laid out anew. In float32, and with more queries or keys, it takes longer.
    """
    apart = keys <= FEW_KEYS and q_bhd.shape[1] <= 2 * kv_heads and q_bhd.dtype == torch.bfloat16 and q_bhd.is_cpu
    return q_bhd.unsqueeze(2) if apart else q_bhd.unflatten(1, (kv_heads, -1))


def attend(
    q_bkmd: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention with scale D ** -0.5 and its log-sum-exp; the softmax is taken in float32 at least.

    Args:
        q_bkmd: (B, K, M, D) queries, or (B, H, M, D) unfolded ones whose heads share keys in groups.
        k_bksd: (B, K, S, D), S at least 1.
        v_bksd: as the keys.
        bias: broadcast to (B, K, M, S), added to the scores, of the queries' dtype: 0 or -inf. Each row must see a
            key: what the kernel says of the weight of a row that sees none is not to be used.
        causal: row i sees keys 0 to i.

    Returns (B, K, M, D), and (B, K, M) log-sum-exps in float32 at least.
    """
    assert k_bksd.shape[2], "attention over no keys"
    if q_bkmd.is_cpu:
        return torch._scaled_dot_product_flash_attention_for_cpu(q_bkmd, k_bksd, v_bksd, 0.0, causal, attn_mask=bias)
    return products(q_bkmd, k_bksd, v_bksd, bias=bias, causal=causal)


def products(
    q_bkmd: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """`attend` as two products and a softmax, on any device. Keeps M * S scores of each head for a moment."""
    heads, kv_heads = q_bkmd.shape[1], k_bksd.shape[1]
    q_bkmd = q_bkmd.unflatten(1, (kv_heads, heads // kv_heads))
    k_bksd, v_bksd = k_bksd.unsqueeze(2), v_bksd.unsqueeze(2)
    scores = torch.matmul(q_bkmd * q_bkmd.shape[-1] ** -0.5, k_bksd.transpose(-1, -2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores += bias if bias.dim() < 3 else bias.unsqueeze(2)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores.masked_fill_(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    out = torch.matmul((scores - lse.unsqueeze(-1)).exp().to(v_bksd.dtype), v_bksd)
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The attention over all keys together, from what `attend` says of disjoint parts of them, for equal rows.

    Sums are taken in the dtype of the log-sum-exps, float32 at least.
    """
    if len(parts) == 1:
        return parts[0][0]
    weights = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    total = parts[0][0] * weights[0]
    for (out, _), weight in zip(parts[1:], weights[1:], strict=True):
        total.addcmul_(out.to(total.dtype), weight)
    return total.to(parts[0][0].dtype)
