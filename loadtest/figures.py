"""Numbers of records, under the names that `vllm bench serve` gives them, and whether they hold.

TTFT: from when a request was due (open loop) or sent (closed loop) to its first event with tokens. ITL: between two
such events. TPOT: seconds a token after the first, for each request. E2EL: to the end of the stream. Percentiles are of
completed requests; refused and failed ones have no times and are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from loadtest.plan import TIMES, Plan, Slo, Step
from loadtest.record import Record

PERCENTILES: Final = (50, 90, 95, 99)


def figures(plan: Plan, step: Step, records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    """One step in numbers: rates in 1/s, `duration` in seconds from the first request to the end of the last, times in
    milliseconds."""
    done = [record for record in records if record.outcome == "completed"]
    counts = Counter(record.outcome for record in records)
    began, ended = min((r.sent for r in records), default=0.0), max((r.ended for r in records), default=0.0)
    duration = max(ended - began, 1e-9)
    asked, drawn = sum(record.prompt_tokens for record in done), sum(record.tokens for record in done)
    said: dict[str, Any] = {
        "backend": "chiasm-grpc",
        "model_id": plan.model,
        "scenario": plan.scenario,
        "num_prompts": len(records),
        "request_rate": "inf" if step.rate is None else step.rate,
        "arrivals": "closed loop" if step.rate is None else plan.arrivals,
        "max_concurrency": step.concurrency,
        "duration": duration,
        "completed": len(done),
        "failed": counts["failed"],
        "refused": counts["refused"],
        "wrong": sum(record.wrong for record in done),
        "judged": sum(record.right is not None for record in done),
        "total_input_tokens": asked,
        "total_visual_tokens": sum(record.visual_tokens for record in done),
        "total_output_tokens": drawn,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(good(record, slo) for record in done) / duration,
        "output_throughput": drawn / duration,
        "total_token_throughput": (asked + drawn) / duration,
        "mean_concurrency": sum(record.whole for record in records) / duration,
        "max_concurrent_requests": peak(records),
        "units": sum(record.units for record in done),
        "units_cached": sum(record.units_cached for record in done),
    }
    seconds = {
        "ttft": [record.ttft for record in done if record.ttft is not None],
        "tpot": [record.tpot for record in done if record.tokens > 1],
        "itl": [gap for record in done for gap in record.gaps],
        "e2el": [record.e2el for record in done],
        "ttfv": [record.late + record.first_visible for record in done if record.first_visible is not None],
        "late": [record.late for record in records],
    }
    for name, values in seconds.items():
        said |= spread(name, values)
    said["stages_ms"] = stages(done)
    said["reasons"] = dict(Counter(record.reason for record in records if record.outcome != "completed").most_common())
    said["slo"] = dict(slo.limits)
    said["missed"] = missed(said, slo)
    return said


def spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles of some times, in milliseconds; None where there were no such times."""
    told: dict[str, float | None] = {}
    values = 1000 * np.asarray(seconds, dtype=np.float64)
    some = len(seconds) > 0
    told[f"mean_{name}_ms"] = float(values.mean()) if some else None
    told[f"median_{name}_ms"] = float(np.median(values)) if some else None
    told[f"std_{name}_ms"] = float(values.std()) if some else None
    for share in PERCENTILES:
        told[f"p{share}_{name}_ms"] = float(np.percentile(values, share)) if some else None
    return told


def stages(done: Sequence[Record]) -> dict[str, float]:
    """Milliseconds that a request spent at each stage in the mean, as the server says."""
    names = dict.fromkeys(name for record in done for name in record.stages)
    return {name: 1000 * sum(record.stages.get(name, 0.0) for record in done) / len(done) for name in names}


def good(record: Record, slo: Slo) -> bool:
    """Whether a request keeps every limit on times by itself, and its answer is not wrong."""
    if record.outcome != "completed" or record.wrong:
        return False
    kept = ((record.milliseconds(name), slo.limits[name]) for name in TIMES if name in slo.limits)
    return all(value is not None and value <= limit for value, limit in kept)


def missed(said: dict[str, Any], slo: Slo) -> list[str]:
    """What does not hold. Without limits: that nothing fails, that something completes, and that no answer is wrong."""
    found = []
    if not said["completed"]:
        found.append("nothing was completed")
    if said["failed"]:
        found.append(f"{said['failed']} of {said['num_prompts']} failed")
    if said["wrong"]:
        found.append(f"{said['wrong']} of {said['judged']} answers were wrong")
    for name, limit in slo.limits.items():
        if name == "refused":
            share = said["refused"] / max(1, said["num_prompts"])
            if share > limit:
                found.append(f"{share:.1%} were refused, at most {limit:.1%} may be")
        else:
            value = said[f"p99_{name}"]
            if value is not None and value > limit:
                found.append(f"p99 {name} is {value:.1f}, at most {limit:g}")
    return found


def peak(records: Sequence[Record]) -> int:
    """Most requests that were under way at a time."""
    return max((running for _, running in under_way(records)), default=0)


def under_way(records: Sequence[Record]) -> list[tuple[float, int]]:
    """How many requests were under way from each moment on that changed it; seconds of the wall clock."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    told, running = [], 0
    for moment, change in changes:
        running += change
        told.append((moment, running))
    return told
