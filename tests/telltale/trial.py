"""One trial of the validator: a laboratory, a bug in it or none, requests until something is found wrong, and a look at
what is left when nobody asks any more."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chiasm.cache.region import Region
from chiasm.media.sandbox import Sandbox
from tests.chaos.faults import RegionFaults
from tests.telltale.asking import Asking, Request
from tests.telltale.driving import GRACE, Driver
from tests.telltale.history import Fault, History
from tests.telltale.laboratory import Laboratory, laboratory
from tests.telltale.oracle import Oracle
from tests.telltale.plants import Plant, Planted, planted
from tests.telltale.plants.losing import lose_last_words, lose_responses
from tests.telltale.plants.planting import Hurt
from tests.telltale.probing import probe_words
from tests.telltale.validator import Finding, judge
from tests.waiting import until

AT_A_TIME = 6

CHUNK = 30
"""Requests between two judgements."""

DEADLINE = 20.0
"""Seconds of a request in a trial."""

RECONNECTING = 1.5
"""Seconds after which a client has found a router again that was away for a moment: gRPC waits one before it tries."""

SETTLING = 3.0
"""Seconds in which everything must be given back."""

_INSIDE: Mapping[Hurt, Callable[[Planted], None]] = {"last words": lose_last_words, "responses": lose_responses}
"""What is lost at places of its own."""

_LONG = 1500
"""Tokens of the answer that its client leaves at once."""

_SPARED = 500
"""Of those, so many must not be drawn any more."""


@dataclass
class Outcome:
    """Of one trial.

    Attributes:
        hits: how often the bug was reached.
    """

    requests: int = 0
    hits: int = 0
    found: list[Finding] = field(default_factory=list)


async def trial(
    plant: Plant | None, sandbox: Sandbox, oracle: Oracle, *, seed: int, most: int, quiet: bool = True
) -> Outcome:
    """Asks until the bug is found, or `most` requests were asked.

    Args:
        plant: None for the control, in which nothing may be found.
        quiet: nothing gives way, so that what was known of a request can be judged too.
    """
    outcome = Outcome()
    hurt: Hurt = "nothing" if plant is None else plant.hurt
    settings = dict(plant.settings) if plant is not None else {}
    if not settings and hurt == "nothing":
        settings = {"text_tokens": 1 << 14, "visual_tokens": 4096} if quiet else {"text_tokens": 320}
    roomy = settings.get("visual_tokens", 0) >= 4096
    with planted(plant) as bug:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="telltale-", dir="/dev/shm")))
            lab = await stack.enter_async_context(laboratory(folder, sandbox, **settings))
            history = History(lab.roots, {"quiet": roomy and hurt == "nothing"})
            driver = Driver(lab.clients, history.records.append, deadline=DEADLINE)
            requests = iter(Asking(seed, leaving=0.1))
            while len(history.records) < most and not outcome.found:
                chunk = itertools.islice(requests, CHUNK)
                async with asyncio.TaskGroup() as group:
                    asking = group.create_task(driver.ask_all(chunk, at_a_time=AT_A_TIME))
                    group.create_task(_hurt(hurt, lab, folder, asking, history, driver))
                outcome.found += judge(history, oracle)
            if not outcome.found:
                outcome.found += await _left(lab, driver)
                outcome.found += await probe_words(lab, oracle)
            outcome.requests, outcome.hits = len(history.records), bug.hits
            bug.dig_out()  # it must not keep the system from ending
    return outcome


async def _hurt(
    hurt: Hurt, lab: Laboratory, folder: Path, asking: asyncio.Task[None], history: History, driver: Driver
) -> None:
    draw = random.Random(len(history.records))
    if hurt == "bytes":
        region, begun = Region.open(folder / "arena"), driver.now
        faults = RegionFaults([region], draw)
        try:
            while not asking.done():
                faults._spoil()
                await asyncio.sleep(0.01)
        finally:
            region.close()
            history.faults.append(Fault("region bytes changed", begun, driver.now))
    if hurt in _INSIDE:
        inside = Planted()
        _INSIDE[hurt](inside)
        begun = driver.now
        await asyncio.wait([asking])
        history.faults.append(Fault(f"router {hurt} lost", begun, driver.now))
        inside.dig_out()
    while hurt in ("decoders", "routers") and not asking.done():
        await asyncio.sleep(draw.uniform(0.2, 0.6) if hurt == "decoders" else RECONNECTING)
        begun, met = driver.now, {*driver.running}
        if hurt == "decoders":
            await lab.lose_decoder(draw.randrange(len(lab.decoders)))
        else:
            tenant = draw.choice(sorted(lab.routers))
            await lab.lose_router(tenant, draw.randrange(len(lab.routers[tenant])))
        history.faults.append(Fault(f"{hurt.removesuffix('s')} killed", begun, driver.now))
        met |= driver.running
        # Nobody meets two losses: who loses two decoders before its first token may be what ends them.
        await until(partial(_none_left, met, driver.running, asking), seconds=DEADLINE + GRACE)


def _none_left(met: set[str], running: set[str], asking: asyncio.Task[None]) -> bool:
    return asking.done() or not met & running


async def _left(lab: Laboratory, driver: Driver) -> list[Finding]:
    """What is still held when nobody asks any more, and what is drawn for a client that has left."""
    held = await lab.settled(SETTLING)
    found = [Finding("", "leak", f"{what}: {value:g}") for what, value in held.items()]
    before = sum(decoder.generation_tokens for decoder in lab.decoders)
    for number in range(4):
        leaving = Request(f"leaving {number}", "one", (), (f"number {number}",), seed=number, max_tokens=_LONG, leave=3)
        await driver.ask(leaving)
    held = await lab.settled(SETTLING)
    found += [Finding("leaving", "leak", f"{what}: {value:g}") for what, value in held.items()]
    drawn = sum(decoder.generation_tokens for decoder in lab.decoders) - before
    if drawn > 4 * _SPARED:
        found.append(Finding("leaving", "waste", f"{drawn} tokens for clients that had left"))
    found += [Finding("", "lost", f"{what}: {value:g}") for what, value in lab.lost().items() if not held]
    return found


def told(plant: Plant | None, outcome: Outcome) -> str:
    name = "control" if plant is None else plant.name
    what = ", ".join(sorted({finding.what for finding in outcome.found})) or "nothing"
    return f"{name:32} {outcome.hits:6} hits  {outcome.requests:4} requests  {what}"
