"""Qwen3-VL: a ViT with a merger and one more for each tap, whose features are laid over the placeholders of a decoder.

Importing this package loads no torch; making a half does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from chiasm.models.family import EntryShape
from chiasm.models.qwen3_vl.config import ARCHITECTURE, REFUSED, Config, read_config
from chiasm.models.qwen3_vl.layout import Qwen3VLPrompt
from chiasm.models.qwen3_vl.processing import Qwen3VLProcessor
from chiasm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from chiasm.models.qwen3_vl.text import Qwen3VLDecoder
    from chiasm.models.qwen3_vl.vision import Qwen3VLEncoder
    from chiasm.models.weights import WeightTable


class Qwen3VL:
    """`Family`."""

    name = "qwen3_vl"
    architectures = (ARCHITECTURE,)
    refused = REFUSED

    def read_config(self, data: dict[str, object], where: str) -> Config:
        return read_config(data, where)

    def processor(self, config: Config, files: Mapping[str, dict[str, object]], where: str) -> Qwen3VLProcessor:
        return Qwen3VLProcessor.read(config, files, where)

    def prompt(self, config: Config, tokenizer: Tokenizer, template: str | None) -> Qwen3VLPrompt:
        return Qwen3VLPrompt(config, tokenizer, template)

    def entry_shape(self, config: Config) -> EntryShape:
        return config.entry_shape

    def weights(self, config: Config) -> WeightTable:
        from chiasm.models.qwen3_vl.weights import weight_table

        return weight_table(config)

    def encoder(self, config: Config, *, device: torch.device, dtype: torch.dtype) -> Qwen3VLEncoder:
        from chiasm.models.qwen3_vl.vision import Qwen3VLEncoder

        return Qwen3VLEncoder(config, device=device, dtype=dtype)

    def decoder(
        self, config: Config, *, device: torch.device, dtype: torch.dtype, projects: bool = False
    ) -> Qwen3VLDecoder:
        """`projects` changes nothing: states are laid over placeholders as they are."""
        from chiasm.models.qwen3_vl.text import Qwen3VLDecoder

        return Qwen3VLDecoder(config, device=device, dtype=dtype)


FAMILY = Qwen3VL()
