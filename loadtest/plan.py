"""What a load is: against whom, what is asked, how often, and what it has to hold. Plain values; no guidellm here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Literal, TypeAlias

from chiasm.errors import InvalidRequest

Arrivals: TypeAlias = Literal["poisson", "constant"]

TIMES: Final = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
"""Times of a request that a limit can be set on."""

LIMITS: Final = (*TIMES, "refused")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a load has to hold.

    Attributes:
        limits: of `TIMES` milliseconds that 99 of 100 stay within; of `refused` the share of requests, from 0 to 1.
    """

    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Slo:
        """`ttft_ms=800,itl_ms=40`. Raises InvalidRequest FIELD_OUT_OF_RANGE."""
        limits: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, number = part.partition("=")
            try:
                limit = float(number)
            except ValueError:
                limit = -1.0
            if name not in LIMITS or not 0 <= limit < float("inf"):
                raise InvalidRequest.out_of_range("slo", part, f"NAME=NUMBER, where NAME is {', '.join(LIMITS)}")
            limits[name] = limit
        return cls(limits)


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that come in one manner. One of `rate` and `concurrency` is set.

    Attributes:
        rate: requests a second that come whether or not earlier ones are answered (an open loop).
        concurrency: callers, each of whom asks again when it was answered (a closed loop).
        requests: how many there are; None in a closed loop that lasts for `duration`.
        duration: seconds in which they come. All are waited for.
    """

    _: KW_ONLY
    rate: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        assert (self.rate is None) != (self.concurrency is None), "a loop is open or closed"
        assert self.requests is not None or self.duration is not None, "a step ends"

    @property
    def count(self) -> int | None:
        """Requests of the step; None where time alone bounds them."""
        if self.requests is not None:
            return self.requests
        assert self.duration is not None, "a step ends"
        return None if self.rate is None else max(1, round(self.rate * self.duration))

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate is not None else f"{self.concurrency} at once"


@dataclass(frozen=True, slots=True)
class Plan:
    """A load.

    Attributes:
        scenario: a name of `scenarios.SCENARIOS`.
        steps: are run one after the other.
        checked: whether answers are held against the right ones, where the scenario knows them; None: not known yet.
        fresh: whether each picture is one that no cache has seen.
        seed: of arrivals and of what is asked.
        max_tokens: bounds an answer.
        timeout: seconds of one request.
        processes: that send.
    """

    target: str
    model: str
    scenario: str
    steps: tuple[Step, ...]
    _: KW_ONLY
    arrivals: Arrivals = "poisson"
    checked: bool | None = None
    fresh: bool = False
    seed: int = 0
    max_tokens: int = 32
    timeout: float = 60.0
    processes: int = 1
