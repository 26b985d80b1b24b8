"""`chiasm load`: a load against a router, followed while it runs, and what came of it.

What is for people goes to standard error; files are written where they are asked for. Knows the harness by its plain
values, and loads the rest of it, guidellm with it, when a load begins.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from chiasm.cli.ask import only
from chiasm.cli.failure import MISUSED, CommandFailed
from chiasm.cli.telling import line, program
from chiasm.client import AsyncClient
from chiasm.errors import ConnectionFailed
from loadtest.plan import Arrivals, Plan, Slo, Step

if TYPE_CHECKING:
    from loadtest.record import Record
    from loadtest.report import Stage

EXTRA = "load"

DURATION = 10.0
"""Seconds, where nothing is said."""

JUDGED = "digits"
"""The model whose answers are judged unless something else is said."""

EVERY = 2.0
"""Seconds between two lines of progress where there is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Files that are written; None for none."""

    json: Path | None = None
    html: Path | None = None


async def run(plan: Plan, slo: Slo, outputs: Outputs, people: Console) -> bool:
    """The command. Returns whether everything held.

    Args:
        plan: with an empty `model` for the only one that the router has.

    Raises ChiasmError, OSError for a file that cannot be written.
    """
    from loadtest.figures import figures
    from loadtest.report import Stage, page, verdict

    plan = await _ready(plan)
    when, stages = datetime.now(UTC), []
    for step in plan.steps:
        people.print(line("load", f"{plan.scenario}, {step}, against {plan.target}"), style="dim")
        records = await _followed(plan, step, people)
        stages.append(Stage(str(step), figures(plan, step, records, slo), records))
        _tell(stages[-1], people)
    command = shlex.join([program(), *sys.argv[1:]])
    if outputs.json is not None:
        said = {"date": when.isoformat(timespec="seconds"), "command": command, "seed": plan.seed, **stages[-1].said}
        said["steps"] = [{"step": stage.name, **stage.said} for stage in stages]
        outputs.json.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    if outputs.html is not None:
        outputs.html.write_text(page(stages, command, when.isoformat(" ", "seconds")), encoding="utf-8")
    people.print(line("verdict", verdict(stages)))
    return not any(stage.said["missed"] for stage in stages)


async def _ready(plan: Plan) -> Plan:
    """With the name of its model. One question is asked first: what could not be answered at all is told at once."""
    from loadtest.scenarios import Asking

    try:
        async with AsyncClient(plan.target, timeout=plan.timeout) as client:
            model = plan.model or only([model.name for model in await client.list_models()])
            plan = replace(plan, model=model, checked=model == JUDGED if plan.checked is None else plan.checked)
            question = Asking(plan.scenario, seed=plan.seed, fresh=False).question(0)
            await client.generate(plan.model, question.content, max_tokens=plan.max_tokens)
    except ConnectionFailed:
        fix = f"start a model with: {program()} serve digits"
        raise CommandFailed(f"no server answers at {plan.target}", "--target", fix) from None
    return plan


async def _followed(plan: Plan, step: Step, people: Console) -> list[Record]:
    from loadtest.drive import News, follow

    records: list[Record] = []
    progress = Progress(step)

    async def read(news: AsyncIterator[News], show: Any) -> None:
        async for record, running in news:
            if record is not None:
                records.append(record)
            progress.take(record, running)
            show()

    async with aclosing(follow(plan, step)) as news:  # type: ignore[type-var]
        if people.is_terminal:
            with Live(progress.table(), console=people, transient=True, refresh_per_second=4) as live:
                await read(news, lambda: live.update(progress.table()))
        else:

            def say() -> None:
                if progress.due():
                    people.print(progress.line())

            await read(news, say)
    return records


class Progress:
    """A step while it runs."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._began = self._told = time.monotonic()
        self._running = 0
        self._tokens = 0
        self._counts = dict.fromkeys(("completed", "refused", "failed", "wrong"), 0)
        self._first: list[float] = []

    def take(self, record: Record | None, running: int) -> None:
        if not self._running and not sum(self._counts.values()):
            self._began = time.monotonic()  # the processes that send have started
        self._running = running
        if record is None:
            return
        self._counts[record.outcome] += 1
        self._counts["wrong"] += record.wrong
        self._tokens += record.tokens
        if record.ttft is not None:
            self._first.append(record.ttft)

    def due(self) -> bool:
        """Whether it is time for another line."""
        if time.monotonic() < self._told + EVERY:
            return False
        self._told = time.monotonic()
        return True

    def line(self) -> str:
        return line("running", "  ".join(f"{name} {value}" for name, value in self._facts()))

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        facts = self._facts()
        for name, _ in facts:
            table.add_column(name, justify="right", min_width=9)
        table.add_row(*(value for _, value in facts))
        return table

    def _facts(self) -> Sequence[tuple[str, str]]:
        seconds = max(time.monotonic() - self._began, 1e-9)
        first = sorted(self._first[-200:])
        ended = sum(self._counts[name] for name in ("completed", "refused", "failed"))
        return [
            ("seconds", f"{seconds:.0f}"),
            ("ended", str(ended) if self._step.count is None else f"{ended}/{self._step.count}"),
            ("under way", str(self._running)),
            ("tokens/s", f"{self._tokens / seconds:.0f}"),
            ("TTFT p50", f"{1000 * first[len(first) // 2]:.0f} ms" if first else "-"),
            *((name, str(self._counts[name])) for name in ("refused", "failed", "wrong")),
        ]


def _tell(stage: Stage, people: Console) -> None:
    said = stage.said
    rates = f"{said['request_throughput']:.2f} requests/s, {said['request_goodput']:.2f} good, "
    people.print(line("done", f"{rates}{said['output_throughput']:.1f} tokens/s in {said['duration']:.1f} s"))
    counts = (f"{said[name]} {name}" for name in ("completed", "refused", "failed", "wrong"))
    people.print(line("requests", ", ".join(counts)))
    for name in ("ttft", "itl", "tpot", "e2el"):
        if said[f"p99_{name}_ms"] is not None:
            shares = (f"{share} {said[f'{share}_{name}_ms']:.1f} ms" for share in ("median", "p90", "p99"))
            people.print(line(name, "  ".join(shares)))
    for reason, count in said["reasons"].items():
        people.print(line("", f"{count} × {reason}"), style="dim")
    for fault in said["missed"]:
        people.print(line("missed", fault), style="red")


def planned(
    *,
    target: str,
    scenario: str,
    rates: Sequence[float],
    callers: Sequence[int],
    arrivals: Arrivals,
    duration: float | None,
    requests: int | None,
    seed: int,
    model: str | None,
    check: bool | None,
    fresh: bool,
    max_tokens: int,
    timeout: float,
    processes: int,
) -> Plan:
    """What was asked for on the command line. Raises CommandFailed for what contradicts itself."""
    if rates and callers:
        raise CommandFailed("both --rate and --concurrency", "chiasm load", "give one of them", code=MISUSED)
    if duration is not None and requests is not None:
        raise CommandFailed("both --duration and --requests", "chiasm load", "give one of them", code=MISUSED)
    if requests is None and duration is None:
        duration = DURATION
    steps = [Step(rate=rate, requests=requests, duration=duration) for rate in rates]
    steps += [
        Step(concurrency=count, requests=requests, duration=duration) for count in callers or (() if rates else (1,))
    ]
    return Plan(
        target,
        model or "",
        scenario,
        tuple(steps),
        arrivals=arrivals,
        checked=check,
        fresh=fresh,
        seed=seed,
        max_tokens=max_tokens,
        timeout=timeout,
        processes=processes,
    )


def start(plan: Plan, slo: str, outputs: Outputs, people: Console) -> bool:
    """Runs the command to its end. Returns whether everything held.

    Args:
        slo: as `Slo.read` takes it.

    Raises CommandFailed where the extra is missing, and what `run` raises.
    """
    if importlib.util.find_spec("guidellm") is None:
        raise CommandFailed(
            "the load harness needs guidellm, which is not installed",
            "chiasm load",
            f"install the extra: pip install 'chiasm[{EXTRA}]'",
            code=MISUSED,
        )
    return asyncio.run(run(plan, Slo.read(slo), outputs, people))
