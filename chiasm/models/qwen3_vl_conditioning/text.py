"""The decoder half of a Qwen3-VL that is cut after a layer: no last norm and no head, so that it has nothing to say."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from chiasm.models.qwen3_vl.text import Qwen3VLLayers
from chiasm.models.qwen3_vl_conditioning.config import Config


class Qwen3VLConditioner(Qwen3VLLayers):
    """`DecoderHalf` of which `states_after` is asked and nothing else. What else is called is called by mistake."""

    headed = False

    def __init__(self, config: Config, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config.whole, config.layers, device=device, dtype=dtype)

    def normed(self, states_me: Tensor) -> Tensor:
        raise _headless()

    def logits(self, states_me: Tensor) -> Tensor:
        raise _headless()

    def forward(self, *arguments: object) -> NoReturn:
        raise _headless()


def _headless() -> NotImplementedError:
    return NotImplementedError("it is cut: there is neither a last norm nor a head")
