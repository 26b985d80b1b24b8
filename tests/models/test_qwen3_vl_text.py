"""Qwen3-VL's decoder half, with pools and pages as a decoder has them, against transformers' own text model.

Features are drawn, not seen: what the encoder half makes of pixels is asked elsewhere. float32, within 1e-5 of the
largest logit; steps that begin and end anywhere give what one pass gives. Mistakes that such an implementation is known
to make are planted and seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from chiasm.attention.backend import Attention, SequenceRows, Step
from chiasm.attention.torch_backend import TorchAttention
from chiasm.cache.form import Form
from chiasm.chat_template import Slot
from chiasm.layers.rope import MultimodalRope
from chiasm.models.checkpoint import Checkpoint
from chiasm.models.family import Grid, Overlay
from chiasm.models.qwen3_vl.config import Config, read_config
from chiasm.models.qwen3_vl.processing import Qwen3VLProcessor
from chiasm.models.qwen3_vl.text import Qwen3VLDecoder
from chiasm.models.qwen3_vl.weights import weight_table
from chiasm.models.weights import load_half
from chiasm.timeline import UnitLayout, UnitName
from decoder_service.engine import DecoderEngine, Work
from decoder_service.laid import SizedSlot
from decoder_service.sequence import DecodeSequence
from tests.checkpoints_qwen3_vl import write

CLOSE = 1e-5

Part = Sequence[int] | Grid
"""Token ids in a list, or a unit's grid of patches."""

PROMPTS: dict[str, list[Part]] = {
    "text": [[5, 6, 7, 8, 9, 10]],
    "between": [[5, 6, 7], (4, 6), [8, 9, 10, 11]],
    "first": [(6, 4), [8, 9]],
    "last": [[5, 6], (2, 8)],
    "several": [[5], (4, 4), [1020, 1019], (2, 2), [6], (2, 10), [7, 8], (8, 2), [9, 10, 11]],
}


class Made(NamedTuple):
    """A kind of checkpoint."""

    seed: int
    taps: list[int]
    tied: bool

    def write(self, folder: Path) -> Path:
        vision = {"deepstack_visual_indexes": self.taps}
        return write(folder, seed=self.seed, vision=vision, tie_word_embeddings=self.tied)


KINDS = {
    "two taps": Made(0, [2, 0], False),
    "tied": Made(1, [0, 1, 3], True),
    "no taps": Made(2, [], False),
    "a tap to each layer": Made(3, [3, 2, 1, 0], True),
}


class World:
    """One checkpoint, opened by us and by transformers, and features for any unit."""

    def __init__(self, folder: Path, *, dtype: torch.dtype = torch.float32, deterministic: bool = False) -> None:
        from transformers import Qwen3VLForConditionalGeneration

        checkpoint = Checkpoint(folder)
        self.config: Config = read_config(checkpoint.config, "tiny")
        self.half = Qwen3VLDecoder(self.config, device=torch.device("cpu"), dtype=dtype)
        load_half(self.half, "decoder", weight_table(self.config), checkpoint.tensors)
        self.half.requires_grad_(False)
        processor = Qwen3VLProcessor.read(self.config, checkpoint.processor_files, "tiny")
        self.engine = DecoderEngine(
            self.half, processor, text_tokens=600, visual_tokens=200, page_size=4, deterministic=deterministic
        )
        for pool in (self.engine.pools.self_kv, self.engine.pools.features):
            pool.fill_(torch.nan)
        self.theirs: Any = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    def features(self, number: int, grid: Grid) -> Tensor:
        """What lies over a unit's placeholders, (tokens, width)."""
        generator = torch.Generator().manual_seed(number)
        tokens = grid[0] * grid[1] // self.config.vision.spatial_merge_size**2
        return torch.randn(tokens, self.config.entry_shape.hidden, generator=generator)

    def laid(self, parts: Sequence[Part]) -> DecodeSequence:
        """A sequence with everything attached. Slot i is part i."""
        sequence = self.engine.sequence()
        for slot, part in enumerate(parts):
            if isinstance(part, tuple):
                sequence.size(slot, SizedSlot([0], [part], [0.0], True))
                sequence.extend([Slot(slot)])
                payload = self.features(slot, part).to(self.half.dtype)
                self.engine.attach(sequence, UnitName(slot, 0), payload, Form.STATES)
            else:
                sequence.extend([part])
        return sequence

    def logits(self, parts: Sequence[Part], cut: int | None = None) -> Tensor:
        """(rows, vocabulary), computed `cut` rows at a time."""
        sequence, made = self.laid(parts), []
        while left := len(sequence.timeline) - sequence.computed:
            made += self.engine.step([Work(sequence, min(left, cut or left), "all")])
        self.engine.release(sequence)
        return torch.cat(made)

    @torch.inference_mode()
    def expected(self, parts: Sequence[Part]) -> Tensor:
        """The same by transformers, positions too."""
        merge, pad = self.config.vision.spatial_merge_size**2, self.config.image_token_id
        grids = [(slot, part) for slot, part in enumerate(parts) if isinstance(part, tuple)]
        ids: list[int] = []
        for part in parts:
            ids += [pad] * (part[0] * part[1] // merge) if isinstance(part, tuple) else part
        ids_1n = torch.tensor([ids])
        visual_1n = ids_1n == pad
        positions_31n, _ = self.theirs.model.get_rope_index(
            ids_1n,
            mm_token_type_ids=visual_1n.int(),
            image_grid_thw=torch.tensor([[1, *grid] for _, grid in grids]) if grids else None,
        )
        text = self.theirs.model.language_model
        embeds_1ne = text.embed_tokens(ids_1n)
        taps = None
        if grids:
            features = torch.cat([self.features(slot, grid) for slot, grid in grids])
            main, *taps = features.chunk(1 + self.config.taps, dim=-1)
            embeds_1ne[visual_1n] = main
        out = text(
            inputs_embeds=embeds_1ne,
            position_ids=positions_31n,
            visual_pos_masks=visual_1n,
            deepstack_visual_embeds=taps,
            use_cache=False,
        )
        logits: Tensor = self.theirs.lm_head(out.last_hidden_state)[0]
        return logits


def apart(got: Tensor, expected: Tensor) -> float:
    """The largest difference, in shares of the largest logit."""
    assert got.shape == expected.shape
    return ((got - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    made: Made = request.param
    return World(made.write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS["tied"].write(tmp_path_factory.mktemp("tied"))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_row_has_the_logits_that_transformers_gives_it(world: World, prompt: str) -> None:
    parts = PROMPTS[prompt]
    assert apart(world.logits(parts), world.expected(parts)) <= CLOSE


@pytest.mark.parametrize("cut", [1, 2, 5, 7])
def test_a_prefill_that_is_cut_inside_an_image_gives_what_one_pass_gives(world: World, cut: int) -> None:
    parts = PROMPTS["several"]
    assert apart(world.logits(parts, cut), world.logits(parts)) <= CLOSE


def test_sequences_in_one_step_hear_nothing_of_each_other(world: World) -> None:
    sequences = [world.laid(parts) for parts in PROMPTS.values()]
    got = world.engine.step([Work(one, len(one.timeline), "all") for one in sequences])
    for sequence, logits, parts in zip(sequences, got, PROMPTS.values(), strict=True):
        world.engine.release(sequence)
        assert apart(logits, world.logits(parts)) <= CLOSE


def test_states_are_what_the_head_makes_logits_of(world: World) -> None:
    ids, at = torch.tensor([5, 6, 7]), torch.tensor([0, 2])
    positions = torch.arange(3).expand(3, 3)
    attention = TorchAttention(world.engine.pools)
    attention.plan(Step([SequenceRows(0, 3, [0], np.zeros((3, 2), dtype=np.int64), [])]))
    with torch.inference_mode():
        depth = world.half.layers_total
        states = world.half.normed(world.half.states_after((depth,), ids, positions, None, at, attention)[0])
        logits = world.half.forward(ids, positions, None, at, attention)
        assert torch.equal(world.half.logits(states), logits)
        theirs = world.theirs.model.language_model(ids.unsqueeze(0), use_cache=False).last_hidden_state[0]
    assert states.shape == (2, world.config.text.hidden_size)
    assert apart(states, theirs[at]) <= CLOSE


def test_each_tap_makes_a_difference(folder: Path) -> None:
    """Otherwise the tests above would compare nothing with nothing."""
    world, parts = World(folder), PROMPTS["between"]
    logits = world.logits(parts)
    drawn = world.features
    width = world.config.text.hidden_size
    for level in range(1 + world.config.taps):

        def other(number: int, grid: Grid, level: int = level) -> Tensor:
            features = drawn(number, grid)
            features[:, level * width : (level + 1) * width] *= 0.5
            return features

        world.features = other  # type: ignore[method-assign]
        assert apart(world.logits(parts)[-1], logits[-1]) > 1e-3


def test_a_row_depends_on_no_other_in_any_bit_where_that_is_asked_for(folder: Path) -> None:
    world = World(folder, deterministic=True)
    whole = world.logits(PROMPTS["several"])
    for cut in (1, 3, 7):
        assert torch.equal(world.logits(PROMPTS["several"], cut), whole)


def test_bfloat16_stays_near(folder: Path) -> None:
    world, parts = World(folder, dtype=torch.bfloat16), PROMPTS["several"]
    expected = world.expected(parts)
    assert ((world.logits(parts) - expected).abs().mean() / expected.abs().max()).item() < 0.02


def test_a_tied_head_takes_no_memory_of_its_own(folder: Path) -> None:
    half = World(folder).half
    assert half.lm_head.weight is half.embed_tokens.weight
    assert "lm_head.weight" not in dict(half.named_parameters())


def test_features_of_another_width_are_refused_with_both_numbers(folder: Path) -> None:
    world = World(folder)
    attention = TorchAttention(world.engine.pools)
    overlay = Overlay(torch.tensor([0]), torch.zeros(1, 4 * 48 + 1))
    with pytest.raises(ValueError, match="193 wide, not 4 times 48"), torch.inference_mode():
        world.half.states_after((1,), torch.tensor([5]), torch.zeros(3, 1), None, torch.tensor([0]), attention, overlay)


def test_more_taps_than_layers_are_refused_with_both_numbers(folder: Path) -> None:
    config = World(folder).config
    fewer = replace(config, text=replace(config.text, num_hidden_layers=2))
    with pytest.raises(AssertionError, match="3 taps are for 2 layers"):
        Qwen3VLDecoder(fewer, device=torch.device("cpu"), dtype=torch.float32)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def planted(
    patch: pytest.MonkeyPatch,
    *,
    before: bool = False,
    rows: Callable[[Tensor, int], Tensor] = lambda rows_v, _: rows_v,
    order: Callable[[list[Tensor]], list[Tensor]] = lambda taps: taps,
) -> None:
    """The half's own arithmetic written out, with a mistake in it.

    Args:
        before: taps are added to what a layer takes, and not to what it gives.
        rows: to which rows they are added, of so many.
        order: that of the taps.
    """

    def states_after(
        self: Qwen3VLDecoder,
        layers: Sequence[int],
        ids_n: Tensor,
        positions_3n: Tensor,
        sees_n: Tensor | None,
        rows_at: Tensor,
        attention: Attention,
        overlay: Overlay | None = None,
    ) -> list[Tensor]:
        h_ne = self.embed_tokens(ids_n)
        taps: list[Tensor] = []
        if overlay is not None:
            main, *taps = overlay.features_vw.chunk(1 + self.taps, dim=-1)
            h_ne[overlay.rows_v] = main
        tables = self.rope.tables(positions_3n, h_ne.dtype)
        for layer, tap in zip(self.layers, [*order(taps), *[None] * (len(self.layers) - len(taps))], strict=True):
            added = torch.zeros_like(h_ne)
            if tap is not None and overlay is not None:
                added[rows(overlay.rows_v, len(ids_n))] = tap
            h_ne = layer(h_ne + added, *tables, attention) if before else layer(h_ne, *tables, attention) + added
        return [h_ne[rows_at]]

    patch.setattr(Qwen3VLDecoder, "states_after", states_after)


def no_mistake(patch: pytest.MonkeyPatch) -> None:
    planted(patch)


def taps_before_the_residual(patch: pytest.MonkeyPatch) -> None:
    planted(patch, before=True)


def taps_on_text_rows(patch: pytest.MonkeyPatch) -> None:
    planted(patch, rows=lambda rows_v, count: (rows_v + 1) % count)


def taps_reversed(patch: pytest.MonkeyPatch) -> None:
    planted(patch, order=lambda taps: taps[::-1])


def sections_one_after_another(patch: pytest.MonkeyPatch) -> None:
    made = MultimodalRope.__init__

    def init(self: MultimodalRope, dim: int, theta: float, section: Sequence[int], *, device: torch.device) -> None:
        made(self, dim, theta, section, device=device)
        self.axis = torch.arange(3).repeat_interleave(torch.tensor(section))

    patch.setattr(MultimodalRope, "__init__", init)


def laid(patch: pytest.MonkeyPatch, change: Callable[[UnitLayout], UnitLayout]) -> None:
    right = Qwen3VLProcessor.unit_layout
    patch.setattr(Qwen3VLProcessor, "unit_layout", lambda self, grid: change(right(self, grid)))


def counter_goes_on_by_every_token(patch: pytest.MonkeyPatch) -> None:
    laid(patch, lambda layout: replace(layout, advance=layout.vision_tokens))


def time_goes_on_within_an_image(patch: pytest.MonkeyPatch) -> None:
    laid(patch, lambda layout: replace(layout, placeholder_steps=layout.placeholder_steps[[1, 1, 2]]))


Plant = Callable[[pytest.MonkeyPatch], None]

MISTAKES: list[Plant] = [
    taps_before_the_residual,
    taps_on_text_rows,
    taps_reversed,
    sections_one_after_another,
    counter_goes_on_by_every_token,
    time_goes_on_within_an_image,
]


@pytest.mark.parametrize("plant", MISTAKES, ids=lambda plant: plant.__name__)
def test_a_mistake_is_seen(plant: Plant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    world, parts = World(folder), PROMPTS["several"]
    assert apart(world.logits(parts)[-1], world.expected(parts)[-1]) > 100 * CLOSE


def test_what_is_planted_is_no_mistake_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_mistake(monkeypatch)
    world, parts = World(folder), PROMPTS["several"]
    assert apart(world.logits(parts), world.expected(parts)) <= CLOSE
