"""A worker that breaks every call, by its outcomes and a clock."""

from __future__ import annotations

from router.circuit import BROKEN, FIRST_REST, LONGEST_REST, Circuit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def broken(clock: Clock) -> Circuit:
    circuit = Circuit(clock=clock)
    for _ in range(BROKEN):
        assert circuit.takes(5)
        circuit.broke()
    return circuit


def test_after_some_broken_calls_in_a_row_it_rests_and_then_takes_one() -> None:
    clock = Clock()
    circuit = broken(clock)
    assert not circuit.takes(0) and circuit.resting == FIRST_REST
    clock.now += FIRST_REST
    assert circuit.takes(0) and not circuit.takes(1)


def test_a_call_that_ends_well_closes_it_and_between_broken_ones_keeps_it_closed() -> None:
    clock = Clock()
    circuit = broken(clock)
    clock.now += FIRST_REST
    circuit.passed()
    assert circuit.takes(9)
    for _ in range(3 * BROKEN):
        circuit.broke()
        circuit.passed()
    assert circuit.takes(9)


def test_rests_grow_to_a_bound_and_calls_that_had_begun_before_one_do_not_lengthen_it() -> None:
    clock = Clock()
    circuit = broken(clock)
    rests = []
    for _ in range(9):
        rests.append(circuit.resting)
        circuit.broke()
        assert circuit.resting == rests[-1]
        clock.now += rests[-1]
        circuit.broke()
    assert rests == sorted(rests) and rests[:3] == [1, 2, 4] and rests[-1] == LONGEST_REST
