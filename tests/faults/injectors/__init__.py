"""What is done to a system, a class each: `inject`, `verify`, which raises NoEffect unless it took effect, and `end`.

An injector that did nothing makes a test that passes, so none is believed by itself: `injected` does all three in turn,
and for each there is a control in `test_injectors.py`, the same injector at a target that it does not reach, whose
`verify` must raise. What the machine does not have or does not permit skips the test by name (`needed`).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import pytest

PATIENCE = 30.0
"""Seconds in which a fault must have taken effect."""


class NoEffect(AssertionError):
    """A fault that did nothing: the run proves nothing."""


class Injector(Protocol):
    """One fault."""

    def inject(self) -> None:
        """Does it."""
        ...

    def verify(self) -> None:
        """Raises NoEffect unless it took effect."""
        ...

    def end(self) -> None:
        """Undoes it as far as it can be undone. May be called after `inject` failed."""
        ...


Fault = TypeVar("Fault", bound=Injector)


def proved(effect: object, what: str) -> None:
    if not effect:
        raise NoEffect(what)


def proved_soon(effect: Callable[[], object], what: str, *, seconds: float = PATIENCE) -> None:
    """Waits for an effect that others have to bring about."""
    end = time.monotonic() + seconds
    while not effect():
        proved(time.monotonic() < end, what)
        time.sleep(0.01)


@asynccontextmanager
async def injected(fault: Fault) -> AsyncIterator[Fault]:
    """The block runs under a fault that took effect. Beside the event loop, which may carry what is hurt."""
    try:
        await asyncio.to_thread(fault.inject)
        await asyncio.to_thread(fault.verify)
        yield fault
    finally:
        await asyncio.to_thread(fault.end)


def needed(program: str) -> str:
    """Where a program lies. Skips the test where the machine does not have it."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed here")
    return found
