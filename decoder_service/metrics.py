"""What a decoder measures."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from chiasm.cache.metrics import tiers
from chiasm.rpc.metrics import Collecting, Families
from decoder_service.servicer import DecoderServicer

_REASONS = ("stop", "length", "closed")


def collector(servicer: DecoderServicer) -> Collecting:
    """Of one servicer. It is asked on the servicer's event loop."""
    families = Families(servicer.name)

    def collect() -> Iterator[Metric]:
        yield from families.calls(servicer.turns, servicer.rejections)
        yield families.gauges("kv_cache_usage_perc", "The share of a pool that is taken.", "pool", servicer.usage())
        yield families.counter(
            "prompt_tokens", "Text tokens of the prompts that were admitted.", servicer.prompt_tokens
        )
        yield families.counter(
            "visual_tokens", "Visual tokens of the prompts that were admitted.", servicer.visual_tokens
        )
        yield families.counter(
            "num_preemptions",
            "Sequences that gave their room back and were computed again.",
            servicer.model.scheduler.preempted,
        )
        rejections = servicer.model.rejections
        yield families.counters(
            "kv_rejected", "Entries that were not believed and made again, by reason.", "reason", rejections.counts
        )
        yield families.counter("kv_absent", "Entries that were announced and not there.", rejections.absent)
        yield families.counter("generation_tokens", "Tokens drawn.", servicer.generation_tokens)
        finished = {**dict.fromkeys(_REASONS, 0), **servicer.finished}
        yield families.counters("request_success", "Answers that ended, by reason.", "finished_reason", finished)
        yield from tiers(families, servicer.model.store)

    return Collecting(collect)
