"""Positions, visibility and boundaries of a timeline against rules spelled out one token at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiasm.timeline import Timeline, UnitLayout, UnitName

steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no fault of what is tested."""

PAD = 900


def frame(height: int, width: int) -> UnitLayout:
    """A frame as MOSS-VL lays it: one pad beyond its positions."""
    m = max(height, width)
    return UnitLayout((PAD,), np.full((3, 1), m, dtype=np.int32), m + 1, height * width + 1)


def grid(height: int, width: int) -> UnitLayout:
    """A unit with a placeholder per token, each at its own place, as families lay it whose text holds vision tokens."""
    steps = np.array([(0, y, x) for y in range(height) for x in range(width)], dtype=np.int32).T
    return UnitLayout((PAD,) * (height * width), steps, max(height, width), height * width)


sides = st.integers(1, 4)
Event: TypeAlias = list[int] | UnitLayout | int
"""Text, a unit, or how many units to drop (as many as can be, at most)."""

events = st.lists(
    st.lists(st.integers(0, 99), min_size=1, max_size=4)
    | st.builds(frame, sides, sides)
    | st.builds(grid, sides, sides)
    | st.integers(0, 2),
    max_size=12,
)


@dataclass
class Naive:
    """The same rules without any cleverness: lists that grow, sums over everything."""

    rows: list[tuple[int, tuple[int, int, int], int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    counter: int = 0
    dropped: int = 0

    def apply(self, event: Event) -> None:
        if isinstance(event, list):
            for token in event:
                self.rows.append((token, (self.counter,) * 3, len(self.sizes), self.dropped))
                self.counter += 1
        elif isinstance(event, UnitLayout):
            steps = [tuple(self.counter + s for s in step) for step in event.placeholder_steps.T.tolist()]
            for number, (t, h, w) in enumerate(steps):
                complete = number == len(steps) - 1
                self.rows.append((PAD, (t, h, w), len(self.sizes) + complete, self.dropped))
            self.sizes.append(event.vision_tokens)
            self.counter += event.advance
        else:
            self.dropped += min(event, len(self.sizes) - self.dropped)

    def boundaries(self) -> list[list[int]]:
        spans = []
        for _, _, visible, dropped in self.rows:
            sees = visible > dropped
            spans.append([sum(self.sizes[:dropped]), sum(self.sizes[:visible])] if sees else [0, 0])
        return spans


def grow(timeline: Timeline, events: list[Event], *, units: int = 0) -> None:
    for event in events:
        if isinstance(event, list):
            timeline.append_text(event)
        elif isinstance(event, UnitLayout):
            timeline.append_unit(UnitName(0, len(timeline.units) + units), event)
        else:
            timeline.drop_units(min(event, len(timeline.units) - timeline.dropped))


def everything(timeline: Timeline) -> tuple[object, ...]:
    return (
        timeline.ids(),
        timeline.positions().tolist(),
        timeline.visible().tolist(),
        timeline.boundaries().tolist(),
        list(timeline.units),
        timeline.counter,
        timeline.rope_delta,
        timeline.vision_tokens,
        timeline.dropped,
    )


@steady
@given(events)
def test_a_timeline_follows_the_rules(events: list[Event]) -> None:
    timeline, naive = Timeline(), Naive()
    grow(timeline, events)
    for event in events:
        naive.apply(event)
    assert timeline.ids() == [row[0] for row in naive.rows]
    assert timeline.positions().T.tolist() == [list(row[1]) for row in naive.rows]
    assert timeline.visible().tolist() == [row[2] for row in naive.rows]
    assert timeline.boundaries().tolist() == naive.boundaries()
    assert timeline.counter == naive.counter
    assert timeline.rope_delta == naive.counter - len(naive.rows)
    assert timeline.vision_tokens == sum(naive.sizes)


@steady
@given(events, events)
def test_nothing_appended_changes_what_stands_before_it(before: list[Event], after: list[Event]) -> None:
    timeline = Timeline()
    grow(timeline, before)
    rows = len(timeline)
    columns = [timeline.positions(), timeline.visible(), timeline.boundaries()]
    ids = timeline.ids()
    grow(timeline, after)
    assert timeline.ids(0, rows) == ids
    now = [timeline.positions(0, rows), timeline.visible(0, rows), timeline.boundaries(0, rows)]
    for was, is_now in zip(columns, now, strict=True):
        assert np.array_equal(was, is_now)


@steady
@given(events, st.data())
def test_a_slice_is_the_slice_of_the_whole(events: list[Event], data: st.DataObject) -> None:
    timeline = Timeline()
    grow(timeline, events)
    start = data.draw(st.integers(0, len(timeline)))
    stop = data.draw(st.integers(start, len(timeline)))
    whole: list[npt.NDArray[np.int64]] = [timeline.positions().T, timeline.visible(), timeline.boundaries()]
    parts = [timeline.positions(start, stop).T, timeline.visible(start, stop), timeline.boundaries(start, stop)]
    for all_rows, rows in zip(whole, parts, strict=True):
        assert np.array_equal(all_rows[start:stop], rows)
    assert timeline.ids(start, stop) == timeline.ids()[start:stop]


@steady
@given(events, events, events)
def test_cut_back_and_grown_anew_it_equals_a_fresh_one(kept: list[Event], cut: list[Event], new: list[Event]) -> None:
    # A drop leaves no row of its own: one that is followed by nothing is forgotten with the tail, so the kept part ends
    # in a row.
    kept = [*kept, [7]]
    timeline, fresh = Timeline(), Timeline()
    grow(timeline, kept)
    rows = len(timeline)
    grow(timeline, [[8], *cut])
    timeline.truncate(rows)
    grow(fresh, kept)
    assert everything(timeline) == everything(fresh)
    grow(timeline, new)
    grow(fresh, new)
    assert everything(timeline) == everything(fresh)


@steady
@given(events, st.data())
def test_every_cut_leaves_the_rows_before_it_or_is_refused_inside_a_unit(
    events: list[Event], data: st.DataObject
) -> None:
    timeline = Timeline()
    grow(timeline, events)
    rows = data.draw(st.integers(0, len(timeline)))
    before = (timeline.ids(0, rows), timeline.positions(0, rows).tolist(), timeline.boundaries(0, rows).tolist())
    inside = any(unit.index < rows < unit.end_index for unit in timeline.units)
    if inside:
        unchanged = everything(timeline)
        with pytest.raises(ValueError, match="is inside"):
            timeline.truncate(rows)
        assert everything(timeline) == unchanged
        return
    timeline.truncate(rows)
    assert len(timeline) == rows
    assert (timeline.ids(), timeline.positions().tolist(), timeline.boundaries().tolist()) == before
    assert all(timeline.find(unit.name) == unit and unit.end_index <= rows for unit in timeline.units)


@steady
@given(events)
def test_a_prefill_may_run_up_to_the_first_unit_that_is_not_there(events: list[Event]) -> None:
    timeline = Timeline()
    grow(timeline, events)
    visible = timeline.visible().tolist()
    for number, unit in enumerate(timeline.units):
        assert timeline.rows_before(number) == unit.index
        assert all(count <= number for count in visible[: unit.index])
    assert timeline.rows_before(len(timeline.units)) == len(timeline)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_frame_sits_between_the_words_around_it() -> None:
    timeline = Timeline()
    assert timeline.append_text([1, 2]) == 0
    unit = timeline.append_unit(UnitName(0, 0), frame(2, 3))
    assert timeline.append_text([3]) == 3
    assert (unit.index, unit.start, unit.first, unit.last, unit.end_index) == (2, 2, 0, 7, 3)
    assert timeline.positions().tolist() == [[0, 1, 5, 6]] * 3
    assert timeline.visible().tolist() == [0, 0, 1, 1]
    assert timeline.boundaries().tolist() == [[0, 0], [0, 0], [0, 7], [0, 7]]
    assert timeline.rope_delta == 3


def test_a_unit_of_many_placeholders_is_seen_from_its_last_on() -> None:
    timeline = Timeline()
    timeline.append_unit(UnitName(0, 0), grid(2, 2))
    timeline.append_text([1])
    assert timeline.visible().tolist() == [0, 0, 0, 1, 1]
    assert timeline.positions().tolist() == [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]


def test_what_is_dropped_is_hidden_from_later_rows_only() -> None:
    timeline = Timeline()
    for number in range(3):
        timeline.append_unit(UnitName(0, number), frame(1, 2))
    timeline.drop_units(2)
    timeline.append_text([1])
    timeline.drop_units(1)
    timeline.append_text([2])
    assert timeline.boundaries().tolist() == [[0, 3], [0, 6], [0, 9], [6, 9], [0, 0]]
    assert timeline.dropped == 3


def test_units_are_named_once_and_no_more_are_dropped_than_laid() -> None:
    timeline = Timeline()
    timeline.append_unit(UnitName(1, 0), frame(1, 1))
    with pytest.raises(ValueError, match="laid already"):
        timeline.append_unit(UnitName(1, 0), frame(1, 1))
    for count in (2, -1):
        with pytest.raises(ValueError, match="cannot drop"):
            timeline.drop_units(count)
    assert timeline.find(UnitName(1, 1)) is None
    timeline.truncate(0)
    assert timeline.find(UnitName(1, 0)) is None
    assert timeline.append_unit(UnitName(1, 0), frame(1, 1)).index == 0


def test_an_empty_timeline_has_the_shapes_of_any_other() -> None:
    timeline = Timeline()
    assert timeline.positions().shape == (3, 0)
    assert timeline.boundaries().shape == (0, 2)
    assert timeline.visible().shape == (0,)
    assert (len(timeline), timeline.vision_tokens, timeline.rope_delta, timeline.rows_before(0)) == (0, 0, 0, 0)
