"""Which tokens may be drawn at all: min-p, top-k and top-p, each a least logit.

Equals are kept or left out together, so that what is kept depends on no order among them, on any device. Thresholds of
logits are what vLLM and Hugging Face `transformers` compare with too. It knows no tokens and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Truncation(NamedTuple):
    """Of one row. The defaults keep everything.

    Attributes:
        min_p: keeps tokens at least this likely relative to the likeliest, from 0 to 1.
            (Nguyen et al., "Turning up the heat", 2024)
        top_k: keeps this many of the likeliest; 0 keeps all. (Fan et al., 2018)
        top_p: keeps the fewest of the likeliest that have this mass, above 0, at most 1. (Holtzman et al., 2019)
    """

    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


KEEP_ALL = Truncation()


class Least(NamedTuple):
    """(rows, 1) the least logit that each row keeps, and (rows,) whether everything it keeps is among the logits that
    were looked at. Where it is not, the least logit means nothing."""

    logits_r1: Tensor
    settled_r: Tensor


def least(likeliest_rk: Tensor, truncations: Sequence[Truncation], total_r1: Tensor | None = None) -> Least:
    """What each row keeps, found among its likeliest tokens: nearly always few of a large vocabulary. The likeliest
    token is always kept.

    The three cut one after the other, as in vLLM's sampler: min-p, then top-k, then top-p, whose mass is that of what
    the others have left.

    Args:
        likeliest_rk: (rows, k) float64 logits after temperature, in falling order; minus infinity for tokens that are
            banned.
        total_r1: (rows, 1) logsumexp of all logits of each row. None: there are no others.
    """
    # Doubles hold every count of tokens as well.
    min_p, top_k, top_p = torch.tensor(truncations, dtype=torch.float64, device=likeliest_rk.device).T.unsqueeze(2)
    count = likeliest_rk.shape[1]
    last = likeliest_rk[:, -1:] if total_r1 is not None else torch.full_like(likeliest_rk[:, -1:], -torch.inf)
    least_r1 = likeliest_rk[:, :1] + min_p.log()
    kth = likeliest_rk.gather(1, (top_k.long() - 1).clamp(0, count - 1))
    least_r1 = torch.maximum(least_r1, kth.where((top_k > 0) & (top_k <= count), -torch.inf))
    # Of equals of the last one looked at there may be more.
    inside = (least_r1 > last) | (total_r1 is None)
    kept = likeliest_rk.masked_fill(likeliest_rk < least_r1, -torch.inf)
    mass = kept.logsumexp(1, keepdim=True)
    if total_r1 is not None:
        mass = torch.where(inside, mass, total_r1)
    # The token with which the mass is reached is the last one kept.
    before = ((kept - mass).exp_().cumsum_(1) < top_p).sum(1, keepdim=True)
    nucleus = kept.gather(1, before.clamp(max=count - 1)).where((top_p < 1) & (before < count), -torch.inf)
    # Where tokens that were not looked at are left out, nobody knows the mass of those that are left.
    known = inside | ((min_p == 0) & (top_k == 0))
    least_r1 = torch.maximum(least_r1, nucleus.where(known, -torch.inf))
    settled = (least_r1 > last) | (total_r1 is None)
    return Least(least_r1, settled.squeeze(1))
