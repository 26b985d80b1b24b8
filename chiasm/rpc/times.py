"""Seconds as Duration messages and back, to the nanosecond: the only place where one becomes the other. And how many
a call has left."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

_NANOS: Final = 1_000_000_000


def to_duration(seconds: float) -> Duration:
    """Finite seconds of either sign."""
    nanos = round(seconds * 1e9)
    sign = -1 if nanos < 0 else 1
    whole, rest = divmod(abs(nanos), _NANOS)
    return Duration(seconds=sign * whole, nanos=sign * rest)


def to_seconds(duration: Duration) -> float:
    """The nearest float: what `to_duration` was given comes back equal if it is a whole number of nanoseconds."""
    return (duration.seconds * _NANOS + duration.nanos) / _NANOS


def seconds_left(context: Any) -> float | None:
    """Until the caller of a gRPC method leaves. None where there is no deadline, or no socket between the two."""
    left: float | None = None if context is None else context.time_remaining()
    return left
