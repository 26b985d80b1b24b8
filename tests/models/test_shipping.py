"""The form of entries is chosen at the break-even of two measured rates, once for all workers of a store."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chiasm.cache.form import Form
from chiasm.cache.memory import MemoryStore
from chiasm.cache.sealed import Sealed
from chiasm.errors import Overloaded
from chiasm.models import shipping
from chiasm.models.family import EntryShape
from chiasm.models.shipping import Rates, agree, break_even, choose

RELEASED = EntryShape(layers=12, heads=8, dim=128, hidden=4096)
"""MOSS-VL's 11 B model."""

SECRET = bytes(range(32))
FAST, SLOW = Rates(link=1e12, flops=1e12), Rates(link=1e6, flops=1e12)
"""Links over which keys and values are quicker, and are not."""


def measuring(rates: Rates, times: list[Rates]) -> Callable[[], Awaitable[Rates]]:
    """What measures these, and notes that it did."""

    async def measure() -> Rates:
        times.append(rates)
        return rates

    return measure


# -- the formula -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flops", "gigabytes"),
    [(553e12, 112.5), (395e12, 80.4), (187e12, 38.1), (0.8e12, 0.163)],
    ids=["fast", "half", "older", "processor"],
)
def test_the_break_even_of_the_released_size_is_that_of_40_kib_in_the_time_of_a_projection(
    flops: float, gigabytes: float
) -> None:
    assert shipping.projection_flops(RELEASED) == 201_326_592
    assert break_even(RELEASED, torch.bfloat16, flops) / 1e9 == pytest.approx(gigabytes, rel=2e-3)


@given(
    flops=st.floats(1e9, 1e15),
    layers=st.integers(1, 64),
    heads=st.integers(1, 16),
    dim=st.integers(2, 256),
    hidden=st.integers(1, 8192),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_just_above_the_break_even_keys_and_values_are_shipped_and_just_below_states(
    flops: float, layers: int, heads: int, dim: int, hidden: int, dtype: torch.dtype
) -> None:
    shape = EntryShape(layers, heads, dim, hidden)
    even = break_even(shape, dtype, flops)
    if even <= 0:  # states are not smaller
        assert choose(shape, dtype, Rates(1.0, flops)) is Form.CROSS_KV
        return
    assert choose(shape, dtype, Rates(even, flops)) is Form.CROSS_KV
    assert choose(shape, dtype, Rates(even * 1.001, flops)) is Form.CROSS_KV
    assert choose(shape, dtype, Rates(even * 0.999, flops)) is Form.STATES
    # It is where the times of one token cross.
    kv, states = (math.prod(shape.of(1, form)) * dtype.itemsize for form in (Form.CROSS_KV, Form.STATES))
    projecting = shipping.projection_flops(shape) / flops
    assert kv / even == pytest.approx(states / even + projecting)


# -- the agreement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rates", "form"), [(FAST, Form.CROSS_KV), (SLOW, Form.STATES)])
async def test_the_first_worker_measures_and_later_ones_take_its_choice_over(rates: Rates, form: Form) -> None:
    store, times = MemoryStore(1 << 20), list[Rates]()
    first = await agree(store, SECRET, RELEASED, torch.bfloat16, measuring(rates, times))
    other = FAST if rates is SLOW else SLOW
    later = await agree(store, SECRET, RELEASED, torch.bfloat16, measuring(other, times))
    assert (first.form, first.measured) == (form, True)
    assert (later.form, later.rates, later.measured) == (form, rates, False)
    assert times == [rates]


async def test_who_was_quicker_to_measure_has_chosen_for_both() -> None:
    store, times = MemoryStore(1 << 20), list[Rates]()

    async def overtaken() -> Rates:
        await agree(store, SECRET, RELEASED, torch.bfloat16, measuring(SLOW, times))
        return FAST

    choice = await agree(store, SECRET, RELEASED, torch.bfloat16, overtaken)
    assert choice.form is Form.STATES and not choice.measured


@pytest.mark.parametrize("other", ["secret", "shape", "dtype"])
async def test_a_choice_is_of_one_fleet_and_of_models_of_one_shape_and_type(other: str) -> None:
    store, times = MemoryStore(1 << 20), list[Rates]()
    await agree(store, SECRET, RELEASED, torch.bfloat16, measuring(SLOW, times))
    choice = await agree(
        store,
        bytes(32) if other == "secret" else SECRET,
        replace(RELEASED, layers=11) if other == "shape" else RELEASED,
        torch.float32 if other == "dtype" else torch.bfloat16,
        measuring(FAST, times),
    )
    assert choice.measured and choice.form is Form.CROSS_KV and len(times) == 2


async def test_any_byte_of_a_record_that_was_changed_makes_it_measured_anew() -> None:
    store, times = MemoryStore(1 << 20), list[Rates]()
    await agree(store, SECRET, RELEASED, torch.bfloat16, measuring(SLOW, times))
    (key,) = store.held()
    kept = await store.get(key)
    assert kept is not None
    changed = [Sealed(kept.header, memoryview(b"x"), kept.tag), Sealed(b"", kept.payload, kept.tag)]
    for at in range(len(kept.header)):
        header = bytearray(kept.header)
        header[at] ^= 1 << at % 8
        changed.append(Sealed(bytes(header), kept.payload, kept.tag))
    for at in range(len(kept.tag)):
        tag = bytearray(kept.tag)
        tag[at] ^= 1 << at % 8
        changed.append(Sealed(kept.header, kept.payload, bytes(tag)))
    for count, record in enumerate(changed, start=2):
        await store.put(record, key)
        choice = await agree(store, SECRET, RELEASED, torch.bfloat16, measuring(SLOW, times))
        assert choice.measured and len(times) == count


async def test_a_store_that_keeps_nothing_lets_every_worker_choose_for_itself() -> None:
    store, times = MemoryStore(1), list[Rates]()
    for count in (1, 2):
        choice = await agree(store, SECRET, RELEASED, torch.bfloat16, measuring(SLOW, times))
        assert choice.form is Form.STATES and len(times) == count


# -- measuring ---------------------------------------------------------------------------------------------------------


class Ticking:
    """A clock that goes on by so many seconds each time it is read."""

    def __init__(self, seconds: float) -> None:
        self._now, self._seconds = 0.0, seconds

    def __call__(self) -> float:
        self._now += self._seconds
        return self._now


async def test_a_link_is_measured_by_entries_that_are_read_whole_and_leaves_nothing_behind() -> None:
    store = MemoryStore(1 << 20)
    rate = await shipping.measured_link(store, device=torch.device("cpu"), nbytes=1 << 16, clock=Ticking(0.5))
    assert rate == (1 << 16) / 0.5
    assert store.stats().hits == shipping.ROUNDS + 1 and not store.held()


async def test_a_store_without_room_is_told_and_not_measured() -> None:
    with pytest.raises(Overloaded) as caught:
        await shipping.measured_link(MemoryStore(1 << 10), device=torch.device("cpu"), nbytes=1 << 16)
    assert caught.value.reason == "CACHE_FULL"


def test_projections_are_measured_by_the_operations_of_a_unit() -> None:
    shape = EntryShape(layers=2, heads=2, dim=4, hidden=8)
    rate = shipping.measured_flops(shape, device=torch.device("cpu"), dtype=torch.float32, clock=Ticking(0.25))
    assert rate == shipping.UNIT_TOKENS * shipping.projection_flops(shape) / 0.25


async def test_what_is_measured_here_is_finite_and_chooses() -> None:
    shape = EntryShape(layers=2, heads=2, dim=16, hidden=32)
    store, cpu = MemoryStore(1 << 24), torch.device("cpu")
    rates = await shipping.measured(store, shape, device=cpu, dtype=torch.float32)
    assert rates.link > 0 and rates.flops > 0
    assert choose(shape, torch.float32, rates) in (Form.CROSS_KV, Form.STATES)
