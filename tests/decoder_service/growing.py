"""Sequences that grow step by step in an engine: laid with random entries, and what the pools hold of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chiasm.chat_template import Slot
from decoder_service.engine import DecoderEngine
from decoder_service.laid import SizedSlot
from decoder_service.sequence import DecodeSequence

GRIDS = [(4, 4), (2, 6), (4, 6)]


def assert_close(got: Tensor, expected: Tensor) -> None:
    """FlashInfer merges what a prefill sees in float32, whatever the type."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def laid(engine: DecoderEngine, seed: int, *, text: int, frames: int) -> DecodeSequence:
    """A sequence of some text, some frames with random entries, and more text, none of it computed."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    sequence = engine.sequence()
    if frames:
        pieces: list[list[int] | int] = [piece for number in range(frames) for piece in ([80 + number, 3], number)]
        sequence.size(0, SizedSlot([*pieces, [88]], GRIDS[:frames], [float(i) for i in range(frames)], True))
        sequence.extend([[1, 2, 3], Slot(0)])
    sequence.extend([rng.integers(1, 80, text).tolist()])
    entry_shape = engine.half.entry_shape
    form = entry_shape.forms[0]
    for unit in sequence.timeline.units:
        shape = entry_shape.of(unit.layout.vision_tokens, form)
        engine.attach(sequence, unit.name, torch.randn(shape, generator=generator, dtype=torch.float64), form)
    return sequence


def kept(engine: DecoderEngine, sequence: DecodeSequence) -> Tensor:
    """What the self pool holds of a sequence, in the order of its rows."""
    size = engine.pages.page_size
    slots = [sequence.pages[row // size] * size + row % size for row in range(sequence.computed)]
    return engine.pools.self_kv[:, :, slots]
