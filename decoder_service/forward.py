"""How the rows of a step become logits, or states: planned, copied to the device, computed.

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
from chiasm.attention.cudnn import cudnn_attention
from chiasm.models.family import DecoderHalf, Overlay

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

    def states_after(
        self, layers: Sequence[int], step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]
    ) -> list[Tensor]:
        """(len(wanted), width) after each of some layers, as the half computes them; the layers ascend."""
        ...

    def normed(self, states_me: Tensor) -> Tensor:
        """(M, width) after the last layer, normed."""
        ...

    def logits(self, states_me: Tensor) -> Tensor:
        """Those of (M, width) of `normed`, as a step that asks for them at once has them."""
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
        rows_at: Tensor,
        attention: Attention,
        overlay: Overlay | None = None,
        /,
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


def widened(numbers: Tensor) -> Tensor:
    """In float32 at least."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


class EagerForward:
    """`Forward` of any step: the host launches what the step needs.

    Args:
        features: of the pool, that lie over rows; None where nothing does.
        compute: makes logits in place of the half. States are the half's own.
    """

    def __init__(
        self,
        half: DecoderHalf,
        attention: Attention,
        features: Tensor | None = None,
        *,
        compute: Compute | None = None,
    ) -> None:
        self._half = half
        self._compute = compute or half.forward
        self._attention = attention
        self._features = features

    def __call__(self, step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]) -> Tensor:
        return widened(self._compute(*self._arguments(step, ids, positions_3n, wanted)))

    def states_after(
        self, layers: Sequence[int], step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]
    ) -> list[Tensor]:
        with cudnn_attention(self._half.device):
            return self._half.states_after(layers, *self._arguments(step, ids, positions_3n, wanted))

    def normed(self, states_me: Tensor) -> Tensor:
        return self._half.normed(states_me)

    def logits(self, states_me: Tensor) -> Tensor:
        return widened(self._half.logits(states_me))

    def prepare(self) -> None:
        """Nothing."""

    def _arguments(
        self, step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Attention, Overlay | None]:
        """What the half is given of a step, which is planned."""
        sees = step.sees()
        device = self._half.device
        self._attention.plan(step)
        return (
            torch.tensor(ids, device=device),
            torch.from_numpy(positions_3n).to(device),
            torch.from_numpy(sees).to(device) if sees.any() else None,
            torch.tensor(wanted, dtype=torch.long, device=device),
            self._attention,
            overlay_of(step.overlaid(), self._features),
        )
