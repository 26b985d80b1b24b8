"""A whole decoder half on a CUDA device: the logits that FlashInfer's kernels give are those that torch's give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chiasm.attention.choose import AttentionName
from chiasm.chat_template import Slot
from chiasm.models.registry import Model
from decoder_service.computing import attends
from decoder_service.engine import DecoderEngine, Work
from decoder_service.laid import SizedSlot
from decoder_service.sequence import DecodeSequence
from tests.checkpoints_tiny import config, write

GRIDS = [(4, 4), (2, 6), (4, 6), (2, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Eight query heads on two key heads of 64 dimensions."""
    text = {
        "num_attention_heads": 8,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "default", "mrope_section": [16, 8, 8], "mrope_interleaved": True},
    }
    return Model(write(tmp_path_factory.mktemp("tiny"), config(text), dtype=torch.bfloat16))


def run(model: Model, attention: AttentionName) -> list[Tensor]:
    """Logits of two timelines in mixed steps: a prefill in chunks beside single rows of the other one."""
    half = model.decoder(device=torch.device("cuda"), dtype=torch.bfloat16)
    engine = DecoderEngine(half, model.processor, text_tokens=400, visual_tokens=200, attention=attention)
    engine.pools.self_kv.fill_(torch.nan)
    engine.pools.cross_kv.fill_(torch.nan)
    generator = torch.Generator().manual_seed(5)
    long, short = engine.sequence(), engine.sequence()
    for sequence in (long, short):
        lay(engine, sequence, generator)
    out = [engine.step([Work(long, 7, "all"), Work(short, 12, "all")])]
    while long.computed < len(long.timeline):
        rows = min(5, len(long.timeline) - long.computed)
        out.append(engine.step([Work(long, rows, "all"), Work(short, 1, "all")]))
    out.append(engine.step([Work(short, 1, "all")]))
    assert attends(half, attention) == attention
    return [logits.cpu() for step in out for logits in step]


def lay(engine: DecoderEngine, sequence: DecodeSequence, generator: torch.Generator) -> None:
    """Text, four frames with text between them, text; and random entries attached."""
    pieces: list[list[int] | int] = []
    for number in range(len(GRIDS)):
        pieces += [[80 + number, 3], number]
    sequence.size(0, SizedSlot([*pieces, [88]], GRIDS, [0.0, 1.0, 2.0, 3.0], True))
    sequence.extend([[1, 2, 3], Slot(0), list(range(10, 30))])
    for unit in sequence.timeline.units:
        shape = engine.half.entry_shape.of(unit.layout.vision_tokens)
        engine.attach(sequence, unit.name, torch.randn(shape, generator=generator).to(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_mixed_steps_give_the_logits_of_torch(model: Model) -> None:
    """Both in bfloat16, whose rounding of four layers is what may differ."""
    for ours, torchs in zip(run(model, "flashinfer"), run(model, "torch"), strict=True):
        assert not ours.isnan().any()
        assert ((ours - torchs).abs().max() / torchs.abs().max()).item() < 0.05
