"""Who goes through the model next: fair between tenants and between calls, whatever lies in the queue."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.cache.form import Form
from encoder_service.batcher import Batcher, Share
from encoder_service.bounds import Bounds
from encoder_service.flights import Flight, Unit

_keys = itertools.count()


def flight(rows: int = 4, columns: int = 4) -> Flight:
    return Flight(Unit(next(_keys).to_bytes(32, "big"), torch.empty(0), (rows, columns), Form.CROSS_KV, bytes(32)))


def batcher(max_patches: int = 64, max_units: int = 64) -> Batcher:
    return Batcher(Bounds(max_patches, max_units, lambda patches, units: 0))


def put(queue: Batcher, share: Share, count: int, rows: int = 4) -> list[Flight]:
    made = [flight(rows) for _ in range(count)]
    for one in made:
        queue.want(one, share)
    return made


def test_a_single_picture_is_in_the_next_pass_whatever_a_video_has_queued() -> None:
    queue = batcher()
    put(queue, queue.share(b"a"), 256)
    assert len(queue.take()) == 4
    (picture,) = put(queue, queue.share(b"a"), 1)
    assert picture in queue.take(), "of the same tenant"
    (picture,) = put(queue, queue.share(b"b"), 1)
    assert picture in queue.take(), "of another"


def test_videos_of_one_tenant_advance_alike_and_tenants_share_by_patches_not_by_calls() -> None:
    queue = batcher()
    first, second = [put(queue, queue.share(b"a"), 40) for _ in range(2)]
    alone = put(queue, queue.share(b"b"), 40, rows=8)
    taken = [one for _ in range(12) for one in queue.take()]
    of = [len({*taken} & {*own}) for own in (first, second, alone)]
    assert abs(of[0] - of[1]) <= 1
    assert abs(16 * (of[0] + of[1]) - 32 * of[2]) <= 32, "each tenant has had as many patches as the other"


def test_a_higher_priority_goes_first_within_its_tenant_only() -> None:
    queue = batcher(max_patches=16)
    low = put(queue, queue.share(b"a"), 2)
    high = put(queue, queue.share(b"a", priority=1), 2)
    other = put(queue, queue.share(b"b", priority=-5), 2)
    order = [one for _ in range(6) for one in queue.take()]
    assert [one for one in order if one in {*low, *high}] == [*high, *low]
    assert sorted(order.index(one) for one in other) == [1, 3]


def test_a_unit_that_a_picture_and_a_video_both_want_goes_when_the_first_of_them_has_its_turn() -> None:
    queue = batcher()
    video, picture = queue.share(b"a"), queue.share(b"a")
    units = put(queue, video, 100)
    queue.take()
    queue.want(units[-1], picture)
    assert units[-1] in queue.take()
    assert units[-1] not in video.flights and not units[-1].queued


def test_a_tenant_whose_entries_find_no_room_waits_alone() -> None:
    queue = batcher(max_patches=16)
    a, b = put(queue, queue.share(b"a"), 3), put(queue, queue.share(b"b"), 3)
    (first,) = queue.take()
    assert first is a[0]
    queue.hold(first)
    assert [queue.take()[0] for _ in range(3)] == b
    assert queue.take() == [] and len(queue) == 2
    queue.go_on(first)
    assert queue.take() == [a[1]]


def test_a_tenant_of_which_nothing_was_queued_waits_for_room_too() -> None:
    queue = batcher()
    share = queue.share(b"a")
    put(queue, share, 2)
    first, second = queue.take()
    queue.hold(first)
    queue.hold(second)
    later, other = put(queue, share, 1), put(queue, queue.share(b"b"), 1)
    assert queue.take() == other
    queue.go_on(first)
    assert queue.take() == [], "another entry of it has no room yet"
    queue.go_on(second)
    assert queue.take() == later
    assert not queue._tenants and not len(queue._sharers)


def test_equal_grids_lie_side_by_side_in_a_pass() -> None:
    queue = batcher(max_patches=1000)
    share = queue.share(b"a")
    for rows in (8, 4, 8, 4):
        put(queue, share, 1, rows)
    assert [one.unit.grid[0] for one in queue.take()] == [4, 4, 8, 8]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["want", "join", "leave", "take", "hold", "go on"]), st.integers(0, 5), st.integers(0, 30)
        ),
        max_size=60,
    )
)
def test_whatever_comes_and_leaves_every_unit_leaves_once_and_nobody_is_remembered(
    acts: Sequence[tuple[str, int, int]],
) -> None:
    queue = batcher(max_units=3)
    shares = [queue.share(bytes([i % 3]), priority=i % 2) for i in range(6)]
    wanted: list[tuple[Flight, Share]] = []
    gone: list[Flight] = []
    held: list[Flight] = []
    for act, who, which in acts:
        waiting = [one for one, _ in wanted if one.queued]
        if act == "want":
            wanted.append((flight(), shares[who]))
            queue.want(*wanted[-1])
        elif act == "join" and waiting:
            wanted.append((waiting[which % len(waiting)], shares[who]))
            queue.want(*wanted[-1])
        elif act == "leave" and waiting:
            pair = next(pair for pair in wanted if pair[0] is waiting[which % len(waiting)])
            wanted.remove(pair)
            last = not any(one is pair[0] for one, _ in wanted)
            assert queue.leave(*pair) == last
        elif act == "take":
            taken = queue.take()
            assert not {one.tenant for one in taken} & {one.tenant for one in held}
            gone += taken
        elif act == "hold" and {*gone} - {*held}:
            held.append([one for one in gone if one not in held][-1])
            queue.hold(held[-1])
        elif act == "go on" and held:
            queue.go_on(held.pop(which % len(held)))
        assert len(queue) == len({one for one, _ in wanted if one.queued})
    for one in held:
        queue.go_on(one)
    while taken := queue.take():
        gone += taken
    assert len(gone) == len({*gone}) and {*gone} >= {one for one, _ in wanted}
    assert not len(queue) and not queue._tenants and not len(queue._sharers)
    assert not any(share.flights for share in shares)


@pytest.mark.parametrize(
    ("max_patches", "max_units", "sizes", "passes"),
    [
        (20, 0, [4, 16, 4, 36, 4, 16], [[4, 16], [4], [36], [4, 16]]),
        (0, 2, [4, 16, 36, 4, 4], [[4, 16], [36, 4], [4]]),
        (0, 0, [4, 16, 36, 64], [[4, 16, 36, 64]]),
        (1, 1, [4, 16], [[4], [16]]),
    ],
)
def test_passes_are_filled_in_order_and_what_is_too_large_goes_alone(
    max_patches: int, max_units: int, sizes: list[int], passes: list[list[int]]
) -> None:
    queue = batcher(max_patches, max_units)
    share = queue.share(b"a")
    for size in sizes:
        put(queue, share, 1, rows=size // 4)
    taken = []
    while batch := queue.take():
        taken.append([flight.unit.patches for flight in batch])
    assert taken == [sorted(one) for one in passes]
