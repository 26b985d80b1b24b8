"""What a drop hides, and from when on."""

from __future__ import annotations

import asyncio

import pytest
import torch

from chiasm.errors import Unsupported
from chiasm.rpc.v1 import decoder_pb2 as dpb
from tests.decoder_service.halves import CLOSE, halves
from tests.decoder_service.test_preempting import ask, say_all, told_by
from tests.fuzz.timelines import oracle


@pytest.mark.parametrize("told", [2, 3, 7])
async def test_a_drop_hides_units_from_the_rows_behind_it_and_from_none_before(told: int) -> None:
    """The last token drawn is not computed yet when the drop is laid behind it."""
    async with halves(oracle("random"), dtype=torch.float64) as system:
        caller = ask(system, 0, "Say each digit you see.", tokens=200)
        caller.opened.sample = dpb.SAMPLE_MODE_WHILE_OPEN
        await say_all(caller, close=False)
        running = asyncio.create_task(caller.run())
        for number in (1, 2):
            await told_by(caller, number * told)
            caller.send(dpb.DecodeDrop(event=number, first_visible=number))
        await told_by(caller, 3 * told)
        caller.send(CLOSE)
        await running
    caller.check(oracle("random"))
    assert len(caller.told.ids) >= 3 * told


async def test_units_that_are_part_of_the_text_cannot_be_dropped_and_who_asks_is_told_so() -> None:
    async with halves(oracle("qwen3_vl"), dtype=torch.float64) as system:
        caller = ask(system, 0, "Say each digit you see.", tokens=200)
        caller.opened.sample = dpb.SAMPLE_MODE_WHILE_OPEN
        await say_all(caller, close=False)
        running = asyncio.create_task(caller.run())
        await told_by(caller, 3)
        caller.send(dpb.DecodeDrop(event=1, first_visible=1))
        with pytest.raises(Unsupported) as caught:
            await running
    caller.check(oracle("qwen3_vl"))
    assert (caught.value.reason, caught.value.facts) == ("FEATURE_DISABLED", {"field": "drop"})
