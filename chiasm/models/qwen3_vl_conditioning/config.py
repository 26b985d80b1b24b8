"""What is kept of a Qwen3-VL: the first of its decoder's layers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from chiasm.errors import CheckpointError
from chiasm.models.qwen3_vl.config import Config as Whole
from chiasm.models.qwen3_vl.config import TextConfig, VisionConfig


@dataclass(frozen=True, slots=True)
class Config:
    """A whole configuration and the number of layers that are kept. There may be fewer of them than taps: the features
    of the taps behind are then in every entry and added to nothing."""

    whole: Whole
    layers: int

    @property
    def vision(self) -> VisionConfig:
        return self.whole.vision

    @property
    def text(self) -> TextConfig:
        """Of the whole."""
        return self.whole.text


def cut(config: Whole, layers: int, where: str) -> Config:
    """Raises CheckpointError, with both numbers, for a layer that is not there."""
    depth = config.text.num_hidden_layers
    if not 1 <= layers <= depth:
        raise CheckpointError(where, [f"is to be cut after layer {layers}, its text has layers 1 to {depth}"])
    return Config(config, layers)
