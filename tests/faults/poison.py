"""What the flawed workers of these tests cannot bear, and what they tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from chiasm import Image
from tests import digits

PASSES: Final = "TESTS_PASSES"
"""In the environment: the file in which a worker tells what it computes."""

SIGNAL: Final = "TESTS_SIGNAL"
"""In the environment: the name of the signal by which poison ends a worker. SIGKILL is what a machine without memory
sends."""

HELD: Final = ".held"
"""Suffix of the file that makes passes wait."""

POISON, HUNG, INNOCENT = "poison", "hung", "innocent"

LONG: Final = 200

_COLOURS: Mapping[str, tuple[int, int, int]] = {POISON: (255, 0, 0), HUNG: (0, 255, 0)}


def paint(what: str) -> tuple[int, int, int]:
    return _COLOURS[what]


def picture(what: str, *, side: int = 48) -> Image:
    """One that the flawed encoder cannot bear."""
    return Image(digits.image(np.full((side, side, 3), paint(what), np.uint8)))
