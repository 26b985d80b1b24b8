"""Handwritten digits as frames of a video: the split, and how a digit of 8x8 is drawn on 64x64 pixels.

The digits are the test part of the UCI "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998,
CC BY 4.0), which scikit-learn ships. Knows no model, no prompt and no file format.
Shape suffixes: N frames or digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 64
"""Pixels of a frame's side: the smallest size the model's processor leaves as it is."""

INK = 16
"""Darkest value of a digit's 8x8 cells; they count set pixels of 4x4 blocks of the scan."""

EMPTY = -1
"""In place of a digit's number: a frame that shows none."""

SPLIT_SEED = 1998
TRAIN_SHARE = 0.8


_Uniform: TypeAlias = Callable[..., Tensor]
"""(low, high, *shape) to (N, *shape) random numbers."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Digits: (N, 8, 8) cells from 0 to 16, and the (N,) numbers they show."""

    cells: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def split() -> tuple[Digits, Digits]:
    """The training part and the held-out part, 80 to 20, always the same. Needs scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    cells = cast("npt.NDArray[np.float64]", found.images).astype(np.uint8)
    labels = cast("npt.NDArray[np.int64]", found.target).astype(np.int64)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    cut = int(len(labels) * TRAIN_SHARE)
    train, held_out = (Digits(cells[part], labels[part]) for part in (order[:cut], order[cut:]))
    return train, held_out


def draw(cells_n88: Tensor, shown_n: Tensor, generator: torch.Generator) -> Tensor:
    """Grey frames, uint8 RGB (N, 3, 64, 64): digits where `shown_n` is true, empty pictures elsewhere.

    A digit is bright on dark, 48 to 60 pixels large, moved, turned a little, noisy; half of the frames are blurred and
    reduced to few levels, roughly what a video codec leaves of them. An empty frame is a noisy grey slope.
    """
    count = len(cells_n88)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *(shape or (1, 1, 1)), generator=generator) * (high - low) + low

    ink = _placed(cells_n88.float().unsqueeze(1) / INK, uniform)
    low = uniform(0.0, 0.25)
    picture = low + (uniform(0.6, 1.0) - low) * ink
    at = torch.linspace(-0.5, 0.5, SIDE)
    slope = uniform(-0.4, 0.4) * at.view(1, 1, 1, -1) + uniform(-0.4, 0.4) * at.view(1, 1, -1, 1)
    picture = torch.where(shown_n.view(-1, 1, 1, 1), picture, uniform(0.0, 0.9) + slope)
    picture += uniform(0.0, 0.12) * torch.randn(picture.shape, generator=generator)
    coded = (uniform(0.0, 1.0) < 0.5).flatten()
    levels = uniform(12.0, 64.0)[coded]
    blurred = F.avg_pool2d(picture[coded], 3, stride=1, padding=1, count_include_pad=False)
    picture[coded] = (blurred * levels).round() / levels
    return (picture.clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)


def _placed(ink_n188: Tensor, uniform: _Uniform) -> Tensor:
    """(N, 1, 64, 64) of (N, 1, 8, 8): enlarged, moved inside the frame, turned by up to 8 degrees."""
    size = uniform(48 / SIDE, 60 / SIDE, 1)[:, 0]
    turn = torch.deg2rad(uniform(-8.0, 8.0, 1)[:, 0])
    shift = uniform(-1.0, 1.0, 2) * (1 - size).unsqueeze(1)
    cos, sin = turn.cos() / size, turn.sin() / size
    # Rows map a place in the frame to a place in the digit: subtract the shift, turn, divide by the size.
    turned = torch.stack([torch.stack([cos, sin], dim=1), torch.stack([-sin, cos], dim=1)], dim=1)
    affine = torch.cat([turned, -(turned @ shift.unsqueeze(-1))], dim=2)
    grid = F.affine_grid(affine, [len(size), 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(ink_n188, grid, mode="bicubic", padding_mode="zeros", align_corners=False).clamp(0, 1)
