"""Pages and slots are handed out once, given back once, and what is free can always be used."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chiasm.attention.pages import ExtentAllocator, PageAllocator, Run
from chiasm.errors import Overloaded

steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no fault of what is tested."""


def test_pages_grow_with_the_rows_and_come_back() -> None:
    pages = PageAllocator(4, 3)
    held: list[int] = []
    for rows, count in ((0, 0), (1, 1), (3, 1), (4, 2), (9, 3), (2, 3)):
        pages.grow(held, rows)
        assert len(held) == count
    assert len(set(held)) == 3 and pages.free == 1
    pages.release(held)
    assert (held, pages.free) == ([], 4)


def test_pages_are_taken_all_or_none() -> None:
    pages = PageAllocator(3, 2)
    held: list[int] = []
    pages.grow(held, 3)
    before = list(held)
    with pytest.raises(Overloaded) as caught:
        pages.grow(held, 8)
    assert caught.value.reason == "KV_POOL_FULL"
    assert caught.value.facts == {"needed": 2, "free": 1}
    assert caught.value.retry_after is not None
    assert held == before and pages.free == 1


@steady
@given(st.lists(st.integers(0, 12) | st.none(), max_size=30))
def test_no_page_is_held_twice(moves: list[int | None]) -> None:
    """A number grows one of two sequences to so many rows, None gives one back."""
    pages = PageAllocator(6, 2)
    held: list[list[int]] = [[], []]
    for number, rows in enumerate(moves):
        mine = held[number % 2]
        if rows is None:
            pages.release(mine)
        elif -(-rows // 2) - len(mine) <= pages.free:
            pages.grow(mine, rows)
        assert sorted(held[0] + held[1]) == sorted(set(held[0] + held[1]))
        assert pages.free + len(held[0]) + len(held[1]) == pages.total


def test_units_lie_side_by_side_and_a_gap_is_filled_again() -> None:
    slots = ExtentAllocator(10)
    first, second, third = slots.take(3), slots.take(4), slots.take(3)
    assert (first, second, third) == ([Run(0, 3)], [Run(3, 4)], [Run(7, 3)])
    slots.give_back(second)
    assert slots.take(2) == [Run(3, 2)]
    assert slots.free == 2


def test_holes_that_meet_become_one() -> None:
    slots = ExtentAllocator(9)
    parts = [slots.take(3) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        slots.give_back(part)
    assert slots.take(9) == [Run(0, 9)]


def test_a_unit_is_cut_only_where_no_hole_holds_it_whole() -> None:
    slots = ExtentAllocator(12)
    parts = [slots.take(3) for _ in range(4)]
    slots.give_back(parts[0])
    slots.give_back(parts[2])
    assert slots.take(5) == [Run(0, 3), Run(6, 2)]
    assert slots.take(1) == [Run(8, 1)]
    assert slots.free == 0


def test_what_does_not_fit_takes_nothing() -> None:
    slots = ExtentAllocator(5)
    slots.take(2)
    with pytest.raises(Overloaded) as caught:
        slots.take(4)
    assert caught.value.facts == {"needed": 4, "free": 3}
    assert slots.free == 3
    with pytest.raises(Overloaded):
        ExtentAllocator(0).take(1)


@steady
@given(st.lists(st.integers(1, 7), max_size=40))
def test_no_slot_is_held_twice_and_all_come_back(lengths: list[int]) -> None:
    slots = ExtentAllocator(20)
    held: list[list[Run]] = []
    for length in lengths:
        if length <= slots.free:
            taken = slots.take(length)
            assert sum(run.length for run in taken) == length
            held.append(taken)
        else:
            slots.give_back(held.pop(length % len(held)))
        used = [slot for runs in held for run in runs for slot in range(run.start, run.start + run.length)]
        assert len(used) == len(set(used)) and set(used) <= set(range(20))
        assert slots.free == 20 - len(used)
    for runs in held:
        slots.give_back(runs)
    assert slots.take(20) == [Run(0, 20)]
