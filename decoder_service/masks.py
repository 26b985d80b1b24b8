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


def keep(logits_rv: Tensor, rows: Sequence[int], bits_gb: npt.NDArray[np.uint8]) -> None:
    """Sets the logits of some rows' tokens to minus infinity unless their bit is set. Other rows are not touched.

    Args:
        logits_rv: (rows, vocabulary).
        rows: which of them, each once.
        bits_gb: (len(rows), ceil(vocabulary / 8)).
    """
    if not rows:
        return
    vocabulary, device = logits_rv.shape[1], logits_rv.device
    banned_gv = banned(bits_gb, vocabulary) if device.type == "cpu" else banned_on(device, bits_gb, vocabulary)
    if len(rows) == len(logits_rv):
        logits_rv.masked_fill_(banned_gv, -torch.inf)
        return
    at = torch.tensor(rows, device=device)
    logits_rv.index_copy_(0, at, logits_rv.index_select(0, at).masked_fill_(banned_gv, -torch.inf))


def banned(bits_gb: npt.NDArray[np.uint8], vocabulary: int) -> Tensor:
    """(rows, vocabulary) whether the bit of a token is not set."""
    unset = np.unpackbits(~bits_gb, axis=1, count=vocabulary, bitorder="little")
    return torch.from_numpy(unset.view(np.bool_))


def banned_on(device: torch.device, bits_gb: npt.NDArray[np.uint8], vocabulary: int) -> Tensor:
    """`banned`, unpacked on the device: an eighth of the bytes travels. On a CPU numpy takes a fiftieth of the time."""
    places = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8, device=device)
    bits_gb1 = torch.from_numpy(bits_gb).to(device, non_blocking=True).unsqueeze(2)
    return ((bits_gb1 & places) == 0).flatten(1)[:, :vocabulary]
