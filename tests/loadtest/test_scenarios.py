"""What is asked: the same for the same seed and number, and with the right answer beside it."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import pytest

from chiasm.client import AsyncClient, Frames, Image, Video
from loadtest.scenarios import SCENARIOS, Asking, digits

JUDGED = sorted(SCENARIOS.keys() - {"text"})


def seen(part: Any) -> object:
    """A part of a question as something that can be compared."""
    if isinstance(part, Image):
        return hashlib.sha256(part.source.tobytes()).hexdigest()  # type: ignore[union-attr]
    if isinstance(part, Frames):
        return [seen(picture) for picture in part.images]
    return part.source if isinstance(part, Video) else part


def asked(scenario: str, number: int, *, seed: int = 3, fresh: bool = False) -> list[object]:
    return [seen(part) for part in Asking(scenario, seed=seed, fresh=fresh).question(number).content]  # type: ignore[union-attr]


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_equal_seeds_ask_equal_questions(scenario: str) -> None:
    for number in range(6):
        assert asked(scenario, number) == asked(scenario, number)
    if scenario != "growing":
        assert [asked(scenario, n) for n in range(20)] != [asked(scenario, n, seed=4) for n in range(20)]


@pytest.mark.parametrize("scenario", JUDGED)
def test_a_fresh_picture_is_like_no_other(scenario: str) -> None:
    count = len(digits().shown) if scenario == "growing" else 1
    pictures = [str(asked(scenario, number * count, fresh=True)[0]) for number in range(40)]
    assert len(set(pictures)) == 40


def test_a_growing_clip_has_one_more_frame_each_time_until_it_begins_again() -> None:
    whole = len(digits().shown)
    clips: list[Any] = [asked("growing", number)[0] for number in range(whole + 1)]
    assert [len(clip) for clip in clips] == [*range(1, whole + 1), 1]
    assert all(longer[: len(clip)] == clip for clip, longer in pairwise(clips[:-1]))


@pytest.mark.parametrize("fresh", [False, True])
async def test_the_model_is_right_about_whatever_is_asked(fresh: bool) -> None:
    async with AsyncClient.in_process("digits") as client:
        for scenario in JUDGED:
            asking = Asking(scenario, seed=7, fresh=fresh)
            for number in range(12):
                question = asking.question(number)
                answer = await client.generate("digits", question.content, max_tokens=32)
                assert answer.text == question.expected, (scenario, number)
