"""A deterministic decoder: the logits of a request are the same bits whatever else is computed, however its prefill is
cut, wherever its keys lie, computed or found. What is compared differs where the mode is off, and a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.layers.mlp import GatedMLP
from chiasm.models.moss_vl.vision import MossVLEncoder
from chiasm.models.qwen3_vl.vision import Qwen3VLEncoder
from chiasm.models.registry import Model
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.settings import load
from decoder_service.engine import DecoderEngine, Work
from decoder_service.fixed_rows import SIZES, FixedRows, _cancelling, blocks
from decoder_service.settings import DecoderSettings
from tests import checkpoints_qwen3_vl, digits
from tests.checkpoints_tiny import config, write
from tests.decoder_service.halves import CLOSE, Halves, Told, halves, sized
from tests.decoder_service.test_attention import NEEDED
from tests.models.test_exact import GRIDS, Part, lay

DTYPES = [torch.float64, torch.float32, torch.bfloat16]

WIDE = {"hidden_size": 240, "intermediate_size": 701, "vocab_size": 501}
"""Layers whose products of 8 rows and of 16 differ in float32, and whose rows are no multiple of a vector register."""


def timelines(rng: np.random.Generator, count: int) -> list[list[Part]]:
    """Prompts of text and video, short and long, the first of them with more visual tokens than a block has."""

    def text(length: int) -> Part:
        return Part(text=tuple(rng.integers(0, 80, length).tolist()))

    def clip(frames: int) -> Part:
        return Part(frames=tuple(rng.integers(0, len(GRIDS), frames).tolist()))

    made = [[text(50), clip(32), text(30)], [text(170)], [text(1), clip(3), text(1)]]
    while len(made) < count:
        some = [text(int(rng.integers(1, 40)))]
        made.append([*some, clip(int(rng.integers(1, 5))), text(3)] if rng.integers(3) else some)
    return made[:count]


class World:
    """One model of some width, entries for its frames, and engines on it."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, deterministic: bool, overlaid: bool = False) -> None:
        vision = {"out_hidden_size": WIDE["hidden_size"]}
        if overlaid:
            text = {**WIDE, "vocab_size": 1031}
            self.model = Model(checkpoints_qwen3_vl.write(folder, checkpoints_qwen3_vl.config(text, vision)))
        else:
            self.model = Model(write(folder, config(WIDE, vision)))
        encoder = cast("MossVLEncoder | Qwen3VLEncoder", self.model.encoder(dtype=dtype))
        generator = torch.Generator().manual_seed(7)
        values = encoder.config.vision.patch_values
        patches = [torch.randn(rows * columns, values, generator=generator).to(dtype) for rows, columns in GRIDS]
        with torch.inference_mode():
            self.entries = encoder.encode_patches(torch.cat(patches), GRIDS, TorchVarlen())
        self.half = self.model.decoder(dtype=dtype)
        self.deterministic = deterministic

    def engine(self, rng: np.random.Generator) -> DecoderEngine:
        """With pools of NaN, free slots that lie scattered, and pages of any size in any order."""
        engine = DecoderEngine(
            self.half,
            self.model.processor,
            text_tokens=3000,
            visual_tokens=2000,
            page_size=int(rng.choice([1, 4, 16])),
            deterministic=self.deterministic,
        )
        engine.pools.self_kv.fill_(torch.nan)
        engine.pools.cross_kv.fill_(torch.nan)
        engine.pools.features.fill_(torch.nan)
        rng.shuffle(engine.pages._free)
        taken = []
        while engine.extents.free > 1000:
            taken.append(engine.extents.take(int(rng.integers(1, 30))))
        for runs in taken[:: int(rng.integers(2, 4))]:
            engine.extents.give_back(runs)
        return engine

    def run(self, prompts: Sequence[Sequence[Part]], rng: np.random.Generator, pieces: Sequence[int]) -> list[Tensor]:
        """(rows, vocabulary) logits of each prompt, in random steps of one engine."""
        return self.compute(self.engine(rng), prompts, rng, pieces)

    def compute(
        self, engine: DecoderEngine, prompts: Sequence[Sequence[Part]], rng: np.random.Generator, pieces: Sequence[int]
    ) -> list[Tensor]:
        """As `run`, in an engine that is empty."""
        sequences = [engine.sequence() for _ in prompts]
        for sequence, parts in zip(sequences, prompts, strict=True):
            for slot, part in enumerate(parts):
                lay(sequence, slot, part)
        places = [(i, unit.name) for i, sequence in enumerate(sequences) for unit in sequence.timeline.units]
        for i, name in (places[at] for at in rng.permutation(len(places))):
            entry = self.entries[prompts[i][name.slot].frames[name.unit]]
            engine.attach(sequences[i], name, entry, self.model.entry_shape.forms[0])
        logits: list[list[Tensor]] = [[] for _ in prompts]
        while left := [i for i, one in enumerate(sequences) if one.computed < len(one.timeline)]:
            some = rng.permutation(left)[: int(rng.integers(1, len(left) + 1))].tolist()
            works = []
            for i in some:
                rest = len(sequences[i].timeline) - sequences[i].computed
                works.append(Work(sequences[i], min(int(rng.choice(pieces)), rest), "all"))
            for i, told in zip(some, engine.step(works), strict=True):
                logits[i].append(told)
        return [torch.cat(told) for told in logits]


def differing(world: World, seed: int) -> list[int]:
    """Of 17 prompts, computed together in random steps and each alone in steps of one size, those whose logits
    differ."""
    rng = np.random.default_rng(seed)
    prompts = timelines(rng, 17)
    together = world.run(prompts, rng, [1, 1, 2, 9, 40, 300])
    found = []
    for i, prompt in enumerate(prompts):
        (alone,) = world.run([prompt], rng, [int(rng.choice([1, 5, 64, 1000]))])
        assert len(alone) == len(together[i]) and alone.isfinite().all()
        if not torch.equal(alone, together[i]):
            found.append(i)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_same_bits_alone_and_among_16_others_however_cut(tmp_path: Path, dtype: torch.dtype) -> None:
    world = World(tmp_path / "wide", dtype, deterministic=True)
    assert [differing(world, seed) for seed in range(2)] == [[], []]


def test_they_are_where_units_lie_over_placeholders(tmp_path: Path) -> None:
    world = World(tmp_path / "wide", torch.float32, deterministic=True, overlaid=True)
    assert not differing(world, 0)
    world.deterministic = False
    assert differing(world, 0), "what is compared shows it where the mode is off"


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_mode_they_differ(tmp_path: Path, dtype: torch.dtype) -> None:
    """So the test before this one can fail."""
    assert differing(World(tmp_path / "wide", dtype, deterministic=False), 0)


def test_logits_are_the_same_bits_with_two_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        world = World(tmp_path / "wide", torch.float32, deterministic=True)
        rng = np.random.default_rng(3)
        prompts = timelines(rng, 5)
        together = world.run(prompts, rng, [20, 300])
        for prompt, expected in zip(prompts, together, strict=True):
            (alone,) = world.run([prompt], rng, [1000])
            assert torch.equal(alone, expected)
    finally:
        torch.set_num_threads(before)


def test_logits_are_those_of_the_usual_mode_but_for_rounding(tmp_path: Path) -> None:
    world = World(tmp_path / "wide", torch.float64, deterministic=True)
    prompts = timelines(np.random.default_rng(1), 4)
    fixed = world.run(prompts, np.random.default_rng(2), [9, 40])
    world.deterministic = False
    usual = world.run(prompts, np.random.default_rng(2), [9, 40])
    for a, b in zip(fixed, usual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# -- rows in blocks ----------------------------------------------------------------------------------------------------


def test_blocks_hold_all_rows_once_and_are_half_full_at_least_but_for_the_last() -> None:
    for rows in range(600):
        made = blocks(rows, SIZES)
        assert [row for start, stop, _ in made for row in range(start, stop)] == [*range(rows)]
        assert all(stop - start == size for start, stop, size in made[:-1])
        assert all(size in SIZES and (2 * (stop - start) >= size or size == SIZES[0]) for start, stop, size in made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_sizes_that_agree(tmp_path: Path, dtype: torch.dtype) -> None:
    """Where no larger block agrees, blocks of the least size give the same."""
    world = World(tmp_path / "wide", dtype, deterministic=True)
    prompts = timelines(np.random.default_rng(1), 5)
    engine = world.engine(np.random.default_rng(2))
    assert isinstance(engine._forward, FixedRows) and len(engine._forward.sizes) > 1
    usual = world.compute(engine, prompts, np.random.default_rng(3), [40, 300])
    engine = world.engine(np.random.default_rng(2))
    cast(FixedRows, engine._forward).sizes = [SIZES[0]]
    least = world.compute(engine, prompts, np.random.default_rng(3), [40, 300])
    assert all(torch.equal(a, b) for a, b in zip(usual, least, strict=True))


@torch.inference_mode()
def test_equal_rows_of_a_block_are_equal_behind_an_mlp_whatever_its_width(tmp_path: Path) -> None:
    """What is left over of a vector register is another place too."""
    world = World(tmp_path / "wide", torch.float32, deterministic=True)
    world.engine(np.random.default_rng(0))
    (mlp, *_) = (part for part in cast(torch.nn.Module, world.half).modules() if isinstance(part, GatedMLP))
    for row in torch.randn(100, 1, WIDE["hidden_size"], generator=torch.Generator().manual_seed(0)):
        rows = mlp(row.expand(SIZES[0], -1).contiguous())
        assert torch.equal(rows, rows[:1].expand_as(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_rounding_alone_tells_another_order_of_its_sums(dtype: torch.dtype) -> None:
    """Ordinary numbers of bfloat16 hide it."""
    layer = torch.nn.Linear(1025, 300, bias=False, dtype=dtype)
    x, w = _cancelling(layer, torch.Generator().manual_seed(0))
    assert x.shape == (1, 1025) and w.shape == (300, 1025)
    assert not (x.double() @ w.double().T).abs().max() > 1e-9, "but for rounding it is zero"
    mixed = torch.randperm(1025)
    changed = F.linear(x.expand(16, -1)[:, mixed], w[:, mixed]) != F.linear(x.expand(16, -1), w)
    assert changed.float().mean() > 0.5


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass
class Drawn(Told):
    """What one call was told, with the log-probabilities of what was drawn: those tell the logits' last bits."""

    logprobs: list[float] = field(default_factory=list)

    def note(self, response: dpb.DecodeResponse) -> None:
        super().note(response)
        self.logprobs += [one.drawn.logprob for one in response.tokens.logprobs]


async def ask(system: Halves, number: int, ready: Sequence[dpb.DecodeReady]) -> tuple[list[int], list[float]]:
    """Question `number`, drawn at temperature 1; about some frames, or about none."""
    text = f"Question {number}: " + "what is it? " * (number % 5)
    about: list[str | int] = [0, "Read the digits."] if ready else []
    opened = system.opened(text, *about, max_tokens=24)
    opened.sampling.ignore_eos = True
    opened.sampling.temperature = 1.0
    opened.sampling.logprobs = 0
    opened.seed = number
    drawn = Drawn()
    async for response in system.decode(opened, *([sized(len(ready))] if ready else []), *ready, CLOSE):
        drawn.note(response)
    assert len(drawn.ids) == len(drawn.logprobs) == 24
    return drawn.ids, drawn.logprobs


async def alone_and_among_others(dtype: torch.dtype, *, deterministic: bool) -> tuple[list[object], list[object]]:
    """17 questions, each alone with nothing kept from another; and all at once, after some of them were asked already,
    in steps that cut their prompts."""
    rng = np.random.default_rng(5)
    cells = digits.held_out_digits()
    clips = [[digits.frame(cells[i * 7 + j][0], rng) for j in range(i % 4)] for i in range(17)]
    async with halves(dtype=dtype, max_rows=40, deterministic=deterministic) as system:

        async def one(i: int) -> object:
            return await ask(system, i, await system.ready(clips[i]) if clips[i] else [])

        alone = []
        for i in range(17):
            alone.append(await one(i))
            system.decoder.flush()
        for i in range(0, 17, 3):
            await one(i)
        counts = system.decoder.scheduler.counts
        before = counts.steps
        together = [*await asyncio.gather(*(one(i) for i in range(17)))]
        assert counts.steps - before < 17 * 24 / 2, "steps are shared"
    return alone, together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_request_is_answered_alike_alone_and_among_16_others(dtype: torch.dtype) -> None:
    alone, together = await alone_and_among_others(dtype, deterministic=True)
    assert alone == together
    alone, together = await alone_and_among_others(dtype, deterministic=False)
    assert alone != together, "what is compared shows it where the mode is off"


def test_a_decoder_is_told_by_a_flag() -> None:
    assert not load(DecoderSettings, NEEDED, program="decoder").deterministic
    assert load(DecoderSettings, [*NEEDED, "--deterministic"], program="decoder").deterministic
