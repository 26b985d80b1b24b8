"""`python -m tests.faults.injectors.shifted_clock FILE MODULE …`: a module whose wall clock is beside the truth.

FILE holds by how many seconds; it may be replaced at any time. `time.time` and `time.time_ns` are shifted, and the
`datetime` that logs are stamped with; monotonic clocks are not. gRPC makes a deadline of Python's clock and reads it by
the C library's, so its modules keep the true one.
"""

from __future__ import annotations

import datetime as datetimes
import importlib
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import grpc._channel
import grpc.aio._utils


def shift(file: Path) -> None:
    """Puts the shifted clock in the place of Python's."""
    true, true_ns = time.time, time.time_ns

    modules: tuple[Any, ...] = (grpc._channel, grpc.aio._utils, importlib.import_module("grpc._cython.cygrpc"))
    for module in modules:
        module.time = SimpleNamespace(**vars(time))

    def seconds() -> float:
        return float(file.read_text())

    class Shifted(datetimes.datetime):
        @classmethod
        def now(cls, tz: datetimes.tzinfo | None = None) -> Self:
            return cls.fromtimestamp(time.time(), tz)

    time.time = lambda: true() + seconds()
    time.time_ns = lambda: true_ns() + int(seconds() * 1e9)
    datetimes.datetime = Shifted  # type: ignore[misc]


if __name__ == "__main__":
    shift(Path(sys.argv[1]))
    module, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
