"""Decode steps as CUDA graphs on a CUDA device: what eager steps give, with the same kernels, and no memory beside.

The shipped checkpoint's heads have 32 dimensions, for which FlashInfer has no kernels; so the models are small random
ones. Ids are those that the eager steps draw, in both: a graph's are held against them where they are no near tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from chiasm.models.registry import Model
from decoder_service.engine import DecoderEngine, Work
from decoder_service.sequence import DecodeSequence
from tests.checkpoints_tiny import config, write
from tests.gpu.test_flashinfer_model import lay

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GRAPH_ROWS = 12
CLOSE = 0.05
"""Of the largest logit: four layers' rounding to bfloat16, whose sums are split otherwise."""

SHAPES = {"groups of four": (8, 2, 64, [16, 8, 8]), "groups of two": (4, 2, 128, [32, 16, 16])}
"""Query heads, key heads, dimensions, sections: decode kernels of tiles, and those without."""


def model(folder: Path, shape: str) -> Model:
    heads, kv_heads, dim, section = SHAPES[shape]
    text = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rope_scaling": {"rope_type": "default", "mrope_section": section, "mrope_interleaved": True},
    }
    return Model(write(folder / "tiny", config(text), dtype=torch.bfloat16))


def engine(of: Model, *, graph_rows: int, compiled: bool = False) -> DecoderEngine:
    """What nobody has written is NaN."""
    half = of.decoder(device=torch.device("cuda"), dtype=torch.bfloat16)
    made = DecoderEngine(
        half,
        of.processor,
        text_tokens=4096,
        visual_tokens=1000,
        attention="flashinfer",
        graph_rows=graph_rows,
        compiled=compiled,
    )
    made.pools.self_kv[:, :, :4096] = torch.nan
    made.pools.cross_kv[:, :, :, :1000] = torch.nan
    return made


def begun(engines: Sequence[DecoderEngine], seed: int, *, frames: bool) -> list[DecodeSequence]:
    """The same sequence in each engine, computed but for its last row."""
    made = []
    for one in engines:
        sequence = one.sequence()
        if frames:
            lay(one, sequence, torch.Generator().manual_seed(seed))
        sequence.extend([[1 + (seed * 7 + at) % 79 for at in range(3 + seed % 5)]])
        one.step([Work(sequence, len(sequence.timeline) - 1, "none")])
        made.append(sequence)
    return made


def decode(engines: Sequence[DecoderEngine], batch: Sequence[Sequence[DecodeSequence]]) -> None:
    eager, graph = (
        torch.cat(one.step([Work(each[at], 1, "last") for each in batch])).cpu() for at, one in enumerate(engines)
    )
    assert graph.isfinite().all()
    largest = eager.abs().max()
    assert (graph - eager).abs().max() < CLOSE * largest
    best, second = eager.topk(2).values.T
    sure = best - second > 2 * CLOSE * largest
    ids = eager.argmax(-1)
    assert torch.equal(graph.argmax(-1)[sure], ids[sure])
    for each, token in zip(batch, ids.tolist(), strict=True):
        for sequence in each:
            sequence.extend([[token % 80]])  # no pads


@pytest.mark.parametrize("shape", SHAPES)
def test_sixty_four_steps_are_those_of_eager_kernels_whoever_joins_and_leaves(shape: str, tmp_path: Path) -> None:
    of = model(tmp_path, shape)
    hold([engine(of, graph_rows=0), engine(of, graph_rows=GRAPH_ROWS)])


@pytest.mark.timeout(600)
def test_compiled_forwards_give_the_same_eagerly_and_in_graphs(tmp_path: Path) -> None:
    of = model(tmp_path, "groups of four")
    for graph_rows in (0, GRAPH_ROWS):
        hold([engine(of, graph_rows=0), engine(of, graph_rows=graph_rows, compiled=True)])


def hold(engines: Sequence[DecoderEngine]) -> None:
    """Holds sixty-four steps of the second engine against those of the first, while sequences join and leave."""
    engines[1].prepare()
    running = [begun(engines, 0, frames=False)]
    for at in range(64):
        if at % 4 == 3 and len(running) < GRAPH_ROWS:
            running.append(begun(engines, at, frames=at % 8 == 3))
        decode(engines, running)
        if at % 13 == 12:
            for one, sequence in zip(engines, running.pop(0), strict=True):
                one.release(sequence)
    assert not engines[1].pools.cross_kv[:, :, :, -1].any()


def test_steps_that_are_not_waited_for_do_not_write_over_each_others_copies(tmp_path: Path) -> None:
    """A hundred steps of tokens that are known before, begun one after another; then the same once more, one by one."""
    of = model(tmp_path, "groups of four")
    taken = []
    for waits in (False, True):
        one = engine(of, graph_rows=GRAPH_ROWS)
        one.prepare()
        (sequence,) = begun([one], 3, frames=True)
        sequence.extend([[1 + at % 79 for at in range(100)]])
        logits = []
        for _ in range(100):
            logits += one.step([Work(sequence, 1, "last")])
            if waits:
                torch.cuda.synchronize()
        taken.append(torch.cat(logits).cpu())
    assert torch.equal(*taken)


def test_a_thousand_replays_take_no_memory(tmp_path: Path) -> None:
    one = engine(model(tmp_path, "groups of four"), graph_rows=GRAPH_ROWS)
    one.prepare()
    sequences = [begun([one], seed, frames=seed < 2)[0] for seed in range(3)]

    def steps(count: int) -> int:
        for _ in range(count):
            logits = one.step([Work(sequence, 1, "last") for sequence in sequences])
            for sequence, row in zip(sequences, logits, strict=True):
                sequence.extend([[int(row.argmax()) % 80]])
        del logits
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    assert steps(20) == steps(1000)


def test_a_capture_that_fails_leaves_a_decoder_that_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured waits for the device, which no capture may."""
    of = model(tmp_path, "groups of four")
    engines = [engine(of, graph_rows=0), engine(of, graph_rows=GRAPH_ROWS)]
    forward = engines[1].half.forward

    def waiting(*args: object) -> torch.Tensor:
        out = forward(*args)  # type: ignore[arg-type]
        out.sum().item()
        return out

    monkeypatch.setattr(engines[1].half, "forward", waiting)
    sequence = begun(engines, 1, frames=True)
    for _ in range(3):
        decode(engines, [sequence])
