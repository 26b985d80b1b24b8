"""What the scheduler takes for a step of 256 sequences that each draw a token, with a model that takes no time.

One process, no tensor. Measured is all that a scheduler does between two steps: the plan (who runs, whose pages are
full, which pages they get, tenants charged) and taking in its tokens (noted for each sequence, compared with its ends,
its limit counted). nano-vllm's `schedule` and `postprocess` do as much and are said to take about 100 us on a core like
this; since cores differ, the ratio to a fixed loop of Python is told as well. Pages and units are counted by the real
accounts (`Holdings`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from chiasm.attention.pages import ExtentAllocator, PageAllocator
from chiasm.timeline import UnitLayout
from decoder_service.holdings import Holdings
from decoder_service.prefix import Chain
from decoder_service.room import Room
from decoder_service.scheduler import Scheduler
from decoder_service.sequence import DecodeSequence

SEQUENCES, PROMPT, TOKENS, PAGE = 256, 100, 512, 16
LOOP = 1_000


def fixed_loop() -> float:
    """Microseconds of a loop that says how fast this core runs Python."""
    began = time.perf_counter()
    total = 0
    for i in range(LOOP):
        total += i & 7
    return 1e6 * (time.perf_counter() - began)


def no_units(grid: tuple[int, int]) -> UnitLayout:
    raise AssertionError("there are none")


def table() -> Scheduler[DecodeSequence]:
    """All sequences admitted and past their prompts."""
    pages = SEQUENCES * (-(-(PROMPT + TOKENS) // PAGE) + 2)
    accounts = Holdings(PageAllocator(pages, PAGE), ExtentAllocator(0))
    scheduler: Scheduler[DecodeSequence] = Scheduler(accounts, max_rows=2 * SEQUENCES)
    for number in range(SEQUENCES):
        sequence = DecodeSequence(no_units, Chain(bytes(32), PAGE))
        sequence.extend([[number, *range(PROMPT + number % PAGE)]])
        seat = scheduler.seat(
            sequence, wake=lambda: None, tenant=bytes([number % 4]), stops=frozenset([100_001, 100_002])
        )
        scheduler.enter(seat, Room(-(-len(sequence.timeline) // PAGE), 0))
        assert seat.admitted
        accounts.grow([(sequence, len(sequence.timeline) - 1)])
        sequence.computed = len(sequence.timeline) - 1
        scheduler.want(seat, 1, draws=True, allowed=TOKENS)
    return scheduler


def measure(rounds: int) -> dict[str, object]:
    steps: list[float] = []
    loops: list[float] = []
    outcomes = list(range(1000, 1000 + SEQUENCES))
    for _ in range(rounds):
        scheduler = table()
        for step in range(TOKENS - 1):
            if not step % 16:
                loops.append(fixed_loop())
            began = time.perf_counter()
            plan = scheduler.plan()
            planned = time.perf_counter() - began
            assert plan is not None and len(plan.singles) == SEQUENCES, "everybody runs"
            for seat in plan.singles:  # what the model does
                seat.sequence.timeline.append_token(7)
                seat.sequence.computed += 1
            began = time.perf_counter()
            scheduler.done(plan, outcomes)
            steps.append(1e6 * (planned + time.perf_counter() - began))
            noted = min(len(seat.fresh) for seat in plan.singles)
        assert noted == TOKENS - 1, "every token is noted"
    median, loop = statistics.median(steps), statistics.median(loops)
    return {
        "us_per_step": round(median, 1),
        "us_per_sequence": round(median / SEQUENCES, 3),
        "mean_us_per_step": round(statistics.mean(steps), 1),
        "loop_us": round(loop, 1),
        "ratio_to_loop": round(median / loop, 3),
        "running": SEQUENCES,
        "steps": len(steps),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks scheduler_step", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    result = measure(options.rounds)
    if not options.json:
        print(f"{result['us_per_step']} us for a step of {SEQUENCES} sequences")
    print(json.dumps(result))
