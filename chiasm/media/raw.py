"""Raw frames to RGB. There is nothing to parse in them, so this runs without a worker and knows only numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chiasm.media.types import RawFrame, Rgb

_WHITE = np.uint32(255)


def to_rgb(frame: RawFrame) -> Rgb:
    """RGB of a raw frame whose layout `chiasm.media.open.check_raw` has accepted.

    Grey is repeated three times, RGB copied (so that the result owns its memory and may be written), RGBA composited on
    white. Returns (height, width, 3) uint8, C-contiguous.
    """
    pixels = np.frombuffer(frame.data, np.uint8).reshape(frame.height, frame.width, frame.channels)
    if frame.channels == 1:
        return np.repeat(pixels, 3, axis=2)
    if frame.channels == 3:
        return pixels.copy()
    return on_white(pixels)


def on_white(rgba: npt.NDArray[np.uint8]) -> Rgb:
    """`round((colour * alpha + 255 * (255 - alpha)) / 255)` for each channel.

    rgba: (height, width, 4) uint8, alpha not premultiplied. Returns (height, width, 3) uint8. Row by row, because the
    sums need four bytes each and a large picture would quadruple.
    """
    rgb = np.empty((*rgba.shape[:2], 3), np.uint8)
    for row, out in zip(rgba, rgb, strict=True):
        alpha = row[:, 3:].astype(np.uint32)
        out[:] = (row[:, :3] * alpha + _WHITE * (_WHITE - alpha) + 127) // 255
    return rgb
