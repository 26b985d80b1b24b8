"""Which sizes may stand for each other is told by the bits of their results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chiasm.attention.agreeing import agreeing
from chiasm.settings import SettingsError


def test_sizes_are_kept_whose_results_are_those_of_the_first() -> None:
    def compute(size: int, draw: int) -> Tensor:
        return torch.full((size, 3), draw + (1e-6 if size == 8 else 0.0))

    assert agreeing([2, 4, 8, 16], compute) == [2, 4, 16]


def test_a_single_place_of_a_single_draw_that_differs_is_enough() -> None:
    def compute(size: int, draw: int) -> Tensor:
        results = torch.ones(size, 3)
        if size == 16 and draw == 2:
            results[13, 1] += 1e-6
        return results

    assert agreeing([4, 16], compute) == [4]


def test_what_depends_on_the_place_within_the_first_size_is_refused() -> None:
    def compute(size: int, draw: int) -> Tensor:
        return torch.arange(size).unsqueeze(1) * 1e-6

    with pytest.raises(SettingsError, match="depend on the place"):
        agreeing([4, 16], compute)
