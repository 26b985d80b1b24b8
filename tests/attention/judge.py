"""The judge of every attention backend: sums written out, in float64, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from chiasm.attention.pages import Pools

TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 2e-6),
    torch.bfloat16: (2e-2, 2e-2),  # eight bits, rounded in the weights, once more where parts are merged, in the result
}
"""Relative and absolute, for values drawn from a unit normal."""


def close(got: Tensor, expected: Tensor) -> None:
    """Fails unless equal within the tolerance of their common dtype."""
    rtol, atol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def attend(q_hd: Tensor, k_skd: Tensor, v_skd: Tensor) -> Tensor:
    """(heads, dim) of one row over (S, kv heads, dim) keys and values; zero where there are none."""
    heads, dim = q_hd.shape
    if not k_skd.shape[0]:
        return torch.zeros_like(q_hd)
    group = heads // k_skd.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k_skd, v_skd))
    scores = torch.einsum("hd,shd->hs", q_hd.double(), k) * dim**-0.5
    return torch.einsum("hs,shd->hd", scores.softmax(-1), v).to(q_hd.dtype)


def causal(q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
    """A whole sequence: row i over rows 0..i."""
    return torch.stack([attend(q, k_nkd[: i + 1], v_nkd[: i + 1]) for i, q in enumerate(q_nhd)])


def full(q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor) -> Tensor:
    """Every row over all of them."""
    return torch.stack([attend(q, k_nkd, v_nkd) for q in q_nhd])


def spans(q_nhd: Tensor, k_skd: Tensor, v_skd: Tensor, boundaries_n2: Tensor) -> Tensor:
    """Row i over keys [first, last) of its own."""
    rows = zip(q_nhd, boundaries_n2.tolist(), strict=True)
    return torch.stack([attend(q, k_skd[first:last], v_skd[first:last]) for q, (first, last) in rows])


def pools(
    *, pages: int = 16, page_size: int = 4, slots: int = 64, layers: int = 2, kv_heads: int = 2, head_dim: int = 8
) -> Pools:
    """Float32 pools full of NaN, so that whatever is read before it is written shows."""
    made = Pools(
        self_layers=layers,
        cross_layers=layers,
        pages=pages,
        page_size=page_size,
        slots=slots,
        kv_heads=kv_heads,
        head_dim=head_dim,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    made.self_kv.fill_(torch.nan)
    made.cross_kv.fill_(torch.nan)
    return made
