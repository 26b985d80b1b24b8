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
from chiasm.models.family import Overlay

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


class Compute(Protocol):
    """`DecoderHalf.forward`, or what gives the same."""

    def __call__(
        self,
        ids_n: Tensor,
        positions_3n: Tensor,
        sees_n: Tensor | None,
        logits_at: Tensor,
        attention: Attention,
        overlay: Overlay | None = None,
    ) -> Tensor: ...


def overlay_of(slots: Ints | None, features: Tensor | None) -> Overlay | None:
    """What lies over the rows of a step. None where nothing does.

    Args:
        slots: (rows,), as `Step.overlaid`.
        features: of the pool.
    """
    rows = np.empty(0, dtype=np.int64) if slots is None else np.flatnonzero(slots >= 0)
    if slots is None or not len(rows):
        return None
    assert features is not None, "nothing lies over the rows of this model"
    device = features.device
    return Overlay(torch.from_numpy(rows).to(device), features[torch.from_numpy(slots[rows]).to(device)])


class EagerForward:
    """`Forward` of any step: the host launches what the step needs.

    Args:
        features: of the pool, that lie over rows; None where nothing does.
    """

    def __init__(
        self, device: torch.device, compute: Compute, attention: Attention, features: Tensor | None = None
    ) -> None:
        self._device = device
        self._compute = compute
        self._attention = attention
        self._features = features

    def __call__(self, step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]) -> Tensor:
        sees = step.sees()
        device = self._device
        self._attention.plan(step)
        logits = self._compute(
            torch.tensor(ids, device=device),
            torch.from_numpy(positions_3n).to(device),
            torch.from_numpy(sees).to(device) if sees.any() else None,
            torch.tensor(wanted, dtype=torch.long, device=device),
            self._attention,
            overlay_of(step.overlaid(), self._features),
        )
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def prepare(self) -> None:
        """Nothing."""
