"""Sixty-four at once, in pools that hold a third of them: everybody reads the digits of its own clip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from chiasm.media.types import Rgb
from tests import digits
from tests.decoder_service.halves import CLOSE, Halves, Told, halves, sized
from tests.decoder_service.test_sharing import TOKENS

ASKERS = 64
CLIPS = 24
"""Some are asked about by one alone, some by several at once."""


async def ask(system: Halves, clip: Sequence[Rgb], *, video_first: bool, priority: int) -> Told:
    messages = await system.ready(clip)
    parts: list[str | int] = [0, "Read the digits."] if video_first else ["Read the digits.", 0]
    opened = system.opened(*parts, max_tokens=24)
    opened.priority = priority
    return await system.told(opened, sized(len(clip)), *messages, CLOSE)


async def test_everybody_in_a_crowd_reads_the_digits_of_its_own_clip() -> None:
    rng = np.random.default_rng(64)
    pool = digits.held_out_digits()
    picked = [rng.integers(len(pool), size=int(rng.integers(2, 7))) for _ in range(CLIPS)]
    clips = [[digits.frame(pool[i][0], rng) for i in clip] for clip in picked]
    answers = [[str(pool[i][1]) for i in clip] for clip in picked]
    asked = [*range(CLIPS), *rng.integers(CLIPS // 3, size=ASKERS - CLIPS)]
    rng.shuffle(asked)
    async with halves(text_tokens=700, visual_tokens=80 * TOKENS, page_size=2) as system:
        told = await asyncio.gather(
            *(
                ask(system, clips[clip], video_first=bool(number % 4), priority=number % 3)
                for number, clip in enumerate(asked)
            )
        )
        counts = system.decoder.scheduler.counts
        assert system.decoder.scheduler.preempted >= 8, "there was not room for all of them"
        assert max(counts.batches) >= 16, "and they ran together"
        assert system.encoder.counts.encoded_units == sum(map(len, clips)), "what several ask about is encoded once"
    right = total = 0
    for one, clip in zip(told, asked, strict=True):
        said, expected = one.text.decode().split(), answers[clip]
        others = [other for other in answers if other != expected]
        assert said == expected or said not in others, "those are the digits of another clip"
        right += sum(a == b for a, b in zip(said, expected, strict=False))
        total += len(expected)
    assert right / total >= 0.97
