"""The plain port over real sockets: what probes and scrapers see, also of a process that hangs."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chiasm.rpc.http import PlainPort
from tests.rpc.plain import Answer, fetch


async def get(port: PlainPort, path: str, *, method: str = "GET", accept: str = "*/*") -> Answer:
    return await asyncio.to_thread(fetch, port.address, path, method=method, accept=accept)


def port(
    *,
    missing: list[str] | None = None,
    registry: CollectorRegistry | None = None,
    stalled: float = 10,
    patience: float = 10,
) -> PlainPort:
    lacks = [] if missing is None else missing
    return PlainPort(
        "127.0.0.1:0",
        registry=registry or CollectorRegistry(),
        missing=lambda: lacks,
        stalled=stalled,
        patience=patience,
    )


async def test_ready_follows_what_is_missing() -> None:
    missing = ["an encoder", "weights"]
    async with port(missing=missing) as plain:
        answer = await get(plain, "/readyz")
        assert (answer.status, answer.told) == (503, {"ready": False, "missing": ["an encoder", "weights"]})
        missing.clear()
        answer = await get(plain, "/readyz")
        assert (answer.status, answer.told) == (200, {"ready": True, "missing": []})
        assert answer.kind == "application/json"


async def test_a_loop_that_hangs_is_told_dead_and_comes_back_to_life() -> None:
    told: list[Answer] = []
    async with port(stalled=0.6) as plain:
        assert (await get(plain, "/healthz")).status == 200

        def ask_until_dead() -> None:
            while not told or told[-1].status == 200:
                told.append(fetch(plain.address, "/healthz"))

        asking = threading.Thread(target=ask_until_dead)
        asking.start()
        while asking.is_alive():
            time.sleep(0.01)  # noqa: ASYNC251 - the loop hangs, which is the point
        assert told[-1].status == 503
        assert told[-1].told["alive"] is False
        await asyncio.sleep(0.01)  # one beat
        assert (await get(plain, "/healthz")).status == 200


async def test_metrics_are_those_of_the_registry_and_collected_on_the_loop() -> None:
    threads: list[threading.Thread] = []

    class Asked(Collector):
        def collect(self) -> Iterator[Metric]:
            threads.append(threading.current_thread())
            yield GaugeMetricFamily("chiasm_pool", "A pool.", value=0.5)

    registry = CollectorRegistry()
    registry.register(Asked())
    threads.clear()
    Counter("chiasm_things", "Things.", registry=registry).inc(3)
    async with port(registry=registry) as plain:
        answer = await get(plain, "/metrics")
        assert answer.status == 200
        assert answer.kind.startswith("text/plain")
        assert "chiasm_pool 0.5" in answer.body
        assert "chiasm_things_total 3.0" in answer.body
        assert "python_gc" not in answer.body, "nothing of the library's own registry"
        assert threads == [threading.main_thread()]
        modern = await get(plain, "/metrics", accept="application/openmetrics-text; version=1.0.0")
        assert modern.kind.startswith("application/openmetrics-text")
        assert modern.body.endswith("# EOF\n")


async def test_metrics_of_a_loop_that_hangs_are_refused() -> None:
    told: list[Answer] = []
    async with port(patience=0.2) as plain:
        asking = threading.Thread(target=lambda: told.append(fetch(plain.address, "/metrics")))
        asking.start()
        while asking.is_alive():
            time.sleep(0.01)  # noqa: ASYNC251 - the loop hangs, which is the point
    assert told[0].status == 503
    assert "did not answer" in str(told[0].told["error"])


async def test_other_paths_and_methods_are_refused() -> None:
    async with port() as plain:
        assert (await get(plain, "/")).status == 404
        assert (await get(plain, "/metrics/../etc/passwd")).status == 404
        assert (await get(plain, "/healthz", method="POST")).status == 405
        head = await get(plain, "/healthz", method="HEAD")
        assert (head.status, head.body) == (200, "")


async def test_an_address_in_use_is_an_error() -> None:
    async with port() as first:
        with pytest.raises(OSError, match="cannot listen: Address already in use"):
            async with PlainPort(first.address, registry=CollectorRegistry(), missing=list):
                pass


async def test_it_listens_on_ipv6_too() -> None:
    plain = PlainPort("[::1]:0", registry=CollectorRegistry(), missing=list)
    async with plain:
        assert plain.address.startswith("[::1]:")
        assert (await get(plain, "/readyz")).status == 200


async def test_nothing_answers_once_it_is_left() -> None:
    async with port() as plain:
        pass
    with pytest.raises(urllib.error.URLError):
        await get(plain, "/healthz")
