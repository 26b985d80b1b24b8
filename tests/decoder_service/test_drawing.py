"""What is drawn in one step: a row that cannot be drawn is its own sequence's fault."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from chiasm.rpc.v1 import common_pb2 as pb
from decoder_service.drawer import Drawer
from decoder_service.options import read_options
from decoder_service.sampler import Draw, Drawing, Drawn
from decoder_service.seats import Outcome
from decoder_service.sequence import DecodeSequence
from tests.decoder_service.halves import ROOT, Halves, halves


class Fixed(Drawer):
    """Draws as it is told, whatever was drawn before."""

    def __init__(self, sequence: DecodeSequence, draw: Draw) -> None:
        super().__init__(sequence, read_options(pb.SamplingParams(), 0, 1))
        self._draw = draw

    def next(self) -> Draw:
        return self._draw


async def drawn(system: Halves, draw: Draw) -> Outcome:
    """The token after the same prompt. Raises what its step raised."""
    model = system.decoder
    woken = asyncio.Event()
    sequence = model.sequence(ROOT)
    ids = model.prompt.text("What is it?")
    sequence.extend([ids])
    seat = model.seat(sequence, Fixed(sequence, draw), wake=woken.set, tenant=ROOT, priority=0, stops=frozenset())
    try:
        model.enter(seat)
        assert seat.admitted
        model.want(seat, len(ids), draws=True, allowed=1)
        while not (seat.fresh or seat.error):
            woken.clear()
            await woken.wait()
        if seat.error is not None:
            raise seat.error
        return seat.fresh[0]
    finally:
        await model.release(seat)


async def test_a_row_that_breaks_the_draw_of_all_fails_alone() -> None:
    async with halves() as system:
        sound = Draw(Drawing(temperature=1.0, seed=4, logprobs=1), 3)
        broken = Draw(Drawing(), 0, banned=np.array([10**6]))
        alone = await drawn(system, sound)
        first, failed, last = await asyncio.gather(
            *(drawn(system, draw) for draw in (sound, broken, sound)), return_exceptions=True
        )
        assert max(system.decoder.scheduler.counts.batches) == 3
        assert isinstance(failed, IndexError)
        assert alone == first == last
        assert isinstance(first, Drawn)
        assert first.logprobs is not None
        with pytest.raises(IndexError):
            await drawn(system, broken)
