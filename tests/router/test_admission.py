"""Whether a request is taken: bounds, shares of tenants, quotas, what is foretold, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from chiasm.errors import InvalidRequest, Overloaded
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.admission import Admission, AdmissionLimits, check_fits, cost_of
from router.memory import Memory, resident_bytes
from router.pace import Pace
from router.tenants import Quota, Tenant
from tests.asking import image, question


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def tenant(name: str, quota: Quota | None = None) -> Tenant:
    return Tenant(name, bytes(32), quota or Quota())


A, B = tenant("a"), tenant("b")


@contextmanager
def refused(reason: str) -> Iterator[None]:
    with pytest.raises(Overloaded) as caught:
        yield
    assert caught.value.reason == reason and caught.value.retry_after, caught.value


def fill(stack: ExitStack, admission: Admission, who: Tenant, *, cost: int = 1, most: int = 1000) -> int:
    """As many as are taken."""
    for count in range(most):
        try:
            stack.enter_context(admission.admit(who, cost, seconds=60))
        except Overloaded:
            return count
    return most


def test_requests_and_what_they_cost_are_bounded_and_given_back() -> None:
    admission = Admission(AdmissionLimits(requests=3, cost=100))
    with admission.admit(A, 60, seconds=60):
        with refused("QUEUE_FULL"), admission.admit(A, 50, seconds=60):
            pass
        with admission.admit(A, 20, seconds=60), admission.admit(A, 20, seconds=60):
            assert (admission.requests, admission.cost) == (3, 100)
            with refused("QUEUE_FULL"), admission.admit(A, 0, seconds=60):
                pass
    assert (admission.requests, admission.cost, len(admission)) == (0, 0, 0)
    with pytest.raises(ZeroDivisionError), admission.admit(A, 5000, seconds=60):  # alone, whatever it costs
        raise ZeroDivisionError
    assert (admission.requests, admission.cost, len(admission)) == (0, 0, 0)


def test_one_tenant_alone_has_all_and_among_several_none_has_so_much_that_another_finds_no_room() -> None:
    with ExitStack() as stack:
        assert fill(stack, Admission(AdmissionLimits(requests=90)), A) == 90
    admission = Admission(AdmissionLimits(requests=90, cost=1 << 30), several=True)
    with ExitStack() as stack:
        loud = fill(stack, admission, A)
        assert loud == 80, "eight ninths"
        others = [fill(stack, admission, tenant(f"t{number}"), most=1) for number in range(9)]
        assert all(others), "and there is room for one more, and one more"
    assert (admission.requests, admission.cost, len(admission)) == (0, 0, 0)


def test_shares_are_of_costs_too() -> None:
    admission = Admission(AdmissionLimits(cost=900), several=True)
    with ExitStack() as stack:
        assert fill(stack, admission, A, cost=100) == 8
        assert fill(stack, admission, B, cost=100) == 1


def test_a_quota_bounds_one_tenant_and_no_other() -> None:
    clock = Clock()
    admission = Admission(several=True, clock=clock)
    bounded = tenant("bounded", Quota(requests=2, cost_per_minute=600))
    with ExitStack() as stack:
        assert fill(stack, admission, bounded, cost=100) == 2
        assert fill(stack, admission, A, cost=100, most=20) == 20
    for _ in range(4):
        with admission.admit(bounded, 100, seconds=60):
            pass
    with pytest.raises(Overloaded) as caught, admission.admit(bounded, 100, seconds=60):
        pass
    assert (caught.value.reason, caught.value.retry_after) == ("TENANT_QUOTA", 10.0)
    clock.now += 10.0
    with admission.admit(bounded, 100, seconds=60):
        pass
    clock.now += 120.0
    with admission.admit(bounded, 5000, seconds=60):  # more than a minute's worth, after a rest
        pass
    assert len(admission) == 1, "what it has spent is remembered"
    clock.now += 3600.0
    with admission.admit(bounded, 1, seconds=60), admission.admit(A, 1, seconds=60):
        pass


def steady(admission: Admission, clock: Clock, who: Tenant, *, rate: float, count: int, wait: float) -> None:
    """Requests that begin at a rate, each after a wait."""
    with ExitStack() as stack:
        waiting = [stack.enter_context(admission.admit(who, 10, seconds=60)) for _ in range(round(rate * wait))]
        for _ in range(count):
            clock.now += 1 / rate
            waiting.pop(0).began()
            waiting.append(stack.enter_context(admission.admit(who, 10, seconds=60)))
    for _ in range(3):
        clock.now += 100.0  # rest says nothing


def test_what_waits_is_foretold_from_the_pace_at_which_others_began_and_rest_says_nothing() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    assert pace.rate is None and pace.wait == 0.0
    for _ in range(30):
        pace.came(10)
        clock.now += 0.5
        pace.began(10)
        clock.now += 100.0
    pace.came(10)
    pace.came(30)
    assert pace.rate == pytest.approx(20.0) and pace.wait == pytest.approx(2.0)
    clock.now += 20.0  # nothing begins
    assert pace.wait > 4.0
    pace.left(10)
    pace.left(30)
    assert pace.waiting == 0 and pace.wait == 0.0


def test_who_would_wait_too_long_is_refused_before_anything_is_done_for_it() -> None:
    clock = Clock()
    admission = Admission(AdmissionLimits(wait=2.0), clock=clock)
    steady(admission, clock, A, rate=10, count=100, wait=1.0)
    with ExitStack() as stack:
        taken = fill(stack, admission, A, cost=10)
        assert 19 <= taken <= 22, "two seconds at ten a second"
        with pytest.raises(Overloaded) as caught:
            stack.enter_context(admission.admit(A, 10, seconds=60))
        assert caught.value.reason == "TOO_LATE" and (caught.value.retry_after or 0) >= 1.0
    with ExitStack() as stack:
        assert fill(stack, admission, A, cost=10, most=10) == 10
        with refused("TOO_LATE"):
            stack.enter_context(admission.admit(A, 10, seconds=0.5))  # its own time is shorter


def test_a_tenant_with_less_than_its_part_of_what_waits_does_not_wait_for_the_others() -> None:
    clock = Clock()
    admission = Admission(AdmissionLimits(wait=2.0), several=True, clock=clock)
    steady(admission, clock, A, rate=10, count=100, wait=1.0)
    with ExitStack() as stack:
        loud = fill(stack, admission, A, cost=10)
        quiet = fill(stack, admission, B, cost=10)
        assert quiet and loud / 2 <= quiet <= loud + 1
        with refused("TOO_LATE"):
            stack.enter_context(admission.admit(A, 10, seconds=60))


def test_memory_is_looked_at_once_a_second_and_refuses_uploads_before_requests() -> None:
    clock, looks, has = Clock(), 0, 900

    def read() -> int:
        nonlocal looks
        looks += 1
        return has

    admission = Admission(memory=Memory(1000, read=read, clock=clock), clock=clock)
    for _ in range(50):
        admission.check_upload()
        with admission.admit(A, 1, seconds=60):
            pass
    assert looks == 1
    for now_has, uploads, requests in ((930, False, True), (960, False, False), (500, True, True)):
        clock.now, has = clock.now + 1.0, now_has
        assert (_passes(admission.check_upload), _passes(lambda: fill_one(admission))) == (uploads, requests)
    assert resident_bytes() > 1 << 20


def fill_one(admission: Admission) -> None:
    with admission.admit(A, 1, seconds=60):
        pass


def _passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except Overloaded:
        return False
    return True


def test_what_a_request_costs_is_told_by_its_text_its_media_and_its_answers() -> None:
    words = question("word " * 4000, max_tokens=100)
    assert 5000 <= cost_of(words) <= 5300
    seen = question("?", image(bytes(100_000)), max_tokens=100)
    assert 450 <= cost_of(seen) <= 600
    words.sampling.n = 4
    assert 5300 <= cost_of(words) <= 5600
    upload = question("?", pb.Media(kind=pb.MEDIA_KIND_VIDEO, handle="0" * 32), max_tokens=1)
    assert cost_of(upload) >= 1024
    assert cost_of(rpb.GenerateRequest()) == 256


def test_what_can_never_run_is_refused_before_a_medium_is_opened() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_fits(question("?", image(b"x"), max_tokens=1001), 1000)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED" and caught.value.facts["needed"] == 1001
    check_fits(question("?", max_tokens=1000), 1000)
