"""What an encoder measures."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from chiasm.cache.metrics import tiers
from chiasm.rpc.metrics import Collecting, Families
from encoder_service.servicer import EncoderServicer


def collector(servicer: EncoderServicer) -> Collecting:
    """Of one servicer. It is asked on the servicer's event loop."""
    families = Families(servicer.name)

    def collect() -> Iterator[Metric]:
        yield from families.calls(servicer.turns, servicer.rejections)
        counts = servicer.engine.counts
        known = counts.cached_units + counts.joined_units
        outcomes = {
            "encoded": counts.encoded_units,
            "cached": counts.cached_units,
            "joined": counts.joined_units,
            "dropped": counts.dropped_units,
        }
        yield families.counters("encoder_units", "Units by what became of them.", "outcome", outcomes)
        yield families.gauge(
            "encoder_units_in_flight", "Units that wait for the model or are in it.", servicer.engine.in_flight
        )
        asked = known + counts.encoded_units
        yield families.counter("mm_cache_queries", "Units that were looked for before they were encoded.", asked)
        yield families.counter("mm_cache_hits", "Units that were there, or on their way.", known)
        memo = servicer.memo
        yield families.counter(
            "encoder_memo_queries", "Media that were looked for before they were opened.", memo.hits + memo.misses
        )
        yield families.counter("encoder_memo_hits", "Media that were known, whose units were told by key.", memo.hits)
        yield families.counter("encoder_memo_rejections", "Records of media that were not believed.", memo.rejected)
        yield families.counter("encoder_media_spared_bytes", "Bytes of media that needed not be sent.", memo.spared)
        wrong = {"header": counts.rejected_headers}
        yield families.counters("kv_rejected", "Entries that were not believed and made again.", "reason", wrong)
        held = servicer.engine.store.stats()
        yield families.gauge("encoder_cache_entries", "Entries that the store holds.", held.entries)
        yield families.gauge("encoder_cache_size_bytes", "Bytes of the entries that the store holds.", held.bytes)
        yield families.gauge("encoder_cache_pinned_bytes", "Bytes of the entries that are pinned.", held.pinned_bytes)
        yield families.gauge("encoder_cache_budget_bytes", "Bytes that the store may hold.", held.budget)
        yield families.counter("encoder_cache_evictions", "Entries that made room for others.", held.evictions)
        yield from tiers(families, servicer.engine.store)

    return Collecting(collect)
