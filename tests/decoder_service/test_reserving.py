"""Room in the pools: first come first served, and refused if it can never be had."""

from __future__ import annotations

import asyncio

import pytest

from chiasm.errors import InvalidRequest
from chiasm.local import LocalSettings
from tests import digits
from tests.asking import ask, question, running, video
from tests.decoder_service.holders import hold


async def test_more_requests_than_room_wait_and_are_all_answered() -> None:
    clip = digits.shipped_clips()[1]
    request = question("Read the digits.", video(clip.path.read_bytes()))
    async with running(settings=LocalSettings(text_tokens=256, visual_tokens=5 * len(clip.digits))) as service:
        alone = await ask(service, request)
        answers = await asyncio.gather(*(ask(service, request) for _ in range(6)))
    assert all(answer.ids == alone.ids for answer in answers)


async def test_the_first_to_wait_is_the_first_to_get_room() -> None:
    async with running(settings=LocalSettings(text_tokens=64, visual_tokens=8)) as service:
        model = service.decoder
        holder = await hold(model, text=64)
        got: list[int] = []

        async def wait(number: int, text: int) -> None:
            seat = await hold(model, text=text)
            got.append(number)
            await model.release(seat)

        waiting = [asyncio.create_task(wait(0, 64)), asyncio.create_task(wait(1, 16)), asyncio.create_task(wait(2, 16))]
        await asyncio.sleep(0.05)
        assert got == []
        waiting[0].cancel()
        await asyncio.sleep(0.05)
        assert got == [], "the holder still has everything"
        await model.release(holder)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert got == [1, 2]


@pytest.mark.parametrize(
    ("settings", "what"),
    [(LocalSettings(visual_tokens=10), "visual"), (LocalSettings(text_tokens=32), "text")],
)
async def test_b118_what_can_never_fit_is_refused_at_once(settings: LocalSettings, what: str) -> None:
    clip = digits.shipped_clips()[1]
    async with running(settings=settings) as service:
        with pytest.raises(InvalidRequest) as caught:
            await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
    assert caught.value.reason == "NEVER_FITS" and what in caught.value.message
    assert int(caught.value.facts["needed"]) > int(caught.value.facts["capacity"])
