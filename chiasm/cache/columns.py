"""Tables over shared bytes: arrays that are laid one behind the other, each at a multiple of a cache line."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64

Array: TypeAlias = npt.NDArray[Any]


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Carver:
    """Lays arrays over bytes. Who carves the same from the same bytes has the same arrays.

    Attributes:
        offset: where the next one begins.
    """

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self.offset = 0

    def __call__(self, dtype: npt.DTypeLike, *shape: int) -> Array:
        made: Array = np.ndarray(shape, dtype, self._body, self.offset)
        self.offset += aligned(made.nbytes)
        return made
