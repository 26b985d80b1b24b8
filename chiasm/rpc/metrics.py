"""What a worker measures, as Prometheus families made when they are asked for: nothing is counted twice, and a counter
is there at 0 from the start.

The names are those of vLLM behind our prefix, where it has one for the thing. What the numbers mean to a service is
told by whoever calls these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from chiasm.rpc.turns import Turns

REJECTIONS = ("QUEUE_FULL", "CACHE_FULL", "KV_POOL_FULL")
"""Reasons of `chiasm_admission_rejections_total` that are there from the start."""


class Collecting(Collector):
    """Makes the families anew at each scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families()

    def describe(self) -> Iterator[Metric]:
        return self.collect()


class Families:
    """Makes families whose samples all carry the model's name.

    Args:
        model: what requests call it.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, None, {"": value})

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self.counters(name, text, None, {"": value})

    def gauges(self, name: str, text: str, label: str | None, values: Mapping[str, float]) -> Metric:
        """One sample for each value, told apart by `label`."""
        return self._fill(GaugeMetricFamily(f"chiasm_{name}", text, labels=self._labels(label)), label, values)

    def counters(self, name: str, text: str, label: str | None, values: Mapping[str, float]) -> Metric:
        """As `gauges`. The format adds `_total` to the name."""
        return self._fill(CounterMetricFamily(f"chiasm_{name}", text, labels=self._labels(label)), label, values)

    def calls(self, turns: Turns, rejections: Mapping[str, int]) -> Iterator[Metric]:
        """What every worker tells of its calls."""
        yield self.gauge("num_requests_running", "Calls being worked on.", turns.running)
        yield self.gauge("num_requests_waiting", "Calls that wait.", turns.waiting)
        yield self.counters(
            "admission_rejections",
            "Calls refused for now, by reason.",
            "reason",
            {**dict.fromkeys(REJECTIONS, 0), **rejections},
        )

    def _labels(self, label: str | None) -> list[str]:
        return ["model_name", *([label] if label else [])]

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, label: str | None, values: Mapping[str, float]
    ) -> Metric:
        for key, value in values.items():
            family.add_metric([self._model, *([key] if label else [])], value)
        return family
