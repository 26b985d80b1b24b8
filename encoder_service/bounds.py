"""What one pass through the model may hold: patches, units, and elements of its largest tensor.

It counts. It knows no tensor, and of a model only how large its tensors become.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from chiasm.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

    from chiasm.models.family import Grid

MAX_PATCHES: Final = 65_536
"""Patches of one picture of 16,777,216 pixels at 16 a side, the largest that the families' defaults resize to."""

PATCHES_A_THREAD: Final = 1024
"""Patches of a pass on a CPU, for each of its threads. Measured on one core, a patch takes 0.9 to 1.1 times as long in
a pass of 1,024 as in one of 4,032. Who waits for a pass waits less for a small one, and what was in it is attached
while the next one is computed."""

MAX_UNITS: Final = 256

MAX_ELEMENTS: Final = 2**31
"""From so many elements of one tensor on, kernels that index with 32 bits read and write elsewhere, in silence."""


def default_patches(device: torch.device, threads: int) -> int:
    """Patches of one pass, where nothing else is said.

    Args:
        threads: that a CPU computes with.
    """
    return min(MAX_PATCHES, PATCHES_A_THREAD * threads) if device.type == "cpu" else MAX_PATCHES


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of every pass.

    Attributes:
        max_patches, max_units: of a pass of several units; one that has more patches goes alone. 0: no bound.
        largest: elements of the largest tensor of a pass over so many patches of so many units, neither of which makes
            it smaller (`EncoderHalf.largest_tensor`).
        max_elements: which that tensor must have fewer than.
        max_unit_patches: of a unit; one of more is refused. 0: no bound.
    """

    max_patches: int
    max_units: int
    largest: Callable[[int, int], int]
    max_elements: int = MAX_ELEMENTS
    max_unit_patches: int = MAX_PATCHES

    def fit(self, patches: int, units: int) -> bool:
        """Whether so much, of several units, can be one pass."""
        return (
            patches <= (self.max_patches or patches)
            and units <= (self.max_units or units)
            and self.largest(patches, units) < self.max_elements
        )

    def check(self, grid: Grid) -> None:
        """Raises InvalidRequest MEDIA_TOO_LARGE for a unit that is not encoded, even alone."""
        patches = grid[0] * grid[1]
        facts: dict[str, int | str | float | bool] = {"rows": grid[0], "columns": grid[1]}
        if patches > (self.max_unit_patches or patches):
            raise InvalidRequest(
                "MEDIA_TOO_LARGE",
                f"a frame becomes {grid[0]}x{grid[1]} patches, {patches}; it may have {self.max_unit_patches}",
                facts={**facts, "patches": patches, "limit": self.max_unit_patches},
            )
        if (elements := self.largest(patches, 1)) >= self.max_elements:
            raise InvalidRequest(
                "MEDIA_TOO_LARGE",
                f"a frame becomes {grid[0]}x{grid[1]} patches, and these a tensor of {elements} elements; "
                f"fewer than {self.max_elements} can be computed with",
                facts={**facts, "elements": elements, "limit": self.max_elements},
            )
