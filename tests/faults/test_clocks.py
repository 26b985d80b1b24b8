"""Wall clocks that are set under running requests: deadlines, leases and ages are of clocks that only go forward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from chiasm import AsyncClient, SamplingParams, Video
from tests import digits
from tests.faults.clips import FRAMES, QUESTION, unseen
from tests.faults.injectors.clock import LIBRARY, Clock
from tests.processes import Role, Trio, trio
from tests.waiting import until

LONG = 400

LIBRARIES = [
    pytest.param(None, id="python"),
    pytest.param(
        LIBRARY,
        id="libfaketime",
        marks=pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed here"),
    ),
]


@pytest.fixture(params=LIBRARIES)
def clocked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Trio, list[Clock]]]:
    """A system, and the clock of each role."""
    clocks: list[Clock] = []

    def under(role: Role) -> None:
        clocks.append(Clock(role, tmp_path, library=request.param))
        clocks[-1].prepare()

    with trio(
        tmp_path,
        encoder=["--cache-ttl", "600", "--lease-seconds", "30"],
        decoder=["--cache-ttl", "600", "--deterministic"],
        router=["--upload-ttl", "600"],
        prepare=under,
    ) as made:
        yield made, clocks


def drawing(served: Trio) -> bool:
    """Whether an answer is under way."""
    return served.decoder.counted()["chiasm_num_requests_running"] > 0


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_an_hour_forward_and_back_under_running_requests_ends_none_and_ages_nothing(
    clocked: tuple[Trio, list[Clock]],
) -> None:
    """M66: of all roles at once, then of one role beside the others."""
    served, clocks = clocked
    content = unseen()
    on = SamplingParams(ignore_eos=True)
    async with AsyncClient(served.target, max_retries=0) as client:

        async def long() -> list[int]:
            answer = await client.generate("digits", content, max_tokens=LONG, timeout=60, sampling=on)
            return list(answer.ids)

        whole = await long()
        handle = await client.upload(Video(digits.shipped_clips()[0].path))
        truth = (await client.generate("digits", [handle, QUESTION], max_tokens=24)).ids
        for shifted in (clocks, [clocks[-1]], [clocks[0]]):
            for seconds in (3600.0, -3600.0):
                begun = asyncio.create_task(long())
                await until(lambda begun=begun: begun.done() or drawing(served))  # type: ignore[misc]
                for clock in shifted:
                    clock.to(seconds).inject()
                assert await begun == whole
                again = await client.generate("digits", content, max_tokens=4, timeout=30)
                assert again.usage.media[0].units_cached == FRAMES, "no entry has aged"
                assert (await client.generate("digits", [handle, QUESTION], max_tokens=24, timeout=30)).ids == truth
                for clock in shifted:
                    await asyncio.to_thread(clock.verify)
                    clock.end()
    await served.settled()
