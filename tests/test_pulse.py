"""Threads that get on, and threads that do not."""

from __future__ import annotations

import threading

from chiasm.pulse import Pulse, PulsedThreads
from tests.waiting import until


def test_time_counts_from_the_first_work_given_and_anew_from_each_that_is_done() -> None:
    now = 0.0
    pulse = Pulse("model", clock=lambda: now)
    now = 50.0
    assert pulse.seconds == 0, "nothing to do is no reason to worry"
    pulse.given()
    pulse.given()
    now = 57.0
    pulse.given()
    assert pulse.seconds == 7
    pulse.done()
    now = 60.0
    assert pulse.seconds == 3, "busy is well"
    pulse.done()
    pulse.done()
    now = 90.0
    assert pulse.seconds == 0


async def test_threads_have_a_pulse_while_they_work_also_over_work_that_fails_or_is_taken_back() -> None:
    go = threading.Event()
    threads = PulsedThreads(1, "model")
    try:
        running = threads.submit(go.wait)
        taken_back = threads.submit(int)
        failing = threads.submit(int, "no number")
        await until(lambda: threads.pulse.seconds > 0)
        assert taken_back.cancel()
        go.set()
        assert running.result(10) and failing.exception(10) is not None
        await until(lambda: threads.pulse.seconds == 0)
    finally:
        go.set()
        threads.shutdown()
