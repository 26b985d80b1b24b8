"""Qwen3-VL cut after one of its decoder's layers: what others are conditioned on, and no answer.

The checkpoint is a whole Qwen3-VL; how many of its layers are kept is said by whoever opens it (`registry.Model`).
Units and entries are those of the whole, and so is the encoder half. Importing this package loads no torch; making a
half does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from chiasm.errors import CheckpointError
from chiasm.models.family import EntryShape
from chiasm.models.qwen3_vl import FAMILY as WHOLE
from chiasm.models.qwen3_vl.layout import Qwen3VLPrompt
from chiasm.models.qwen3_vl.processing import Qwen3VLProcessor
from chiasm.models.qwen3_vl_conditioning.config import Config, cut
from chiasm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from chiasm.models.qwen3_vl.vision import Qwen3VLEncoder
    from chiasm.models.qwen3_vl_conditioning.text import Qwen3VLConditioner
    from chiasm.models.weights import WeightTable


class Qwen3VLConditioning:
    """`CutFamily` of Qwen3-VL."""

    name = "qwen3_vl_conditioning"
    architectures = ()
    refused: Mapping[str, str] = {}
    cuts = WHOLE.name

    def read_config(self, data: dict[str, object], where: str) -> Config:
        raise CheckpointError(
            where, ["after how many layers it is cut is not in a checkpoint: say it when opening one"]
        )

    def read_cut(self, data: dict[str, object], where: str, layers: int) -> Config:
        return cut(WHOLE.read_config(data, where), layers, where)

    def processor(self, config: Config, files: Mapping[str, dict[str, object]], where: str) -> Qwen3VLProcessor:
        return WHOLE.processor(config.whole, files, where)

    def prompt(self, config: Config, tokenizer: Tokenizer, template: str | None) -> Qwen3VLPrompt:
        return WHOLE.prompt(config.whole, tokenizer, template)

    def entry_shape(self, config: Config) -> EntryShape:
        return WHOLE.entry_shape(config.whole)

    def weights(self, config: Config) -> WeightTable:
        from chiasm.models.qwen3_vl_conditioning.weights import weight_table

        return weight_table(config)

    def encoder(self, config: Config, *, device: torch.device, dtype: torch.dtype) -> Qwen3VLEncoder:
        return WHOLE.encoder(config.whole, device=device, dtype=dtype)

    def decoder(
        self, config: Config, *, device: torch.device, dtype: torch.dtype, projects: bool = False
    ) -> Qwen3VLConditioner:
        """`projects` changes nothing, as in the whole."""
        from chiasm.models.qwen3_vl_conditioning.text import Qwen3VLConditioner

        return Qwen3VLConditioner(config, device=device, dtype=dtype)


FAMILY = Qwen3VLConditioning()
