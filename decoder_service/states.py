"""What a step leaves of rows where nothing is drawn from them: their states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.errors import ServerError


@dataclass(frozen=True, eq=False, slots=True)
class State:
    """Of one row, on the host.

    Attributes:
        numbers: (width,) floats, of 32 bits at least.
    """

    numbers: npt.NDArray[np.floating]


class Gathering:
    """Of all rows of one sequence after some layers, on the host, in the type in which they were computed. They come
    in pieces, in any order, and more than once where they are computed again.

    Args:
        layers: ascending.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._states: Tensor | None = None

    def add(self, first: int, states_lme: Tensor, *, of: int) -> ServerError | None:
        """Takes (layers, M, width) states of the rows from `first` on, `of` so many as far as it is known. Returns
        ServerError NONFINITE for states that are none: it is their sequence's own fault and nobody else's."""
        layers, count, width = states_lme.shape
        if not torch.isfinite(states_lme).all():
            return _not_finite()
        stop = first + count
        if self._states is None or self._states.shape[1] < stop:
            grown = torch.empty(layers, max(stop, of), width, dtype=states_lme.dtype)
            if self._states is not None:
                grown[:, : self._states.shape[1]] = self._states
            self._states = grown
        self._states[:, first:stop] = states_lme
        return None

    def whole(self, rows: int) -> Tensor:
        """(layers, rows, width), all of which have come."""
        assert self._states is not None and self._states.shape[1] >= rows, "some have not come"
        return self._states[:, :rows]


def state_of(row_e: Tensor) -> State | ServerError:
    """A row of a step as it is told. Returns ServerError NONFINITE for one that is no vector: it is its sequence's own
    fault and nobody else's."""
    numbers = row_e.cpu().numpy().copy()
    if not np.isfinite(numbers).all():
        return _not_finite()
    return State(numbers)


def _not_finite() -> ServerError:
    return ServerError("NONFINITE", "the model produced a state that is not finite")
