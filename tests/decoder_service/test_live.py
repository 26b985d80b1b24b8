"""A timeline that grows while it is sampled: the shipped model says a digit when a frame shows one and is silent
else."""

from __future__ import annotations

from contextlib import aclosing

import numpy as np
import pytest

from chiasm.rpc.v1 import common_pb2 as pb
from tests import digits
from tests.asking import running
from tests.decoder_service.live import LiveTimeline, stream

STREAMS = 40
PROMPT = "Say each digit you see."


@pytest.mark.timeout(300)
async def test_says_digits_when_they_are_shown_and_is_silent_else() -> None:
    rng = np.random.default_rng(30)
    pool = digits.held_out_digits()
    right = total = 0
    async with running() as service:
        prompt = service.decoder.prompt
        for _ in range(STREAMS):
            shown: list[int | None] = []
            frames = []
            for _ in range(int(rng.integers(1, 9))):
                if rng.random() < 0.4:
                    shown.append(None)
                    frames.append(digits.empty_frame(rng))
                else:
                    cells, label = pool[rng.integers(len(pool))]
                    shown.append(label)
                    frames.append(digits.frame(cells, rng))
            for ids, digit in zip(await stream(service, PROMPT, frames), shown, strict=True):
                said = b"".join(map(prompt.token_bytes, ids)).decode()
                right += said == ("" if digit is None else str(digit))
                total += 1
    assert right / total >= 0.97


async def test_what_is_appended_is_laid_after_what_was_drawn_and_visibility_grows() -> None:
    rng = np.random.default_rng(31)
    pool = digits.held_out_digits()
    async with running() as service:
        live = LiveTimeline(service)
        await live.open(PROMPT)
        async with aclosing(live.responses):  # type: ignore[type-var]
            for i in range(3):
                await live.show(digits.frame(pool[i][0], rng), float(i))
            assert sorted(live.laid.values()) == list(live.laid.values()), "each append lies behind the one before"
            assert [v.count for v in live.visible][-3:] == [1, 2, 3]
            live.drop(2)
            await live.show(digits.frame(pool[3][0], rng), 3.0)
            assert (live.visible[-1].first, live.visible[-1].count) == (2, 4)
            finished = (await live.close())[-1].finished
        assert finished.reason == pb.FINISH_REASON_CLOSED
        assert finished.usage.visual_tokens == 20


async def test_what_was_drawn_is_told_before_what_came_later_is_answered() -> None:
    """Indices of tokens and rows of events come in the order in which they lie on the timeline."""
    rng = np.random.default_rng(32)
    pool = digits.held_out_digits()
    async with running() as service:
        live = LiveTimeline(service)
        await live.open(PROMPT)
        told: list[str] = []
        async with aclosing(live.responses):  # type: ignore[type-var]
            for i in range(4):
                live.laid.clear()
                said = await live.show(digits.frame(pool[i][0], rng), float(i))
                told.append(b"".join(map(service.decoder.prompt.token_bytes, said)).decode())
            await live.close()
    assert told == [str(pool[i][1]) for i in range(4)]
