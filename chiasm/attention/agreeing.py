"""Which sizes of one computation give bit-equal results on this machine: found out by computing, not by belief.

A product of fixed shape is computed in one fixed order, whatever numbers are in it: libraries choose their kernels, and
the way a sum is split, by shape, type and the number of threads. So a row's result can depend on nothing but its own
numbers and its place. Equal problems at all places of one computation tell whether the place matters, and the same
problem in computations of two sizes tells whether these may stand for each other. Both hold or fail for all numbers
alike: a sum in another order shows in the last bits of its numbers.

What is found holds for the device, the type and the number of threads it was found with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from chiasm.settings import SettingsError

S = TypeVar("S")

DRAWS = 3
"""Random problems that are compared. One told every difference that was seen so far."""


def agreeing(sizes: Sequence[S], compute: Callable[[S, int], Tensor]) -> list[S]:
    """Those of the sizes, the first always among them, whose results are bit by bit those of the first.

    Args:
        compute: of a size and the number of a draw: (equal problems, ...) results of as many equal problems, that do
            not depend on the size.

    Raises SettingsError if results of the first size depend on the place in it.
    """
    expected = [compute(sizes[0], draw) for draw in range(DRAWS)]
    if any(not _equal(results, results[0]) for results in expected):
        raise SettingsError(
            f"products of size {sizes[0]} depend on the place in them, on this machine",
            "--deterministic",
            "leave it out",
        )
    return [
        size
        for size in sizes
        if size == sizes[0] or all(_equal(compute(size, draw), expected[draw][0]) for draw in range(DRAWS))
    ]


def _equal(results: Tensor, expected: Tensor) -> bool:
    return bool((results == expected).all())
