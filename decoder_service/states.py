"""What a step leaves of a row where nothing is drawn from it: its state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from chiasm.errors import ServerError


@dataclass(frozen=True, eq=False, slots=True)
class State:
    """Of one row, on the host.

    Attributes:
        numbers: (width,) floats, of 32 bits at least.
    """

    numbers: npt.NDArray[np.floating]


def state_of(row_e: Tensor) -> State | ServerError:
    """A row of a step as it is told. Returns ServerError NONFINITE for one that is no vector: it is its sequence's own
    fault and nobody else's."""
    numbers = row_e.cpu().numpy().copy()
    if not np.isfinite(numbers).all():
        return ServerError("NONFINITE", "the model produced a state that is not finite")
    return State(numbers)
