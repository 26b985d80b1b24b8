"""Decoders that die, and responses that are lost on their way, at named places: the answer is the same, or nobody is
left to give one and everybody is told so."""

from __future__ import annotations

import asyncio

import pytest

from chiasm import AsyncClient, Finished, SamplingParams, Token
from chiasm.client import Content
from chiasm.errors import ChiasmError, Unavailable
from tests.faults.clips import unseen
from tests.faults.injectors import injected
from tests.faults.injectors.points import Points
from tests.faults.injectors.processes import Kill
from tests.processes import Role, Trio

TOKENS = 24

ON = SamplingParams(ignore_eos=True)
"""Answers go on behind their end, so that all are of one length."""


async def asked(client: AsyncClient, content: Content) -> list[int]:
    """The ids of an answer, each of which came once and in order, with one end."""
    ids: list[int] = []
    ends = 0
    async with client.stream("digits", content, max_tokens=TOKENS, timeout=60, sampling=ON) as stream:
        async for event in stream:
            assert not ends, "something came behind the end"
            if isinstance(event, Token):
                ids += event.ids
            ends += isinstance(event, Finished)
    assert ends == 1
    return ids


async def answered_over(served: Trio, role: Role, faults: str) -> None:
    """An answer over which the faults happen is the one that is given in peace: the decoder is deterministic. A process
    that ends comes back."""
    point = Points(role, faults)
    await asyncio.to_thread(point.inject)
    try:
        async with AsyncClient(served.target, max_retries=0) as client:
            content = unseen()
            asking = asyncio.create_task(asked(client, content))
            await asyncio.to_thread(point.verify)
            await asyncio.to_thread(point.end)
            assert await asking == await asked(client, content)
        await served.settled(seconds=45)
    finally:
        if role.env.get("CHIASM_FAILPOINTS"):
            await asyncio.to_thread(point.end)


@pytest.mark.parametrize(
    "faults",
    [
        "decoder.step=exit",
        pytest.param("decoder.attach=exit@3", marks=pytest.mark.chaos),
        pytest.param("Decode/started=exit", marks=pytest.mark.chaos),
    ],
)
async def test_killed_before_the_first_token_the_answer_begins_elsewhere(pair: Trio, faults: str) -> None:
    """M9"""
    await answered_over(pair, pair.decoder, faults)


@pytest.mark.parametrize(
    "token", [pytest.param(1, marks=pytest.mark.chaos), TOKENS // 2, pytest.param(TOKENS, marks=pytest.mark.chaos)]
)
async def test_killed_at_a_token_none_is_lost_or_repeated(pair: Trio, token: int) -> None:
    """M10, at the place itself: the token was drawn, and not sent."""
    await answered_over(pair, pair.decoder, f"Decode/tokens=exit@{token}")


@pytest.mark.chaos
async def test_killed_behind_the_last_token_the_end_is_told_once(pair: Trio) -> None:
    """M11"""
    await answered_over(pair, pair.decoder, "Decode/finished=exit")


LOST = (
    pytest.param("Decode/tokens"),  # the others come once in an answer, and run with the chaos
    *(
        pytest.param(f"Decode/{kind}", marks=pytest.mark.chaos)
        for kind in ("admitted", "attached", "started", "finished")
    ),
    *(pytest.param(f"Encode/{kind}", marks=pytest.mark.chaos) for kind in ("probed", "sized", "ready", "end")),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", LOST)
async def test_whatever_response_of_a_worker_is_lost_the_answer_is_the_same(pair: Trio, point: str) -> None:
    """M79: the work was done, and its caller heard nothing."""
    decodes = point.startswith("Decode/")
    role = pair.decoder if decodes else pair.encoders[0]
    if not decodes:
        await asyncio.to_thread(pair.encoders[1].kill)  # or it would take half of the media
    fault = Points(role, f"{point}=drop@1")
    await asyncio.to_thread(fault.inject)
    content = unseen(3)
    try:
        async with AsyncClient(pair.target, max_retries=0) as client:
            answer = await asked(client, content)
            assert happened(role) == {point}
            assert await asked(client, content) == answer
    finally:
        await asyncio.to_thread(fault.end)
        if pair.encoders[1].code is not None:
            pair.encoders[1].start()
            await asyncio.to_thread(pair.encoders[1].wait_for, "ready")
    await pair.settled(seconds=45)


def happened(role: Role) -> set[str]:
    """Points at which a fault has happened."""
    return {event["point"] for event in role.events() if event["event"] == "failpoint"}


async def test_with_all_decoders_dead_everybody_is_told_to_come_back_and_the_router_recovers_by_itself(
    pair: Trio,
) -> None:
    """M15"""
    router, decoder = pair.router.pid, pair.decoder
    content = unseen()
    async with AsyncClient(pair.target, max_retries=0) as client:

        async def refused() -> ChiasmError:
            with pytest.raises(ChiasmError) as caught:
                await client.generate("digits", content, max_tokens=4, timeout=40)
            return caught.value

        try:
            async with injected(Kill(decoder.pid)):
                await asyncio.to_thread(decoder.kill)  # reaps it
                errors = await asyncio.gather(*(refused() for _ in range(16)))
            assert {type(error) for error in errors} == {Unavailable}, errors
            assert all(error.retry_after is not None for error in errors), "they are told when to come back"
            assert pair.router.counted()["chiasm_num_requests_running"] == 0
        finally:
            decoder.start()
            await asyncio.to_thread(decoder.wait_for, "ready")
        ids = await asked(client, content)
        assert ids == await asked(client, content)
    assert pair.router.pid == router and pair.router.code is None
    await pair.settled()
