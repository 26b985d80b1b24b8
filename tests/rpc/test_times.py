"""Seconds survive the wire to the nanosecond."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from chiasm.rpc.limits import MAX_SECONDS
from chiasm.rpc.times import to_duration, to_seconds


@given(st.integers(-(10**15), 10**15))
def test_whole_nanoseconds_come_back_equal(nanos: int) -> None:
    assert to_seconds(to_duration(nanos / 1e9)) == nanos / 1e9


@given(st.floats(-MAX_SECONDS, MAX_SECONDS))
def test_any_time_comes_back_within_a_nanosecond_or_a_float(seconds: float) -> None:
    duration = to_duration(seconds)
    assert abs(to_seconds(duration) - seconds) <= max(1e-9, abs(seconds) * 2**-51)
    assert duration.seconds == 0 or duration.nanos == 0 or (duration.seconds > 0) == (duration.nanos > 0)


def test_a_negative_time_has_both_parts_negative() -> None:
    assert to_duration(-1.5) == Duration(seconds=-1, nanos=-500_000_000)
