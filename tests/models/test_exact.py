"""However a timeline comes to be computed, its logits are those of one pass over it.

Cut, overlapped, growing, batched or taken back: each way is drawn at random and compared with a single prefill of the
final timeline with everything attached. float32, within 1e-5 of the largest logit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.chat_template import Slot
from chiasm.models.moss_vl.vision import MossVLEncoder
from chiasm.models.registry import Model
from chiasm.timeline import UnitName
from decoder_service.engine import DecoderEngine, Work
from decoder_service.laid import SizedSlot
from decoder_service.sequence import DecodeSequence
from tests.checkpoints_tiny import write

CLOSE = 1e-5

GRIDS = [(2, 2), (4, 4), (2, 6), (6, 2), (4, 6)]
"""Grids of the frames that timelines are drawn from."""

few = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Part:
    """A piece of a drawn timeline: text, or a medium with the frames it has and text between them."""

    text: tuple[int, ...] = ()
    frames: tuple[int, ...] = ()

    def sized(self, frames: int | None = None, *, final: bool = True) -> SizedSlot:
        """The medium's units, or the first `frames` of them."""
        used = self.frames[:frames]
        pieces: list[list[int] | int] = []
        for unit in range(len(used)):
            pieces += [[80 + unit % 8], unit]
        return SizedSlot([*pieces, [88]], [GRIDS[f] for f in used], [float(u) for u in range(len(used))], final)


texts = st.lists(st.integers(0, 79), min_size=1, max_size=5).map(lambda ids: Part(text=tuple(ids)))
media = st.lists(st.integers(0, len(GRIDS) - 1), min_size=1, max_size=3).map(lambda own: Part(frames=tuple(own)))
timelines = st.lists(texts | media, min_size=2, max_size=6).map(lambda parts: [*parts, Part(text=(1, 2, 3))])


class World:
    """One tiny model, an entry per frame, and an engine that all sequences of a test share."""

    def __init__(self, folder: Path) -> None:
        model = Model(write(folder))
        encoder = cast(MossVLEncoder, model.encoder())
        generator = torch.Generator().manual_seed(7)
        patches = [torch.randn(rows * columns, 48, generator=generator) for rows, columns in GRIDS]
        with torch.inference_mode():
            self.entries = encoder.encode_patches(torch.cat(patches), GRIDS, TorchVarlen())
        self.engine = DecoderEngine(model.decoder(), model.processor, text_tokens=600, visual_tokens=400, page_size=4)
        self.engine.pools.self_kv.fill_(torch.nan)
        self.engine.pools.cross_kv.fill_(torch.nan)

    def attach(self, sequence: DecodeSequence, parts: Sequence[Part], name: UnitName) -> None:
        self.engine.attach(sequence, name, self.entries[parts[name.slot].frames[name.unit]])

    def waiting(self, sequence: DecodeSequence) -> list[UnitName]:
        """Units laid and not attached."""
        return [unit.name for unit in sequence.timeline.units if not sequence.attached(unit.name)]

    def attach_all(self, sequence: DecodeSequence, parts: Sequence[Part]) -> None:
        for name in self.waiting(sequence):
            self.attach(sequence, parts, name)

    def compute(self, sequence: DecodeSequence, rows: int, logits: Literal["none", "last", "all"] = "all") -> Tensor:
        return self.engine.step([Work(sequence, rows, logits)])[0]

    def rest(self, sequence: DecodeSequence) -> Tensor:
        return self.compute(sequence, sequence.ready_rows - sequence.computed)

    @contextmanager
    def laid(self, parts: Sequence[Part] = ()) -> Iterator[DecodeSequence]:
        """A sequence with everything laid and sized, nothing attached. Slot i is part i."""
        sequence = self.engine.sequence()
        try:
            for slot, part in enumerate(parts):
                lay(sequence, slot, part)
            yield sequence
        finally:
            self.engine.release(sequence)

    def one_pass(self, parts: Sequence[Part]) -> Tensor:
        """(rows, vocabulary) logits of a single prefill."""
        with self.laid(parts) as sequence:
            self.attach_all(sequence, parts)
            assert sequence.ready_rows == len(sequence.timeline)
            return self.rest(sequence)


def lay(sequence: DecodeSequence, slot: int, part: Part, sized: SizedSlot | None = None) -> None:
    """Lays a part; a medium with its own units unless `sized` says otherwise."""
    if part.frames:
        sequence.size(slot, sized or part.sized())
    sequence.extend([Slot(slot) if part.frames else list(part.text)])


def same(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert ((got - expected).abs().max() / expected.abs().max()).item() <= CLOSE


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _nothing_is_kept(world: World) -> Iterator[None]:
    yield
    assert world.engine.pages.free == world.engine.pages.total
    assert world.engine.extents.free == world.engine.extents.total


# -- the ways ----------------------------------------------------------------------------------------------------------


@few
@given(parts=timelines, cuts=st.lists(st.integers(1, 9), min_size=30, max_size=30))
def test_any_cut_of_a_prefill(world: World, parts: list[Part], cuts: list[int]) -> None:
    chunks = []
    with world.laid(parts) as sequence:
        world.attach_all(sequence, parts)
        for cut in cuts:
            if rows := min(cut, len(sequence.timeline) - sequence.computed):
                chunks.append(world.compute(sequence, rows))
        if sequence.computed < len(sequence.timeline):
            chunks.append(world.rest(sequence))
    same(torch.cat(chunks), world.one_pass(parts))


@few
@given(parts=timelines, data=st.data())
def test_any_order_in_which_units_become_ready(world: World, parts: list[Part], data: st.DataObject) -> None:
    chunks = []
    with world.laid(parts) as sequence:
        for name in [None, *data.draw(st.permutations(world.waiting(sequence)))]:
            if name is not None:
                world.attach(sequence, parts, name)
            if data.draw(st.booleans()) and sequence.ready_rows > sequence.computed:
                chunks.append(world.rest(sequence))
        if sequence.computed < len(sequence.timeline):
            chunks.append(world.rest(sequence))
    same(torch.cat(chunks), world.one_pass(parts))


@few
@given(parts=timelines, data=st.data())
def test_any_growth(world: World, parts: list[Part], data: st.DataObject) -> None:
    """Text and frames arrive while rows are computed, frames are attached when they happen to be ready."""
    chunks, next_part = [], 0
    with world.laid() as sequence:
        while next_part < len(parts) or sequence.computed < len(sequence.timeline):
            waiting, ready = world.waiting(sequence), sequence.ready_rows - sequence.computed
            moves = ["grow"] * (next_part < len(parts)) + ["attach"] * bool(waiting) + ["compute"] * bool(ready)
            move = data.draw(st.sampled_from(moves))
            if move == "grow":
                lay(sequence, next_part, parts[next_part])
                next_part += 1
            elif move == "attach":
                world.attach(sequence, parts, data.draw(st.sampled_from(waiting)))
            else:
                chunks.append(world.compute(sequence, data.draw(st.integers(1, ready))))
    same(torch.cat(chunks), world.one_pass(parts))


@few
@given(many=st.lists(timelines, min_size=2, max_size=3), data=st.data())
def test_several_sequences_in_one_step(world: World, many: list[list[Part]], data: st.DataObject) -> None:
    chunks: list[list[Tensor]] = [[] for _ in many]
    with ExitStack() as stack:
        sequences = [stack.enter_context(world.laid(parts)) for parts in many]
        for sequence, parts in zip(sequences, many, strict=True):
            for name in data.draw(st.permutations(world.waiting(sequence))):
                world.attach(sequence, parts, name)
        while any(sequence.computed < len(sequence.timeline) for sequence in sequences):
            batch, whose = [], []
            for i, sequence in enumerate(sequences):
                left = len(sequence.timeline) - sequence.computed
                rows = data.draw(st.integers(0, left)) if len(chunks[i]) < 4 else left
                if rows:
                    batch.append(Work(sequence, rows, "all"))
                    whose.append(i)
            for i, logits in zip(whose, world.engine.step(batch) if batch else [], strict=True):
                chunks[i].append(logits)
    for parts, got in zip(many, chunks, strict=True):
        same(torch.cat(got), world.one_pass(parts))


@few
@given(before=timelines, after=timelines, data=st.data())
def test_a_video_that_turns_out_shorter(
    world: World, before: list[Part], after: list[Part], data: st.DataObject
) -> None:
    """Its units are said again with fewer of them; what was computed or attached beyond is taken back."""
    whole = Part(frames=tuple(data.draw(st.lists(st.integers(0, len(GRIDS) - 1), min_size=2, max_size=4))))
    kept = data.draw(st.integers(0, len(whole.frames) - 1))
    parts, at = [*before, whole, *after], len(before)
    logits: dict[int, Tensor] = {}
    with world.laid() as sequence:
        for slot, part in enumerate(parts):
            lay(sequence, slot, part, whole.sized(final=False) if slot == at else None)
        for name in world.waiting(sequence):
            if data.draw(st.booleans()):
                world.attach(sequence, parts, name)
        if sequence.ready_rows:
            logits.update(enumerate(world.compute(sequence, data.draw(st.integers(1, sequence.ready_rows)))))
        sequence.size(at, whole.sized(kept))
        world.engine.detach_moved(sequence)
        world.attach_all(sequence, parts)
        first, rows = sequence.computed, len(sequence.timeline)
        if first < rows:
            logits.update(enumerate(world.rest(sequence), start=first))
    with world.laid() as final:
        for slot, part in enumerate(parts):
            lay(final, slot, part, whole.sized(kept) if slot == at else None)
        world.attach_all(final, parts)
        expected = world.rest(final)
    same(torch.stack([logits[row] for row in range(rows)]), expected)


@few
@given(parts=timelines, data=st.data())
def test_dropped_frames_stay_seen_where_they_were_seen(world: World, parts: list[Part], data: st.DataObject) -> None:
    """A drop is an event on the timeline: computing it all at the end gives what was computed as it grew."""
    drops = [data.draw(st.integers(0, 2)) for _ in parts]
    chunks = []
    with world.laid() as growing, world.laid() as late:
        for slot, (part, drop) in enumerate(zip(parts, drops, strict=True)):
            for sequence in (growing, late):
                lay(sequence, slot, part)
                timeline = sequence.timeline
                timeline.drop_units(min(drop, len(timeline.units) - timeline.dropped))
            world.attach_all(growing, parts)
            if growing.ready_rows > growing.computed:
                chunks.append(world.rest(growing))
        world.attach_all(late, parts)
        expected = world.rest(late)
    same(torch.cat(chunks), expected)


# -- what it rests on --------------------------------------------------------------------------------------------------


def test_each_frame_makes_a_difference(world: World) -> None:
    """Otherwise the tests above would compare nothing with nothing."""
    logits = [world.one_pass([Part(text=(5,)), Part(frames=(0, other)), Part(text=(1, 2, 3))])[-1] for other in (1, 2)]
    assert (logits[0] - logits[1]).abs().max() > 1e-2 * logits[0].abs().max()


def test_a_unit_far_into_the_positions_is_as_exact_as_at_the_start(world: World) -> None:
    parts = [Part(text=tuple(range(60)) * 6), Part(frames=(3, 4)), Part(text=(1, 2, 3))]
    with world.laid(parts) as sequence:
        chunks = [world.rest(sequence)]
        for name in world.waiting(sequence):
            world.attach(sequence, parts, name)
            chunks.append(world.rest(sequence))
    same(torch.cat(chunks), world.one_pass(parts))
