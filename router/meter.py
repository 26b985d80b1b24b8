"""What a router counts of requests: how they ended, and the times their clients felt. It knows events and no worker."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from chiasm.errors import ChiasmError
from chiasm.rpc.v1 import router_pb2 as rpb

OPERATIONS = ("generate", "embed", "estimate", "upload")

DROPPED = ("repeated", "stale")

OK = "OK"
"""The reason of a request that ended well; of any other it is that of its error, or CANCELLED."""

# The buckets that vLLM uses for the same three, so that its dashboards fit.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_BETWEEN = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


class Meter(Collector):
    """Counters of one router, collected together.

    Attributes:
        running: requests being served.
        tokens: told to clients.
        between: the times between two events with tokens.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.running = 0
        self.tokens = 0
        self.between = Between()
        running = Gauge("chiasm_num_requests_running", "Requests being served.", registry=self._registry)
        running.set_function(lambda: self.running)
        self._ended = Counter(
            "chiasm_requests", "Requests that ended, by what was asked and how.", ["operation", "reason"],
            registry=self._registry,
        )  # fmt: skip
        self.first = Histogram(
            "chiasm_time_to_first_token_seconds", "From the request to its first token.", buckets=_FIRST_TOKEN,
            registry=self._registry,
        )  # fmt: skip
        self._whole = Histogram(
            "chiasm_e2e_request_latency_seconds", "From the request to its end.", ["operation"], buckets=_WHOLE,
            registry=self._registry,
        )  # fmt: skip

        self._resumed = Counter(
            "chiasm_resumes", "Decoders that went on with an answer that another had begun.", registry=self._registry
        )
        self._dropped = Counter(
            "chiasm_dropped_responses", "Responses of decoders that were not told, by why.", ["why"],
            registry=self._registry,
        )  # fmt: skip

        for why in DROPPED:
            self._dropped.labels(why)
        for operation in OPERATIONS:
            self._ended.labels(operation, OK)
            self._whole.labels(operation)

    def collect(self) -> Iterable[Metric]:
        yield from self._registry.collect()
        yield CounterMetricFamily("chiasm_generation_tokens", "Tokens told to clients.", value=self.tokens)
        yield self.between.metric()

    def seams(self, found: Mapping[str, int]) -> None:
        """Counts what a stream went through, as `Coordinator.seams` names it."""
        self._resumed.inc(found.get("resumed", 0))
        for why in DROPPED:
            self._dropped.labels(why).inc(found.get(why, 0))

    @contextmanager
    def request(self, operation: str) -> Iterator[Telling]:
        """Counts a request while the block runs. What it gives is told each event of an answer."""
        telling = Telling(self)
        reason = OK
        self.running += 1
        try:
            yield telling
        except ChiasmError as error:
            reason = error.reason
            raise
        except BaseException as error:
            reason = "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
            raise
        finally:
            self.running -= 1
            self._ended.labels(operation, reason).inc()
            self._whole.labels(operation).observe(time.monotonic() - telling.began)


class Between:
    """A histogram of one thread, for what comes with every token: prometheus' own takes locks, and as long as handing
    the token on."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BETWEEN) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_BETWEEN, seconds)] += 1
        self._sum += seconds

    def metric(self) -> Metric:
        bounds = [*map(floatToGoString, _BETWEEN), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        name, about = "chiasm_inter_token_latency_seconds", "Between two token events."
        return HistogramMetricFamily(name, about, buckets=buckets, sum_value=self._sum)


class Telling:
    """The events of one answer as they are told.

    Attributes:
        facts: what there is to say of them: tokens, and seconds to the first.
    """

    def __init__(self, meter: Meter) -> None:
        self.began = time.monotonic()
        self.facts: dict[str, float] = {}
        self._meter = meter
        self._last = 0.0

    def __call__(self, event: rpb.GenerateResponse) -> None:
        if not event.HasField("tokens"):
            return
        now, count = time.monotonic(), len(event.tokens.ids)
        if self._last:
            self._meter.between.add(now - self._last)
        else:
            self.facts["first_token_seconds"] = round(now - self.began, 4)
            self._meter.first.observe(now - self.began)
        self._last = now
        self._meter.tokens += count
        self.facts["tokens"] = self.facts.get("tokens", 0) + count
