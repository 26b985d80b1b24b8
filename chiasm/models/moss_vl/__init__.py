"""MOSS-VL: a ViT with one joint merger, and a decoder that looks at frames through gated cross-attention layers.

Importing this package loads no torch; making a half does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from chiasm.models.family import EntryShape
from chiasm.models.moss_vl.config import ARCHITECTURE, Config, read_config
from chiasm.models.moss_vl.layout import MossVLPrompt
from chiasm.models.moss_vl.processing import MossVLProcessor
from chiasm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from chiasm.models.moss_vl.text import MossVLDecoder
    from chiasm.models.moss_vl.vision import MossVLEncoder
    from chiasm.models.weights import WeightTable


class MossVL:
    """`Family`."""

    name = "moss_vl"
    architectures = (ARCHITECTURE,)
    refused: Mapping[str, str] = MappingProxyType({})

    def read_config(self, data: dict[str, object], where: str) -> Config:
        return read_config(data, where)

    def processor(self, config: Config, files: Mapping[str, dict[str, object]], where: str) -> MossVLProcessor:
        return MossVLProcessor.read(config, files, where)

    def prompt(self, config: Config, tokenizer: Tokenizer, template: str | None) -> MossVLPrompt:
        return MossVLPrompt(config, tokenizer, template)

    def entry_shape(self, config: Config) -> EntryShape:
        return config.entry_shape

    def weights(self, config: Config) -> WeightTable:
        from chiasm.models.moss_vl.weights import weight_table

        return weight_table(config)

    def encoder(self, config: Config, *, device: torch.device, dtype: torch.dtype) -> MossVLEncoder:
        from chiasm.models.moss_vl.vision import MossVLEncoder

        return MossVLEncoder(config, device=device, dtype=dtype)

    def decoder(
        self, config: Config, *, device: torch.device, dtype: torch.dtype, projects: bool = False
    ) -> MossVLDecoder:
        from chiasm.models.moss_vl.text import MossVLDecoder

        return MossVLDecoder(config, device=device, dtype=dtype, projects=projects)


FAMILY = MossVL()
