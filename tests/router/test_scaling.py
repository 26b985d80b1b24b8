"""How many workers a pool wants: arithmetic on waits and times."""

from __future__ import annotations

from router.scaling import Scale, Seen, Wanted

SCALE = Scale(least=1, most=3, patience=1.0, settle=10.0, calm=60.0)
RESTS = Scale(least=0, most=2, patience=1.0, settle=10.0, calm=60.0)


def test_one_more_is_wanted_when_somebody_waits_too_long_and_not_again_before_it_could_help() -> None:
    wanted = Wanted.first(SCALE, 0.0)
    assert wanted.count == 1
    assert wanted.after(SCALE, Seen(0.9, 4, 1), 20.0).count == 1, "a short wait is no reason"
    wanted = wanted.after(SCALE, Seen(1.1, 4, 1), 20.0)
    assert wanted.count == 2
    assert wanted.after(SCALE, Seen(9.0, 4, 2), 29.0).count == 2, "it has just changed"
    assert wanted.after(SCALE, Seen(9.0, 4, 1), 99.0).count == 2, "the last one is not there yet"
    wanted = wanted.after(SCALE, Seen(9.0, 4, 2), 30.0)
    assert wanted.count == 3
    assert wanted.after(SCALE, Seen(99.0, 4, 3), 100.0).count == 3, "there may be no more"


def test_one_less_is_wanted_after_a_calm_time_and_never_less_than_the_least() -> None:
    wanted = Wanted(3, changed=0.0, calm_since=0.0)
    wanted = wanted.after(SCALE, Seen(0.0, 3, 3), 59.0)
    assert wanted.after(SCALE, Seen(0.0, 0, 3), 100.0).count == 3, "all were busy until a moment ago"
    wanted = wanted.after(SCALE, Seen(0.0, 2, 3), 119.0)
    assert wanted.count == 2
    assert wanted.after(SCALE, Seen(0.0, 0, 2), 150.0).count == 2, "one step at a time"
    assert Wanted(1, 0.0, 0.0).after(SCALE, Seen(0.0, 0, 1), 1e6).count == 1


def test_what_may_rest_begins_with_one_rests_when_it_is_calm_and_wakes_for_the_first_who_waits() -> None:
    wanted = Wanted.first(RESTS, 0.0)
    assert wanted.count == 1
    wanted = wanted.after(RESTS, Seen(0.0, 0, 1), 60.0)
    assert wanted.count == 0
    assert wanted.after(RESTS, Seen(0.0, 0, 0), 1e6).count == 0
    wanted = wanted.after(RESTS, Seen(0.001, 0, 0), 60.1)
    assert wanted.count == 1, "nobody has to have waited for long"
    assert wanted.after(RESTS, Seen(0.0, 0, 0), 61.0).count == 1, "it is calm since it woke"
