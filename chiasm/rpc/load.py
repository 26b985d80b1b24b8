"""How busy a worker is, told along with what it says anyway: with the first message of a call, with the last, and
about once a second between. So a router knows it without asking, and a token costs no more than it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from chiasm.rpc.times import to_duration
from chiasm.rpc.turns import Turns
from chiasm.rpc.v1 import common_pb2 as pb

SECONDS: Final = 1.0
"""Between two times that a call tells it."""


class Response(Protocol):
    """A message that a load may ride on."""

    @property
    def load(self) -> pb.Load: ...


def load_of(turns: Turns, pool_usage: float) -> pb.Load:
    """What a worker says of its calls and of its scarcest pool."""
    return pb.Load(
        running=turns.running,
        waiting=turns.waiting,
        oldest_wait=to_duration(turns.oldest_wait),
        pool_usage=pool_usage,
        queued_cost=turns.cost,
    )


class Riding:
    """The load on the messages of one call.

    Args:
        load: asked when it is told.
        clock: seconds, monotonic.
    """

    def __init__(self, load: Callable[[], pb.Load], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._clock = clock
        self._next = 0.0

    def on(self, response: Response, *, last: bool = False) -> None:
        """Lets it ride on a message, if it is time to."""
        now = self._clock()
        if last or now >= self._next:
            self._next = now + SECONDS
            response.load.CopyFrom(self._load())
