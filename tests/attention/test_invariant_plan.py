"""Tiles and blocks: every row once, over the keys it sees and no others, each at its number in its sequence."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.invariant_plan import BLOCK, Looking, Tiles, look_across, look_back, plan_tiles

PAGE = 4


def read_back(planned: list[Tiles], rows: int) -> list[list[int]]:
    """The slots that each row of a step sees, block by block as they are summed."""
    seen: list[list[int]] = [[] for _ in range(rows)]
    for tiles in planned:
        tile_of = [tile for depth in tiles.depths for tile in range(depth)]
        for tile, slots, hidden in zip(tile_of, tiles.slots, tiles.hidden, strict=True):
            for row, blind in zip(tiles.rows[tile].tolist(), hidden, strict=True):
                if row >= 0:
                    seen[row] += slots[~blind].tolist()
    return seen


def looking(rows: int, start: int, *, first: int = 0) -> Looking:
    """Consecutive rows, each of which sees one key more than the row before it."""
    spans = np.array([[first, start + i + 1] for i in range(rows)])
    return Looking(np.arange(rows), 1000 + np.arange(start + rows), spans)


@settings(deadline=None)
@given(
    start=st.integers(0, 3 * BLOCK),
    rows=st.integers(1, 50),
    heights=st.sampled_from([[1], [3], [2, 7], [4, 32]]),
    most=st.integers(1, 200),
)
def test_every_row_sees_its_own_keys_in_order(start: int, rows: int, heights: list[int], most: int) -> None:
    planned = plan_tiles([looking(rows, start)], heights, most)
    assert read_back(planned, rows) == [[*range(1000, 1000 + start + i + 1)] for i in range(rows)]
    for tiles in planned:
        assert tiles.rows.shape[1] in heights
        assert len(tiles.rows) == 1 or len(tiles.slots) * tiles.rows.shape[1] <= most
        assert tiles.depths == sorted(tiles.depths, reverse=True) and sum(tiles.depths) == len(tiles.slots)


def test_blocks_that_no_row_of_a_tile_sees_are_not_computed() -> None:
    (tiles,) = plan_tiles([looking(2, 4 * BLOCK, first=2 * BLOCK + 1)], [2], 1000)
    assert len(tiles.slots) == 3 and tiles.slots[0, 0] == 1000 + 2 * BLOCK


def test_a_key_keeps_its_place_in_its_block_when_tokens_before_it_are_dropped() -> None:
    spans = np.array([[140, 160]])
    whole = SequenceRows(0, 1, [0], spans, [(0, 7, 130), (130, 500, 40)])
    left = SequenceRows(0, 1, [0], spans, [(130, 500, 40)])
    found = [plan_tiles(look_across(Step([one])), [1], 1000) for one in (whole, left)]
    (a,), (b,) = found
    assert (a.hidden == b.hidden).all() and (a.slots[~a.hidden[:, 0]] == b.slots[~b.hidden[:, 0]]).all()
    assert read_back(found[0], 1) == [[*range(510, 530)]]


def test_sequences_with_the_same_units_share_tiles_and_others_do_not() -> None:
    units, spans = [(0, 30, 10), (10, 50, 10)], np.array([[0, 20]])
    step = Step([SequenceRows(0, 1, [i], spans, extents) for i, extents in enumerate([units, [(0, 0, 20)], units])])
    assert [one.rows.tolist() for one in look_across(step)] == [[0, 2], [1]]


def test_rows_look_back_over_their_pages() -> None:
    nothing = np.zeros((2, 2), dtype=np.int64)
    step = Step([SequenceRows(0, 0, [], nothing[:0], []), SequenceRows(5, 2, [9, 2], nothing, [])])
    (one,) = look_back(step, PAGE)
    assert one.slots.tolist() == [36, 37, 38, 39, 8, 9, 10] and one.spans.tolist() == [[0, 6], [0, 7]]
    assert not look_across(step)
