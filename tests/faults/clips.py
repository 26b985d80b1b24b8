"""Questions about clips that nobody has seen before, so that somebody has to encode them."""

from __future__ import annotations

from itertools import count

import numpy as np

from chiasm import Video
from chiasm.client import Content
from tests import digits
from tests.e2e.test_digits import drawn

QUESTION = "Read the digits."
FRAMES = 6

_seeds = count(7000)


def unseen(frames: int = FRAMES) -> Content:
    """About a clip of so many frames."""
    pictures, _ = drawn(np.random.default_rng(next(_seeds)), frames)
    return [Video(digits.clip(pictures)), QUESTION]
