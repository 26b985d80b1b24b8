"""The size a picture is resized to: multiples of a factor, within pixels. Numbers only, no torch.

Rules that families share: those of the processors of Qwen2-VL and of all that came of it. What the bounds are a family
says itself.
"""

from __future__ import annotations

import math

from chiasm.errors import InvalidRequest

MAX_ASPECT_RATIO = 200


def check_ratio(height: int, width: int) -> None:
    """Raises InvalidRequest ASPECT_RATIO where one side is more than 200 times the other."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise InvalidRequest(
            "ASPECT_RATIO",
            f"the sides {width}x{height} are as 1 to {ratio:.1f}, at most 1 to {MAX_ASPECT_RATIO}",
            facts={"ratio": round(ratio, 3), "limit": MAX_ASPECT_RATIO},
        )


def nearest(height: int, width: int, factor: int) -> tuple[int, int]:
    """Multiples of `factor` nearest to the sides, halves to even. A side of at most half a factor becomes 0."""
    return round(height / factor) * factor, round(width / factor) * factor


def shrunk(height: int, width: int, by: float, factor: int) -> tuple[int, int]:
    """Multiples of `factor` at or below the sides divided by `by`, one factor at least."""
    h, w = (max(factor, math.floor(side / by / factor) * factor) for side in (height, width))
    return h, w


def enlarged(height: int, width: int, by: float, factor: int) -> tuple[int, int]:
    """Multiples of `factor` at or above the sides times `by`."""
    h, w = (math.ceil(side * by / factor) * factor for side in (height, width))
    return h, w


def resize_image(height: int, width: int, factor: int, *, least: int, most: int) -> tuple[int, int]:
    """Multiples of `factor` nearest to the sides (halves to even), shrunk or enlarged until least <= pixels <= most.

    A picture with a side that rounds to 0 counts as one below `least`, however long the other is: the rule then gives
    the smallest size of its shape that has `least` pixels, which may be smaller than the picture.
    """
    h, w = nearest(height, width, factor)
    if h * w > most:
        return shrunk(height, width, math.sqrt(height * width / most), factor)
    if h * w < least:
        return enlarged(height, width, math.sqrt(least / (height * width)), factor)
    return h, w
