"""The plan of cross-attention, read back: every row sees its own slots once, whatever it is attended with."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.cross_plan import BLOCK_ROWS, DIAGONAL, Block, length, pieces, plan_cross
from chiasm.attention.pages import Run

steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no fault of what is tested."""


def sequence(spans: list[tuple[int, int]], extents: list[tuple[int, int, int]]) -> SequenceRows:
    return SequenceRows(0, len(spans), [], np.array(spans, dtype=np.int64).reshape(-1, 2), extents)


def slots(runs: tuple[Run, ...]) -> list[int]:
    return [slot for run in runs for slot in range(run.start, sum(run))]


def read_back(blocks: list[Block]) -> dict[int, list[int]]:
    """The slots each row sees, in order."""
    seen: dict[int, list[int]] = {}
    for block in blocks:
        assert block.shared or block.diagonal
        for i, row in enumerate(block.rows.tolist()):
            assert row not in seen, f"row {row} is in two blocks"
            seen[row] = slots(block.shared)
            if block.diagonal:
                assert 1 <= block.seen[i] <= length(block.diagonal)
                seen[row] += slots(block.diagonal)[: block.seen[i]]
    return seen


def expected(step: Step) -> dict[int, list[int]]:
    seen: dict[int, list[int]] = {}
    at = 0
    for one in step.sequences:
        tokens = {first + i: slot + i for first, slot, size in one.extents for i in range(size)}
        for row, (first, last) in enumerate(one.boundaries.tolist()):
            if last > first:
                seen[at + row] = [tokens[token] for token in range(first, last)]
        at += one.rows
    return seen


def evenly(rows: int, frames: int, frame: int, slot: int = 0) -> SequenceRows:
    """Frames spread evenly over the rows, all in one run."""
    return sequence(
        [(0, (row * frames // rows + 1) * frame) for row in range(rows)],
        [(frame * i, slot + frame * i, frame) for i in range(frames)],
    )


@steady
@given(data=st.data())
def test_every_row_sees_its_own_slots_and_no_other(data: st.DataObject) -> None:
    """Sequences share videos or not; units lie anywhere; some rows see nothing, some have lost old frames."""
    videos = []
    slot = 0
    for _ in range(data.draw(st.integers(1, 3))):
        first, extents = data.draw(st.integers(0, 3)), []
        for size in data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)):
            slot += data.draw(st.integers(0, 1))
            extents.append((first, slot, size))
            first, slot = first + size, slot + size
        order = data.draw(st.permutations([place for _, place, _ in extents]))
        if len({size for _, _, size in extents}) == 1:
            extents = [(first, place, size) for (first, _, size), place in zip(extents, order, strict=True)]
        videos.append(extents)
    sequences = []
    for _ in range(data.draw(st.integers(1, 4))):
        extents = data.draw(st.sampled_from(videos))
        start, end = extents[0][0], extents[-1][0] + extents[-1][2]
        bound = st.integers(start, end)
        spans = data.draw(st.lists(st.tuples(bound, bound).map(lambda pair: (min(pair), max(pair))), max_size=12))
        sequences.append(sequence(sorted(spans) if data.draw(st.booleans()) else spans, extents))
    step = Step(sequences)
    assert read_back(plan_cross(step)) == expected(step)


def test_questions_about_one_video_are_one_block() -> None:
    extents = [(0, 30, 10), (10, 50, 10)]
    step = Step([sequence([(0, 20)] * rows, extents) for rows in (1, 3, 1)])
    (block,) = plan_cross(step)
    assert block.rows.tolist() == [0, 1, 2, 3, 4]
    assert (block.shared, block.diagonal) == ((Run(30, 10), Run(50, 10)), ())


def test_copies_of_a_video_are_blocks_of_their_own() -> None:
    step = Step([sequence([(0, 20)], [(0, slot, 20)]) for slot in (0, 20, 0)])
    assert [(one.rows.tolist(), one.shared) for one in plan_cross(step)] == [
        ([0, 2], (Run(0, 20),)),
        ([1], (Run(20, 20),)),
    ]


def test_a_staircase_is_taken_in_blocks_with_small_diagonals() -> None:
    step = Step([evenly(2048, 64, 128)])
    blocks = plan_cross(step)
    assert read_back(blocks) == expected(step)
    assert max(len(block.rows) for block in blocks) <= BLOCK_ROWS
    assert len(blocks) <= 1 + 2048 // BLOCK_ROWS
    work = sum(len(block.rows) * length(block.shared + block.diagonal) for block in blocks)
    needed = sum(len(seen) for seen in expected(step).values())
    assert work < 1.12 * needed, "what is computed and hidden stays small"


@pytest.mark.parametrize(("rows", "frames", "frame"), [(512, 512, 5), (64, 64, 1000), (300, 20, 2040)])
def test_no_mask_grows_with_text_or_video(rows: int, frames: int, frame: int) -> None:
    blocks = plan_cross(Step([evenly(rows, frames, frame)]))
    assert Counter(row for block in blocks for row in block.rows.tolist()) == Counter(range(rows))
    for block in blocks:
        assert length(block.diagonal) <= DIAGONAL
        assert not block.diagonal or len(block.rows) <= BLOCK_ROWS


def test_equal_staircases_of_several_sequences_are_taken_together() -> None:
    step = Step([evenly(20, 4, 8), evenly(20, 4, 8)])
    (block,) = plan_cross(step)
    assert len(block.rows) == 40
    assert read_back([block]) == expected(step)


def test_a_dropped_frame_begins_a_new_block() -> None:
    extents = [(0, 0, 30)]
    blocks = plan_cross(Step([sequence([(0, 10), (0, 20), (10, 20), (10, 30)], extents)]))
    assert [block.rows.tolist() for block in blocks] == [[0, 1], [2, 3]]


def test_what_is_not_attached_cannot_be_planned() -> None:
    with pytest.raises(AssertionError, match="not attached"):
        plan_cross(Step([sequence([(0, 5)], [(0, 0, 4)])]))
    with pytest.raises(AssertionError, match="not attached"):
        plan_cross(Step([sequence([(0, 5)], [(0, 0, 2), (3, 9, 2)])]))


def test_a_step_without_vision_has_no_blocks() -> None:
    assert plan_cross(Step([])) == []
    assert plan_cross(Step([sequence([], []), sequence([(0, 0)] * 3, [(0, 0, 4)])])) == []


@steady
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=12), st.integers(1, 16))
def test_pieces_hold_every_slot_once(gaps: list[tuple[int, int]], limit: int) -> None:
    runs = []
    at = 0
    for gap, size in gaps:
        runs.append(Run(at + gap, size))
        at += gap + size
    cut = pieces(tuple(runs), limit)
    assert sorted(slot for piece in cut for slot in slots(piece)) == sorted(slots(tuple(runs)))
    for piece in cut:
        assert 1 <= length(piece) <= limit
        assert len(piece) == 1 or all(run.length < limit / 2 for run in piece), "long runs are read in place"
