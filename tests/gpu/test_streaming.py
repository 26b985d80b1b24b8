"""Blocks that are streamed to a CUDA device compute there what resident ones do, and its memory is bounded by them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from chiasm.attention.choose import varlen
from chiasm.models.carrying import Copied
from chiasm.models.family import DecoderHalf, EncoderHalf
from chiasm.models.forms import payloads
from chiasm.models.registry import Model
from chiasm.models.residence import Residence
from chiasm.models.streaming import Streaming
from decoder_service.engine import DecoderEngine, Work
from tests import checkpoints_qwen3_vl
from tests.models.test_families import FRAMES, TINY

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CUDA = torch.device("cuda")
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "head_dim": 64}


def made(model: Model, streaming: Streaming | None) -> tuple[EncoderHalf, DecoderHalf]:
    of = {"device": CUDA, "dtype": torch.bfloat16}
    return model.encoder(**of, streaming=streaming), model.decoder(**of, streaming=streaming)  # type: ignore[arg-type]


@torch.inference_mode()
def encoded(half: EncoderHalf, model: Model) -> list[Tensor]:
    form = model.entry_shape.forms[0]
    attention = varlen(CUDA, torch.bfloat16, head_dim=half.head_dim)
    return [entry.cpu() for entry in payloads(half, [f.to(CUDA) for f in FRAMES], [form] * len(FRAMES), attention)]


def spoken(half: DecoderHalf, model: Model, steps: int = 6) -> list[Tensor]:
    """Logits of a prefill and of steps behind it, of which the host asks without waiting for any."""
    engine = DecoderEngine(half, model.processor, text_tokens=512, visual_tokens=64, attention="torch")
    sequence = engine.sequence()
    sequence.extend([[*range(1, 65)]])
    logits = engine.step([Work(sequence, 64, "last")])
    for token in range(steps):
        sequence.extend([[token + 1]])
        logits += engine.step([Work(sequence, 1, "last")])
    engine.release(sequence)
    return [one.cpu() for one in logits]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("pin_memory", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("blocks", [2, 3, 100])
@pytest.mark.parametrize("family", sorted(TINY))
def test_streamed_halves_give_the_same_bits(family: str, blocks: int, pin_memory: bool, tmp_path: Path) -> None:
    model = Model(TINY[family](tmp_path / "tiny"))
    resident = made(model, None)
    entries, logits = encoded(resident[0], model), spoken(resident[1], model)
    streamed = made(model, Streaming(blocks, pin_memory))
    for _ in range(3):
        assert same(encoded(streamed[0], model), entries) and same(spoken(streamed[1], model), logits)
    for half in (*streamed, *resident):
        Residence.of(half).offload()
        assert all(bool(p.isnan().all()) for p in cast(nn.Module, half).parameters())
        Residence.of(half).load()
    assert same(encoded(streamed[0], model), entries) and same(spoken(streamed[1], model), logits)
    assert same(encoded(resident[0], model), entries) and same(spoken(resident[1], model), logits)


def test_the_device_holds_the_rooms_and_what_is_outside_and_nothing_once_offloaded(tmp_path: Path) -> None:
    """Blocks large enough for a copy to take longer than the block before it computes: what overtakes it is wrong."""
    model = Model(checkpoints_qwen3_vl.write(tmp_path / "tiny", text=LARGE, vision={"out_hidden_size": 1024}))
    logits = spoken(made(model, None)[1], model)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    half = model.decoder(device=CUDA, dtype=torch.bfloat16, streaming=Streaming(resident_blocks=2))
    (layers,) = Residence.of(half).streamed
    block = layers.kept[0].nbytes
    held = torch.cuda.memory_allocated() - before
    outside = sum(p.nbytes for name, p in cast(nn.Module, half).named_parameters() if not name.startswith("layers."))
    assert held <= outside + 2 * block + (1 << 20) < outside + 12 * block
    for _ in range(3):
        assert same(spoken(half, model), logits)
    Residence.of(half).offload()
    assert torch.cuda.memory_allocated() - before <= 1 << 20
    Residence.of(half).load()
    assert same(spoken(half, model), logits)


def test_pinned_memory_is_as_large_as_it_is_asked_for_and_is_given_back() -> None:
    carrier = Copied(CUDA)
    for _ in range(3):  # what was not unlocked could not be locked again at the same place
        one, other = carrier.keep([(1 << 20) + 5, 3])
        one.fill_(7)
        other.copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
        assert one.is_pinned() and other.is_pinned() and one.data_ptr() % 64 == other.data_ptr() % 64 == 0
        room = carrier.room(1 << 21)
        assert bool((carrier.fetch(one, room)() == 7).all())
        assert carrier.fetch(other, room)().tolist() == [1, 2, 3]
        del one, other
