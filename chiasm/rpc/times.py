"""Seconds as Duration messages and back, to the nanosecond."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration


def to_duration(seconds: float) -> Duration:
    """Finite seconds of either sign."""
    nanos = round(seconds * 1e9)
    sign = -1 if nanos < 0 else 1
    whole, rest = divmod(abs(nanos), 1_000_000_000)
    return Duration(seconds=sign * whole, nanos=sign * rest)


def to_seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
