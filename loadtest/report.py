"""A load as one page that opens anywhere: no script, no font and no picture comes from elsewhere."""

from __future__ import annotations

import html
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import jinja2
import numpy as np
from markupsafe import Markup

from chiasm import __version__
from loadtest.figures import under_way
from loadtest.record import Record

WIDTH: Final = 460
HEIGHT: Final = 200
MARGIN: Final = 46
COLOURS: Final = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Stage:
    """A step that was run: what it was, its numbers, its requests."""

    name: str
    said: dict[str, Any]
    records: Sequence[Record]


def page(stages: Sequence[Stage], command: str, when: str) -> str:
    """The report as HTML.

    Args:
        command: how the load was asked for.
        when: it began.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((files("loadtest") / "report.html").read_text(encoding="utf-8"))
    machine = f"{platform.node()}, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return template.render(
        verdict=verdict(stages),
        met=not any(stage.said["missed"] for stage in stages),
        stages=stages,
        graphs={stage.name: _graphs(stage) for stage in stages},
        across=_across(stages),
        command=command,
        when=when,
        environment=f"chiasm {__version__}; sent from {machine}",
        colours=COLOURS,
    )


def verdict(stages: Sequence[Stage]) -> str:
    """One sentence: up to where everything held."""
    held = [stage for stage in stages if not stage.said["missed"]]
    if len(held) == len(stages):
        return f"Everything held at {stages[-1].name}"
    if not held:
        return f"Did not hold at {stages[0].name}: {'; '.join(stages[0].said['missed'])}"
    return f"Everything held up to {max(held, key=lambda stage: stage.said['request_throughput']).name}"


def _graphs(stage: Stage) -> list[Markup]:
    done = [record for record in stage.records if record.outcome == "completed"]
    ttft = _shares([record.ttft for record in done if record.ttft is not None])
    gaps = _shares([gap for record in done for gap in record.gaps])
    whole = _shares([record.e2el for record in done])
    began = min((record.sent for record in stage.records), default=0.0)
    running = _thinned([(moment - began, float(count)) for moment, count in under_way(stage.records)], 400)
    return [
        graph("Time to first token", {"TTFT": ttft}, "ms", "share"),
        graph("Between two events with tokens", {"ITL": gaps}, "ms", "share"),
        graph("To the end of the answer", {"E2EL": whole}, "ms", "share"),
        graph("Requests under way", {"requests": running}, "s", "requests"),
    ]


def _across(stages: Sequence[Stage]) -> list[Markup]:
    """TTFT and TPOT against throughput, where there are several steps."""
    if len(stages) < 2:
        return []

    def over(name: str) -> Line:
        points = [(stage.said["request_throughput"], stage.said[name]) for stage in stages]
        return sorted((x, y) for x, y in points if y is not None)

    return [
        graph("TTFT against throughput", {"p50": over("median_ttft_ms"), "p99": over("p99_ttft_ms")}, "req/s", "ms"),
        graph("TPOT against throughput", {"p50": over("median_tpot_ms"), "p99": over("p99_tpot_ms")}, "req/s", "ms"),
    ]


def _shares(seconds: Sequence[float]) -> Line:
    """The share of times that are at most so long, in milliseconds, as 100 points at most."""
    values = 1000 * np.sort(np.asarray(seconds, dtype=np.float64))
    if not len(values):
        return []
    shares = np.linspace(0, 1, min(101, len(values) + 1))
    return [(float(np.quantile(values, share)), float(share)) for share in shares]


def _thinned(line: Line, most: int) -> Line:
    return line[:: max(1, -(-len(line) // most))]


def graph(title: str, lines: dict[str, Line], across: str, up: str) -> Markup:
    """Lines over a common field, from zero, as SVG."""
    points = [point for line in lines.values() for point in line]
    right = max((x for x, _ in points), default=0.0) or 1.0
    top = max((y for _, y in points), default=0.0) or 1.0
    inner, high = WIDTH - MARGIN - 12, HEIGHT - 2 * 28
    drawn = [
        f'<text x="{MARGIN}" y="16" class="title">{html.escape(title)}</text>',
        f'<path d="M{MARGIN} 28V{28 + high}H{WIDTH - 12}" class="axis"/>',
        f'<text x="{MARGIN - 6}" y="36" class="end">{top:.3g}</text>',
        f'<text x="{MARGIN - 6}" y="{28 + high}" class="end">0 {html.escape(up)}</text>',
        f'<text x="{WIDTH - 12}" y="{HEIGHT - 12}" class="end">{right:.3g} {html.escape(across)}</text>',
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{MARGIN + inner * x / right:.1f},{28 + high * (1 - y / top):.1f}" for x, y in line)
        drawn.append(f'<polyline points="{path}" stroke="{colour}" class="line"/>')
        at = WIDTH - 12 - 60 * (len(lines) - 1 - number)
        drawn.append(f'<text x="{at}" y="16" fill="{colour}" class="end">{html.escape(name)}</text>')
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>')
