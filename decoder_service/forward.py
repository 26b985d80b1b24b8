"""How the rows of a step become logits: planned, copied to the device, computed.

It knows the decoder half and its attention. It has never seen a sequence or a request, and it keeps nothing of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.attention.backend import Attention, Step
from chiasm.models.family import DecoderHalf

Ints = npt.NDArray[np.int64]


class Forward(Protocol):
    """Computes steps, one after another, in one thread at a time."""

    def __call__(self, step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]) -> Tensor:
        """(len(wanted), vocabulary) logits in float32 at least, for the caller to keep.

        Args:
            ids: (rows,) of the step.
            positions_3n: of its rows.
            wanted: its rows whose logits are wanted, ascending.
        """
        ...

    def prepare(self) -> None:
        """Does what would else make the first steps wait."""
        ...


class EagerForward:
    """`Forward` of any step: the host launches what the step needs."""

    def __init__(self, half: DecoderHalf, attention: Attention) -> None:
        self._half = half
        self._attention = attention

    def __call__(self, step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]) -> Tensor:
        sees = step.sees()
        device = self._half.device
        self._attention.plan(step)
        logits = self._half.forward(
            torch.tensor(ids, device=device),
            torch.from_numpy(positions_3n).to(device),
            torch.from_numpy(sees).to(device) if sees.any() else None,
            torch.tensor(wanted, dtype=torch.long, device=device),
            self._attention,
        )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def prepare(self) -> None:
        """Nothing."""
