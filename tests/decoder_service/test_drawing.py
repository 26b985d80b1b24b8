"""What is drawn in one step: a row that cannot be drawn is its own sequence's fault."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from decoder_service.sampler import Draw, Drawing, Drawn
from tests.decoder_service.halves import ROOT, Halves, halves


async def drawn(system: Halves, draw: Draw) -> int | None:
    """The token after the same prompt, or what its step raised."""
    model = system.decoder
    sequence = model.sequence(ROOT)
    ids = model.prompt.text("What is it?")
    sequence.extend([ids])
    await model.reserve(sequence, text=len(ids) + 1, visual=0)
    try:
        return await model.scheduler.step(sequence, len(ids), draw)
    finally:
        await model.release(sequence)


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
