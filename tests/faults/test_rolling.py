"""One model takes another's place under the same name, worker by worker, and is taken back, under questions."""

from __future__ import annotations

import asyncio
from itertools import cycle
from pathlib import Path

import pytest

from chiasm import AsyncClient
from chiasm.client import Generation
from chiasm.errors import Unavailable
from tests.faults.clips import FRAMES, unseen
from tests.faults.twins import other_weights
from tests.processes import Role, trio
from tests.waiting import until

CLIENTS = 3


async def changed(role: Role, *flags: str) -> None:
    """It ends as it is told to, and another comes in its place."""
    await asyncio.to_thread(role.end)
    assert role.code == 0
    role.more = [*flags]
    role.start()
    await asyncio.to_thread(role.wait_for, "ready")


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_a_model_is_rolled_out_and_back_under_load_and_no_question_fails(
    tmp_path: Path,
) -> None:
    """M21: the other one differs in a number, and finds nothing of what the first has encoded."""
    told: list[Generation] = []
    refused: list[Unavailable] = []
    over = asyncio.Event()
    mine = unseen()
    new = ["--model", str(other_weights(tmp_path)), "--name", "digits"]

    async def asks(client: AsyncClient) -> None:
        clips = cycle([unseen() for _ in range(3)])  # so few that the region holds them all
        content = next(clips)
        while not over.is_set():
            try:
                told.append(await client.generate("digits", content, max_tokens=24))
            except Unavailable as error:
                refused.append(error)
            else:
                content = next(clips)

    async with AsyncClient.in_process("digits") as quiet:
        truth = (await quiet.generate("digits", mine, max_tokens=24)).text

    with trio(tmp_path, encoders=2, decoders=2, encoder=["--drain-seconds", "30"], decoder=["--drain-seconds", "30"],
              router=["--patience", "3"]) as served:  # fmt: skip
        async with AsyncClient(served.target) as client:

            async def knows() -> int:
                """Units of one clip that the model which is asked had encoded before."""
                answer = await client.generate("digits", mine, max_tokens=24)
                assert answer.text == truth
                return answer.usage.media[0].units_cached or 0

            assert (await knows(), await knows()) == (0, FRAMES)
            asking = [asyncio.create_task(asks(client)) for _ in range(CLIENTS)]
            try:
                for flags, known in ((new, 0), ([], FRAMES)):
                    for encoder, decoder in zip(served.encoders, served.decoders, strict=True):
                        for role in (encoder, decoder):
                            await changed(role, *flags)
                        count = len(told)
                        await until(lambda count=count: len(told) >= count + CLIENTS or any(a.done() for a in asking))  # type: ignore[misc]
                        assert not any(task.done() for task in asking), [task for task in asking if task.done()]
                    assert await knows() == known, "of its own it knows what is left, of the other's nothing"
            finally:
                over.set()
                outcomes = await asyncio.gather(*asking, return_exceptions=True)
            assert not any(outcomes), outcomes
            assert not refused, "whoever was told nothing comes again, and is given to the other"
            assert all(answer.text for answer in told) and len(told) >= 4 * CLIENTS
        await served.settled(seconds=45)
