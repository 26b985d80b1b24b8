"""What is measured of the stores of a worker, tier by tier.

It reads what the stores count. Of a store without tiers it tells nothing: whoever has one tells of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from chiasm.cache.breaker import State
from chiasm.cache.store import EntryStore
from chiasm.cache.tiers import TieredStore
from chiasm.rpc.metrics import Families


def tiers(families: Families, store: EntryStore) -> Iterator[Metric]:
    """Of a worker's store, as it is now."""
    if not isinstance(store, TieredStore):
        return
    held = store.tiers()
    far, link = store.far, store.far.link
    for name, text in (
        ("puts", "Entries that were put into a tier."),
        ("hits", "Entries that were asked for in a tier, and there."),
        ("misses", "Entries that were asked for in a tier, and not there."),
        ("refusals", "Entries that a tier did not take."),
    ):
        counts = {tier: getattr(stats, name) for tier, stats in held.items()}
        yield families.counters(f"cache_tier_{name}", text, "tier", counts)
    yield families.counters(
        "shared_cache_refused", "Entries that were not put into the shared tier, by reason.", "reason", far.refused
    )
    yield families.counters(
        "shared_cache_rejected", "What the shared tier held and was no entry, by reason.", "reason", far.rejected
    )
    yield families.counters(
        "shared_cache_failures", "Exchanges with the shared tier that brought no answer, by reason.", "reason",
        link.failures,
    )  # fmt: skip
    states = {state.value: float(link.breaker.state is state) for state in State}
    yield families.gauges("shared_cache_breaker", "1 for the state that the breaker is in.", "state", states)
    yield families.counter("shared_cache_breaker_opened", "How often the breaker opened.", link.breaker.opened)
    yield families.gauge("shared_cache_behind_bytes", "Entries that wait to be written, in bytes.", store.behind.bytes)
    yield families.counter(
        "shared_cache_behind_dropped", "Entries for which there was no room to wait.", store.behind.dropped
    )
