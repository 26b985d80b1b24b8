"""What a router counts and logs of a request: how it ended, and the times its client felt. It knows events, no worker
and no text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from chiasm.errors import ChiasmError
from chiasm.rpc.v1 import router_pb2 as rpb

_log = logging.getLogger(__name__)

OPERATIONS = ("generate", "estimate", "upload")

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
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.running = 0
        running = Gauge("chiasm_num_requests_running", "Requests being served.", registry=self._registry)
        running.set_function(lambda: self.running)
        self._ended = Counter(
            "chiasm_requests", "Requests that ended, by what was asked and how.", ["operation", "reason"],
            registry=self._registry,
        )  # fmt: skip
        self._tokens = Counter("chiasm_generation_tokens", "Tokens told to clients.", registry=self._registry)
        self._first = Histogram(
            "chiasm_time_to_first_token_seconds", "From the request to its first token.", buckets=_FIRST_TOKEN,
            registry=self._registry,
        )  # fmt: skip
        self._between = Histogram(
            "chiasm_inter_token_latency_seconds", "Between two token events.", buckets=_BETWEEN, registry=self._registry
        )
        self._whole = Histogram(
            "chiasm_e2e_request_latency_seconds", "From the request to its end.", ["operation"], buckets=_WHOLE,
            registry=self._registry,
        )  # fmt: skip

        for operation in OPERATIONS:
            self._ended.labels(operation, OK)
            self._whole.labels(operation)

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    @contextmanager
    def request(self, operation: str, label: str) -> Iterator[Callable[[rpb.GenerateResponse], None]]:
        """Counts a request while the block runs, and logs one line at its end, however it ends.

        The function it gives is told each event of an answer.
        """
        began = time.monotonic()
        first = last = 0.0
        tokens = 0

        def told(event: rpb.GenerateResponse) -> None:
            nonlocal first, last, tokens
            if event.HasField("tokens"):
                now = time.monotonic()
                if last:
                    self._between.observe(now - last)
                else:
                    first = now - began
                    self._first.observe(first)
                last = now
                tokens += len(event.tokens.ids)
                self._tokens.inc(len(event.tokens.ids))

        reason = OK
        self.running += 1
        try:
            yield told
        except ChiasmError as error:
            reason = error.reason
            raise
        except BaseException as error:
            reason = "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
            raise
        finally:
            self.running -= 1
            seconds = time.monotonic() - began
            self._ended.labels(operation, reason).inc()
            self._whole.labels(operation).observe(seconds)
            facts = {"request_id": label, "operation": operation, "reason": reason, "seconds": round(seconds, 4)}
            if tokens:
                facts |= {"tokens": tokens, "first_token_seconds": round(first, 4)}
            _log.info("request", extra=facts)
