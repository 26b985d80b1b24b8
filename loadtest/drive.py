"""The `main` of a load: guidellm's scheduler with our backend. It has no entry point for backends, so we call it.

guidellm decides when requests are sent, by which process, and when all are over. Its figures are not used: the mean
concurrency of its reports, for one, is not what rate and latency give.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import count
from typing import NamedTuple

from guidellm import configure_logger
from guidellm.scheduler import (
    AsyncConstantStrategy,
    AsyncPoissonStrategy,
    ConcurrentStrategy,
    NonDistributedEnvironment,
    Scheduler,
    SchedulingStrategy,
)
from guidellm.scheduler.schemas.conversation_graph import GenerativeConversationGraph, GenerativeConversationNode
from guidellm.schemas import GenerationRequest, GenerationResponse
from guidellm.settings import LoggingSettings

from loadtest.backend import ChiasmArgs, ChiasmBackend
from loadtest.plan import Plan, Step
from loadtest.record import Record


class News(NamedTuple):
    """What has happened: a request has ended, or only more of them are under way.

    Attributes:
        running: requests that are under way.
    """

    record: Record | None
    running: int


async def follow(plan: Plan, step: Step) -> AsyncIterator[News]:
    """Runs one step, from its first request to the end of its last.

    Raises RuntimeError if a process that sends ends before its time.
    """
    configure_logger(LoggingSettings(console_log_level=None))
    backend = ChiasmBackend(
        ChiasmArgs(
            target=plan.target,
            model=plan.model,
            scenario=plan.scenario,
            checked=bool(plan.checked),
            fresh=plan.fresh,
            seed=plan.seed,
            max_tokens=plan.max_tokens,
            timeout=plan.timeout,
            processes=plan.processes,
            open_loop=step.rate is not None,
        )
    )
    scheduler: Scheduler[GenerationRequest, GenerationResponse] = Scheduler()  # type: ignore[no-untyped-call]
    here = Here()  # type: ignore[no-untyped-call]
    updates = scheduler.run(_requests(step, here), backend, _strategy(plan, step), here)
    async with aclosing(updates) as heard:  # type: ignore[type-var]
        async for response, request, info, state in heard:
            record = None
            if response is not None and response.response_metrics is not None:
                record = Record(**response.response_metrics)
            elif info.status in ("errored", "cancelled"):  # not the system's doing, and not to be lost
                number = int(request.columns["number"][0])
                record = Record(number, sent=info.timings.resolve_start or time.time(), reason=str(info.error))
            yield News(record, state.processing_requests)


class Here(NonDistributedEnvironment[GenerationRequest, GenerationResponse]):
    """One machine, and when it begins.

    Attributes:
        begins: of the wall clock; infinitely late until it is known.
    """

    begins = float("inf")

    async def sync_run_start(self) -> float:
        self.begins = await super().sync_run_start()
        return self.begins


def _strategy(plan: Plan, step: Step) -> SchedulingStrategy:
    if step.rate is None:
        assert step.concurrency is not None, "a loop is open or closed"
        return ConcurrentStrategy(streams=step.concurrency)
    if plan.arrivals == "constant":
        return AsyncConstantStrategy(rate=step.rate)
    return AsyncPoissonStrategy(rate=step.rate, random_seed=plan.seed)


def _requests(step: Step, here: Here) -> Iterator[GenerativeConversationGraph]:
    """The requests of a step, each a conversation of one. They are drawn as they are wanted."""
    for number in count() if step.count is None else range(step.count):
        if step.count is None and step.duration is not None and time.time() >= here.begins + step.duration:
            return
        request = GenerationRequest(columns={"number": [number]})
        node = GenerativeConversationNode(node_id="0", agent_id="0", request=request)
        yield GenerativeConversationGraph.from_nodes_with_parents({"0": node}, {})
