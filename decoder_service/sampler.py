"""Logits to one token. Random numbers depend on (seed, sequence, index) alone, so that a stream continued elsewhere
draws the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chiasm.errors import ServerError


@dataclass(frozen=True, slots=True)
class Drawing:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the largest, the lowest id among equals.
        seed: 64 bits.
    """

    temperature: float = 0.0
    seed: int = 0


def draw(logits_v: Tensor, drawing: Drawing, *, index: int, banned: Iterable[int] = (), sequence: int = 0) -> int:
    """The token at output index `index`.

    Args:
        logits_v: (vocabulary,) floats.
        banned: ids that are never drawn.

    Raises ServerError NONFINITE if a logit is NaN or infinite, or nothing is left to draw.
    """
    if not bool(torch.isfinite(logits_v).all()):
        raise ServerError("NONFINITE", "the model produced a logit that is not finite")
    logits = logits_v.clone()
    logits[list(banned)] = -torch.inf
    if bool(torch.isneginf(logits).all()):
        raise ServerError("NONFINITE", "every token is banned")
    if drawing.temperature == 0:
        return int(logits.argmax())
    # The Gumbel trick: argmax of logits / temperature + noise is a draw from the softmax, without normalising it.
    key = np.array([drawing.seed, sequence], dtype=np.uint64)
    stream = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, index, 0], dtype=np.uint64)))
    noise = torch.from_numpy(stream.gumbel(size=logits.shape[0]))
    return int((logits.double().cpu() / drawing.temperature + noise).argmax())
