"""When what has died is started again: arithmetic on times."""

from __future__ import annotations

from router.restarts import Deaths, Patience

PATIENCE = Patience(first=0.5, longest=4.0, steady=30.0)


def test_every_death_in_a_row_doubles_the_wait_up_to_the_longest() -> None:
    deaths, waits = Deaths(), []
    for at in range(0, 60, 10):
        deaths = deaths.after(PATIENCE, lived=1.0, now=float(at))
        waits.append(deaths.not_before - at)
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0] and deaths.count == 6


def test_one_that_was_steady_begins_a_new_row_and_is_counted_all_the_same() -> None:
    deaths = Deaths(count=7, row=7, not_before=0.0).after(PATIENCE, lived=31.0, now=100.0)
    assert (deaths.count, deaths.row, deaths.not_before) == (8, 1, 100.5)


def test_several_deaths_at_once_shorten_no_wait() -> None:
    deaths = Deaths(count=3, row=3, not_before=104.0).after(PATIENCE, lived=99.0, now=100.0)
    assert deaths.not_before == 104.0


def test_a_row_of_thousands_has_a_wait() -> None:
    assert Deaths(row=5000).after(PATIENCE, lived=0.0, now=0.0).not_before == 4.0
