"""What is done next about the workers of a pool, and that it comes to an end whatever the beginning."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.rolling import Standing, State, Steps, step


def worker(name: str, state: State = "ready", *, current: bool = True, running: int = 0) -> Standing:
    return Standing(name, state, current, running)


def test_a_pool_that_is_as_it_should_be_is_left_alone() -> None:
    assert step([worker("a"), worker("b", "starting")], 2) == Steps()


def test_what_is_missing_is_placed_and_what_is_too_much_drains_the_idlest_first() -> None:
    assert step([worker("a")], 2) == Steps(start=True)
    assert step([worker("a", running=3), worker("b", running=1), worker("c", running=2)], 2) == Steps(drain="b")
    assert step([worker("a"), worker("b"), worker("c", "starting")], 2) == Steps(drain="c")


def test_new_settings_come_to_one_at_a_time_the_new_one_first() -> None:
    old = [worker("a", current=False), worker("b", current=False)]
    assert step(old, 2) == Steps(start=True)
    assert step([*old, worker("c", "starting")], 2) == Steps(), "nobody goes before another is ready"
    assert step([*old, worker("c")], 2) == Steps(drain="a")
    draining = [worker("a", "draining", current=False), old[1], worker("c")]
    assert step(draining, 2) == Steps(start=True)
    assert step([old[1], worker("c"), worker("d")], 2) == Steps(drain="b")


def test_the_last_of_a_pool_that_may_rest_keeps_its_place_and_is_woken_in_it() -> None:
    assert step([worker("a"), worker("b")], 0) == Steps(drain="a")
    assert step([worker("b")], 0) == Steps(rest="b")
    assert step([worker("b", "resting")], 0) == Steps()
    assert step([worker("b", "resting")], 1) == Steps(wake="b")
    assert step([worker("b", "resting", current=False)], 1) == Steps(start=True, remove=("b",))


States = st.sampled_from(["starting", "ready", "draining", "resting"])


@given(
    st.lists(st.builds(Standing, st.just(""), States, st.booleans(), st.integers(0, 3)), max_size=6), st.integers(0, 4)
)
def test_from_any_beginning_a_pool_comes_to_what_is_wanted_and_never_serves_with_less_than_it_had(
    there: list[Standing], wanted: int
) -> None:
    there = [replace(one, name=str(number)) for number, one in enumerate(there)]
    made = len(there)
    for _ in range(60):
        steps = step(there, wanted)
        before = sum(one.state == "ready" for one in there)
        if steps.start:
            there.append(worker(str(made := made + 1), "starting"))
        for name in (steps.rest, steps.drain):
            there = [replace(one, state="draining") if one.name == name else one for one in there]
        there = [replace(one, state="starting") if one.name == steps.wake else one for one in there]
        there = [one for one in there if one.name not in steps.remove]
        assert sum(one.state == "ready" for one in there) >= min(before, wanted)
        assert sum(one.state in ("starting", "ready") for one in there) <= max(before, wanted + 1, len(there) - 1, 6)
        if steps == Steps():  # time passes: what starts is ready, what drains has ended
            resting = wanted == 0
            there = [replace(one, state="ready") if one.state == "starting" else one for one in there]
            there = [
                replace(one, state="resting") if one.state == "draining" and resting and one.current else one
                for one in there
                if one.state != "draining" or (resting and one.current)
            ]
    serving = [one for one in there if one.state == "ready"]
    assert len(serving) == wanted and all(one.current for one in serving)
    assert len(there) - len(serving) <= (1 if wanted == 0 else 0)
