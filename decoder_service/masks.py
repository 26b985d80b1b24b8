"""Which tokens may be drawn at all, as bits. It knows no guide and no reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bits: TypeAlias = npt.NDArray[np.uint8]
"""(bytes,) one bit for each token of a vocabulary, the lowest of a byte first; those beyond it mean nothing."""


def keep(logits_rv: Tensor, rows: Sequence[int], bits_gb: Tensor) -> None:
    """Sets the logits of some rows' tokens to minus infinity unless their bit is set. Other rows are not touched.

    Args:
        logits_rv: (rows, vocabulary).
        rows: which of them, each once.
        bits_gb: (len(rows), ceil(vocabulary / 8)) uint8, on the CPU. They are unpacked where the logits are: an eighth
            of the bytes travels.
    """
    if not rows:
        return
    device = logits_rv.device
    places = torch.arange(8, dtype=torch.uint8, device=device)
    bits_gb8 = bits_gb.to(device, non_blocking=True).unsqueeze(2) >> places & 1
    banned_gv = bits_gb8.flatten(1)[:, : logits_rv.shape[1]] == 0
    if len(rows) == len(logits_rv):
        logits_rv.masked_fill_(banned_gv, -torch.inf)
        return
    at = torch.tensor(rows, device=device)
    logits_rv.index_copy_(0, at, logits_rv.index_select(0, at).masked_fill_(banned_gv, -torch.inf))
