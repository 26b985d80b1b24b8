"""Numbers of records: what they mean, what they are held against, and the page that shows them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from chiasm.errors import InvalidRequest
from loadtest.figures import figures, under_way
from loadtest.plan import Plan, Slo, Step
from loadtest.record import Record
from loadtest.report import Stage, page, verdict

PLAN = Plan("here", "digits", "image", ())
OPEN = Step(rate=2.0, requests=4)


def records() -> list[Record]:
    """Four seconds of an open loop: two good answers, a wrong one and one that was refused; one was sent late."""
    return [
        Record(0, 10.0, "completed", 0.0, 2.0, 1.0, gaps=[0.5, 0.5], tokens=3, prompt_tokens=5, right=True),
        Record(1, 11.0, "completed", 0.5, 3.0, 1.5, gaps=[1.5], tokens=2, prompt_tokens=5, right=True),
        Record(2, 12.0, "completed", 0.0, 1.0, 0.5, tokens=1, prompt_tokens=5, right=False, text="9"),
        Record(3, 12.5, "refused", 0.0, 0.5, reason="QUEUE_FULL"),
    ]


def test_rates_count_what_was_completed_over_the_time_from_first_to_last() -> None:
    said = figures(PLAN, OPEN, records(), Slo())
    assert said["duration"] == 4.0
    assert (said["completed"], said["refused"], said["failed"], said["wrong"], said["judged"]) == (3, 1, 0, 1, 3)
    assert said["request_throughput"] == 3 / 4
    assert said["output_throughput"] == 6 / 4
    assert said["total_token_throughput"] == 21 / 4
    assert said["reasons"] == {"QUEUE_FULL": 1}


def test_times_of_an_open_loop_count_from_when_a_request_was_due() -> None:
    said = figures(PLAN, OPEN, records(), Slo())
    assert said["median_ttft_ms"] == 1000.0
    assert said["mean_ttft_ms"] == pytest.approx(1000 * (1.0 + 2.0 + 0.5) / 3)
    assert said["mean_e2el_ms"] == pytest.approx(1000 * (2.0 + 3.5 + 1.0) / 3)
    assert said["mean_itl_ms"] == pytest.approx(1000 * 2.5 / 3)
    assert said["mean_tpot_ms"] == pytest.approx(1000 * (0.5 + 1.5) / 2)


def test_the_mean_concurrency_is_what_the_requests_under_way_integrate_to() -> None:
    said = figures(PLAN, OPEN, records(), Slo())
    steps = under_way(records())
    area = sum((after - before) * running for (before, running), (after, _) in pairwise(steps))
    assert said["mean_concurrency"] == pytest.approx(area / 4.0)
    assert said["max_concurrent_requests"] == 3


def test_a_good_request_keeps_every_limit_and_is_not_wrong() -> None:
    assert figures(PLAN, OPEN, records(), Slo())["request_goodput"] == 2 / 4
    assert figures(PLAN, OPEN, records(), Slo.read("ttft_ms=1500"))["request_goodput"] == 1 / 4
    assert figures(PLAN, OPEN, records(), Slo.read("itl_ms=600,e2el_ms=9000"))["request_goodput"] == 1 / 4


@pytest.mark.parametrize(
    ("slo", "fault"),
    [
        ("ttft_ms=1500", "p99 ttft_ms is"),
        ("itl_ms=100", "p99 itl_ms is"),
        ("refused=0.2", "25.0% were refused"),
        ("", "1 of 3 answers were wrong"),
    ],
)
def test_what_does_not_hold_is_named_with_both_numbers(slo: str, fault: str) -> None:
    assert any(fault in said for said in figures(PLAN, OPEN, records(), Slo.read(slo))["missed"])


def test_refusals_alone_are_no_fault_and_nothing_completed_is_one() -> None:
    good = records()[:2]
    assert figures(PLAN, OPEN, [*good, records()[3]], Slo.read("ttft_ms=5000"))["missed"] == []
    assert figures(PLAN, OPEN, [records()[3]], Slo())["missed"] == ["nothing was completed"]
    assert figures(PLAN, OPEN, [*good, Record(9, 12.0, reason="CONNECTION_LOST")], Slo())["missed"] == ["1 of 3 failed"]


@pytest.mark.parametrize("text", ["ttft=800", "ttft_ms", "ttft_ms=soon", "ttft_ms=-1", "itl_ms=nan"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="slo"):
        Slo.read(text)


def test_the_page_needs_nothing_from_elsewhere_and_escapes_what_it_is_told() -> None:
    odd = [*records(), Record(4, 13.0, "failed", whole=0.1, reason="<script>alert(1)</script>")]
    stages = [Stage(str(step), figures(PLAN, step, odd, Slo()), odd) for step in (OPEN, Step(rate=4.0, requests=4))]
    told = page(stages, "chiasm load --rate 2 '<b>'", "today")
    assert not re.search(r"https?:|//[a-z]|src=|href=|url\(|@import|<script", told)
    assert "default-src 'none'" in told
    assert told.count("<svg") == 2 + 2 * 4
    assert "QUEUE_FULL" in told and "&lt;script&gt;" in told and "&lt;b&gt;" in told


def test_the_verdict_says_up_to_where_everything_held() -> None:
    held = Stage("2 requests/s", figures(PLAN, OPEN, records()[:2], Slo()), records()[:2])
    missed = Stage("4 requests/s", figures(PLAN, OPEN, records(), Slo()), records())
    assert verdict([held]) == "Everything held at 2 requests/s"
    assert verdict([held, missed]) == "Everything held up to 2 requests/s"
    assert verdict([missed]).startswith("Did not hold at 4 requests/s: 1 of 3 answers were wrong")
