"""RGB frames to the rows a patch embedding reads: resize, normalise, cut. Torch on whatever device the frame is on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def resize(frames_n3hw: Tensor, height: int, width: int) -> Tensor:
    """uint8 (N, 3, H, W) to uint8 (N, 3, height, width) by antialiased bicubic, torch's native uint8 kernel.

    On CPU this is the kernel of the reference's image processor, bit for bit. Frames of the right size are returned as
    they are.
    """
    assert frames_n3hw.dtype == torch.uint8, frames_n3hw.dtype
    if frames_n3hw.shape[-2:] == (height, width):
        return frames_n3hw
    return F.interpolate(frames_n3hw, size=(height, width), mode="bicubic", antialias=True)


def normalise(pixels: Tensor) -> Tensor:
    """uint8 to float32 (x - 127.5) / 127.5: mean and deviation 0.5 of values in 0..1."""
    return (pixels.float() - 127.5) / 127.5


def to_patches(unit: Tensor, patch: int, merge: int) -> Tensor:
    """(channels, H, W), or (frames, channels, H, W) whose patches go through time, to
    (patches, channels * frames * patch * patch), in the order of merge blocks.

    Rows run over blocks row by row, and over the patches of a block row by row; inside a row come channel, frame, y, x.
    """
    frames, channels, height, width = (unit if unit.dim() == 4 else unit.unsqueeze(0)).shape
    side = patch * merge
    assert height % side == 0 and width % side == 0, f"{height}x{width} is not a multiple of {side}"
    blocks = unit.view(frames, channels, height // side, merge, patch, width // side, merge, patch)
    return blocks.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(-1, channels * frames * patch * patch)
