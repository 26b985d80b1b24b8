"""Decode steps that are replayed: the logits and the pools of eager ones, whoever joins and leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from chiasm.attention.backend import Step
from chiasm.attention.torch_backend import TorchAttention
from chiasm.models.registry import Model
from decoder_service.computing import make_forward
from decoder_service.engine import DecoderEngine, Work
from decoder_service.forward import EagerForward
from decoder_service.graphs import buckets
from decoder_service.sequence import DecodeSequence
from tests import checkpoints_qwen3_vl, checkpoints_tiny
from tests.decoder_service.growing import assert_close, kept, laid
from tests.decoder_service.played import Interpreted, Played

PAGE = 4
GRAPH_ROWS = 6


@pytest.fixture(scope="module", params=[checkpoints_tiny.write, checkpoints_qwen3_vl.write], ids=["apart", "overlaid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One of each kind of entry: units that layers attend to apart from the text, and such as lie over placeholders."""
    return Model(request.param(tmp_path_factory.mktemp("tiny")))


def kinds(model: Model) -> int:
    """Graphs of one bucket: with layers that attend to units, if there are such, and without."""
    return 1 if model.entry_shape.overlaid else 2


def units(engine: DecoderEngine) -> torch.Tensor:
    """What the visual pool holds, slots before the last axis."""
    overlaid = engine.half.entry_shape.overlaid
    return engine.pools.features if overlaid else engine.pools.cross_kv


apart = pytest.mark.parametrize("model", [checkpoints_tiny.write], ids=["apart"], indirect=True)
overlaid = pytest.mark.parametrize("model", [checkpoints_qwen3_vl.write], ids=["overlaid"], indirect=True)


Make = Callable[[Interpreted | None], DecoderEngine]


@pytest.fixture
def make(model: Model) -> Make:
    """Engines in float64, where the sums of another batch differ by nothing that matters. What nobody has written is
    NaN. Without graphs they are eager, on torch's kernels."""

    def made(graphs: Interpreted | None) -> DecoderEngine:
        engine = DecoderEngine(
            model.decoder(dtype=torch.float64),
            model.processor,
            text_tokens=60 * PAGE,
            visual_tokens=200,
            page_size=PAGE,
            graph_rows=GRAPH_ROWS if graphs else 0,
            forward=graphs or make_forward,
        )
        engine.pools.self_kv[:, :, : 60 * PAGE] = torch.nan
        units(engine)[..., :200, :] = torch.nan
        return engine

    return made


def prefilled(engines: Sequence[DecoderEngine], seed: int, *, text: int = 5, frames: int = 0) -> list[DecodeSequence]:
    """The same sequence in each engine, computed but for its last row."""
    made = [laid(engine, seed, text=text, frames=frames) for engine in engines]
    for engine, sequence in zip(engines, made, strict=True):
        engine.step([Work(sequence, len(sequence.timeline) - 1, "none")])
    return made


def decode(engines: Sequence[DecoderEngine], batch: Sequence[Sequence[DecodeSequence]]) -> None:
    """A decode step of the same sequences in each engine. Holds logits and pools of the others against the first's,
    then draws the first's best tokens in all of them."""
    steps = [engine.step([Work(each[at], 1, "last") for each in batch]) for at, engine in enumerate(engines)]
    for expected, *others in zip(*steps, strict=True):
        for logits in others:
            assert_close(logits, expected)
    for each in batch:
        for engine, sequence in list(zip(engines, each, strict=True))[1:]:
            assert_close(kept(engine, sequence), kept(engines[0], each[0]))
    for each, logits in zip(batch, steps[0], strict=True):
        token = int(logits[-1].argmax()) % 80  # no pads
        for sequence in each:
            sequence.extend([[token]])


def test_buckets_are_small_steps_for_few_rows_and_eights_for_many() -> None:
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(8) == [1, 2, 4, 8]
    assert buckets(36) == [1, 2, 4, 8, 16, 24, 32, 36]


@pytest.mark.parametrize("prepared", [False, True])
def test_sequences_that_grow_join_and_leave_get_the_logits_and_pools_of_eager_steps(
    model: Model, make: Make, prepared: bool
) -> None:
    graphs = Interpreted()
    engines = [make(None), make(graphs)]
    if prepared:
        engines[1].prepare()
        assert graphs.device.captured == kinds(model) * len(buckets(GRAPH_ROWS))
    rng = np.random.default_rng(0)
    running: list[list[DecodeSequence]] = []
    steps = graphs.forward.replayed
    for seed in range(40):
        if not running or (len(running) < GRAPH_ROWS and rng.random() < 0.35):
            running.append(prefilled(engines, seed, text=int(rng.integers(2, 9)), frames=int(rng.integers(4))))
        decode(engines, running)
        steps += 1
        if rng.random() < 0.2:
            for engine, sequence in zip(engines, running.pop(int(rng.integers(len(running)))), strict=True):
                engine.release(sequence)
    assert graphs.forward.replayed == steps, "every decode step was replayed"
    assert graphs.device.captured <= kinds(model) * len(buckets(GRAPH_ROWS))
    if not model.entry_shape.overlaid:
        assert not engines[1].pools.cross_kv[:, :, :, -1].any(), "the spare slot is as it was"


@apart
def test_the_wrappers_are_one_for_each_use_of_each_bucket(make: Make) -> None:
    graphs = Interpreted()
    engine = make(graphs)
    before = len(graphs.kernels.wrappers)
    engine.prepare()
    made = len(graphs.kernels.wrappers)
    assert made - before == 2 * len(buckets(GRAPH_ROWS))
    engine.prepare()
    assert (len(graphs.kernels.wrappers), graphs.device.captured) == (made, made - before)


def test_nothing_is_taken_of_the_pools_to_prepare(make: Make) -> None:
    engine = make(Interpreted())
    engine.prepare()
    assert engine.pages.free == engine.pages.total and engine.extents.free == engine.extents.total
    assert engine.pools.self_kv[:, :, : 60 * PAGE].isnan().all() and units(engine)[..., :200, :].isnan().all()


@apart
def test_text_alone_is_replayed_without_the_cross_layers(make: Make) -> None:
    graphs = Interpreted()
    engines = [make(None), make(graphs)]
    text = prefilled(engines, 1)
    decode(engines, [text])
    assert {kind for kind, _ in graphs.kernels.calls[-2:]} == {"decode"}
    decode(engines, [text, prefilled(engines, 2, frames=2)])
    assert {kind for kind, _ in graphs.kernels.calls[-4:]} == {"decode", "prefill"}
    assert graphs.device.captured == 2


@apart
def test_rows_that_look_at_the_same_slots_are_one_part_wherever_they_stand(make: Make) -> None:
    """Three questions about one video between others, as `Holdings` lets them share its slots."""
    graphs = Interpreted()
    engine = make(graphs)
    asked = [laid(engine, seed, text=4, frames=frames) for seed, frames in enumerate([2, 0, 2, 1, 2])]
    engine.step([Work(sequence, len(sequence.timeline) - 1, "none") for sequence in asked])
    engine.holdings.grow((sequence, 1) for sequence in asked)
    rows = [sequence.rows(1) for sequence in asked]
    rows = [replace(one, extents=rows[0].extents) if at in (2, 4) else one for at, one in enumerate(rows)]
    ids = [sequence.timeline.ids(sequence.computed, sequence.computed + 1)[0] for sequence in asked]
    positions = np.concatenate(
        [sequence.timeline.positions(sequence.computed, sequence.computed + 1) for sequence in asked], axis=1
    )
    eager = EagerForward(engine.half, TorchAttention(engine.pools))
    with torch.inference_mode():
        expected = eager(Step(rows), ids, positions, range(5))
        assert_close(graphs.forward(Step(rows), ids, positions, range(5)), expected)
    parts = next(parts for kind, parts in reversed(graphs.kernels.calls) if kind == "prefill")
    tokens = [unit.layout.vision_tokens for unit in asked[0].timeline.units]
    assert sorted(parts) == sorted([(3, sum(tokens)), (1, tokens[0]), (2, 1), *[(0, 1)] * 3])


def test_what_is_no_decode_step_is_computed_eagerly(make: Make) -> None:
    graphs = Interpreted()
    engines = [make(None), make(graphs)]
    sequences = [prefilled(engines, seed, frames=seed % 3) for seed in range(GRAPH_ROWS + 1)]
    decode(engines, sequences)
    assert graphs.forward.replayed == 0, "more rows than the largest bucket"
    fresh = [laid(engine, 50, text=4, frames=1) for engine in engines]
    mixed = [
        engine.step([Work(one, 3, "last"), Work(other, 1, "last")])
        for engine, one, other in zip(engines, fresh, sequences[0], strict=True)
    ]
    for got, expected in zip(mixed[1], mixed[0], strict=True):
        assert_close(got, expected)
    for engine, sequence in zip(engines, sequences[1], strict=True):
        assert engine.step([Work(sequence, 1, "none")])[0].shape == (0, engine.half.vocab_size)
    states = [
        engine.step([Work(one, 1, "last", states=True), Work(other, 1, "last")])
        for engine, one, other in zip(engines, *sequences[4:6], strict=True)
    ]
    for got, expected in zip(states[1], states[0], strict=True):
        assert_close(got, expected)
    assert graphs.forward.replayed == 0 and graphs.device.captured == 0
    decode(engines, sequences[2:4])
    assert graphs.forward.replayed == 1, "and decode steps are replayed beside all that"


@overlaid
def test_a_step_with_a_placeholder_among_its_rows_is_computed_eagerly(make: Make) -> None:
    """Also where every sequence adds one row: a prompt may be cut inside an image, or end with it."""
    graphs = Interpreted()
    engines = [make(None), make(graphs)]
    beside = prefilled(engines, 7)
    within = [laid(engine, 8, text=3, frames=2) for engine in engines]
    unit = within[0].timeline.units[1]
    for engine, one in zip(engines, within, strict=True):
        engine.step([Work(one, unit.index - 1, "none")])
    eager = 0
    while within[0].computed < len(within[0].timeline):
        row = within[0].computed
        steps = [
            engine.step([Work(one, 1, "last"), Work(other, 1, "last")])
            for engine, one, other in zip(engines, within, beside, strict=True)
        ]
        for got, expected in zip(steps[1], steps[0], strict=True):
            assert_close(got, expected)
        eager += unit.index <= row < unit.end_index
        assert graphs.forward.replayed == row + 1 - (unit.index - 1) - eager
        for one in beside:
            one.extend([[5]])
    assert eager == unit.layout.vision_tokens
    for engine, one in zip(engines, within, strict=True):
        assert_close(kept(engine, one), kept(engines[0], within[0]))


def test_more_pages_than_the_tables_hold_are_attended_to_eagerly(make: Make) -> None:
    graphs = Interpreted(largest_table=GRAPH_ROWS + 4)
    engines = [make(None), make(graphs)]
    sequence = prefilled(engines, 3, text=12)
    for _ in range(8):
        decode(engines, [sequence])
    assert graphs.forward.replayed == 16 - 11, "as long as the sequence has four pages"


def test_a_step_that_is_replayed_lets_its_copies_be_done_before_the_next_writes_over_them(make: Make) -> None:
    graphs = Interpreted()
    engines = [make(None), make(graphs)]
    sequence = prefilled(engines, 4)
    for _ in range(3):
        decode(engines, [sequence])
    assert graphs.device.log == ["wait", "mark", "capture", "replay", *["wait", "mark", "replay"] * 2]


def test_logits_of_one_step_outlive_the_next(make: Make) -> None:
    engine = make(Interpreted())
    sequence = laid(engine, 1, text=6, frames=0)
    engine.step([Work(sequence, 4, "none")])
    (first,) = engine.step([Work(sequence, 1, "last")])
    before = first.clone()
    engine.step([Work(sequence, 1, "last")])
    assert torch.equal(first, before)


@pytest.mark.parametrize("captures", [0, 1])
def test_a_capture_that_fails_is_told_once_and_fails_no_step(
    model: Model, make: Make, captures: int, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = Interpreted(Played(captures))
    engines = [make(None), make(graphs)]
    text, seeing = prefilled(engines, 5), prefilled(engines, 6, frames=2)
    with caplog.at_level(logging.WARNING):
        for batch in ([text], [text], [seeing], [text, seeing], [text]):
            decode(engines, batch)
    (told,) = caplog.records
    assert "not captured" in told.message and told.exc_info is not None
    assert "capturing" in str(told.exc_info[1])
    # The graph of one row is of text alone, or of what sees units that lie over placeholders too.
    assert graphs.forward.replayed == (captures and 4 - kinds(model)), "nothing is replayed any more"
    engines[1].prepare()
    assert graphs.device.captured == captures


def test_buffers_for_which_there_is_no_memory_fail_no_step(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    graphs = Interpreted()
    engines = [make(None), make(graphs)]

    def none_left(**given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs.kernels.BatchPrefillWithPagedKVCacheWrapper = none_left  # type: ignore[assignment]
    sequence = prefilled(engines, 5)
    for _ in range(2):
        decode(engines, [sequence])
    assert len(caplog.records) == 1 and graphs.forward.replayed == 0


def test_a_token_that_is_not_finite_spoils_nobody_else(make: Make) -> None:
    graphs = Interpreted()
    engine = make(graphs)
    with torch.inference_mode():
        engine.half.get_parameter("embed_tokens.weight")[7] = torch.nan  # type: ignore[attr-defined]
    good = [laid(engine, seed, text=5, frames=seed % 3) for seed in range(3)]
    bad = engine.sequence()
    bad.extend([[1, 7]])
    engine.step([Work(sequence, len(sequence.timeline) - 1, "none") for sequence in (*good, bad)])
    *fine, spoilt = engine.step([Work(sequence, 1, "last") for sequence in (*good, bad)])
    assert spoilt.isnan().all() and all(logits.isfinite().all() for logits in fine)
    for sequence in good:
        sequence.extend([[4]])
    assert all(logits.isfinite().all() for logits in engine.step([Work(sequence, 1, "last") for sequence in good]))
    assert graphs.forward.replayed == 2
    assert engine.pools.self_kv[:, :, 60 * PAGE].isfinite().all(), "it is nobody's row afterwards"


def test_an_engine_on_a_cpu_takes_no_graphs_and_serves(model: Model) -> None:
    """Where FlashInfer cannot serve, rows for graphs are asked for in vain."""
    engine = DecoderEngine(
        model.decoder(dtype=torch.float32), model.processor, text_tokens=64, visual_tokens=64, graph_rows=4
    )
    engine.prepare()
    sequence = laid(engine, 1, text=3, frames=0)
    (logits,) = engine.step([Work(sequence, 3, "last")])
    assert logits.isfinite().all()
