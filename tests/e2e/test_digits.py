"""The shipped model reads held-out digits through the whole system: media, both halves, the store, the router's logic.

Every answer is right or wrong, so a frame out of place, a wrong timestamp or another request's entry shows.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from chiasm.local import LocalService
from chiasm.rpc.v1 import router_pb2 as rpb
from tests import digits
from tests.asking import Answer, Part, ask, image, question, running, video

CLIPS = 60
AT_ONCE = 4


def drawn(rng: np.random.Generator, count: int) -> tuple[list[digits.Rgb], list[int]]:
    """`count` frames of held-out digits, and what they show."""
    pool = digits.held_out_digits()
    chosen = [pool[i] for i in rng.choice(len(pool), size=count, replace=False)]
    return [digits.frame(cells, rng) for cells, _ in chosen], [label for _, label in chosen]


async def ask_all(service: LocalService, requests: list[rpb.GenerateRequest]) -> list[Answer]:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(request: rpb.GenerateRequest) -> Answer:
        async with turns:
            return await ask(service, request)

    return await asyncio.gather(*map(one, requests))


def share_right(answers: list[Answer], expected: list[list[int]]) -> float:
    """Right digits in their places, per digit asked for; a digit too many counts as one wrong."""
    right = total = 0
    for answer, digits_shown in zip(answers, expected, strict=True):
        said = answer.text.split()
        right += sum(a == str(b) for a, b in zip(said, digits_shown, strict=False))
        total += max(len(digits_shown), len(said))
    return right / total


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["video", "images"])
async def test_reads_one_to_eight_digits_in_order(kind: str) -> None:
    rng = np.random.default_rng(20)
    requests, expected = [], []
    for i in range(CLIPS):
        frames, shown = drawn(rng, 1 + i % 8)
        media = [video(digits.clip(frames))] if kind == "video" else [image(digits.image(frame)) for frame in frames]
        parts: list[Part] = [*media, "Read the digits."] if i % 2 else ["Read the digits.", *media]
        requests.append(question(*parts))
        expected.append(shown)
    async with running() as service:
        answers = await ask_all(service, requests)
    assert share_right(answers, expected) >= 0.97
    assert all(
        a.finished is not None and a.finished.usage.visual_tokens == 5 * len(e)
        for a, e in zip(answers, expected, strict=True)
    )


@pytest.mark.timeout(300)
async def test_says_which_digit_is_at_a_time() -> None:
    rng = np.random.default_rng(21)
    requests, expected = [], []
    for i in range(2 * CLIPS):
        frames, shown = drawn(rng, 1 + i % 8)
        at = int(rng.integers(len(frames)))
        requests.append(question(video(digits.clip(frames)), f"Which digit is at {at:.1f} seconds?"))
        expected.append([shown[at]])
    async with running() as service:
        answers = await ask_all(service, requests)
    assert share_right(answers, expected) >= 0.97


async def test_the_shipped_clips_and_images_are_read_right() -> None:
    async with running() as service:
        for clip in digits.shipped_clips():
            answer = await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
            assert answer.text == clip.answer, clip.path.name
            assert answer.started is not None
            offsets = [frame.frame_offset.seconds for frame in answer.started.frames]
            assert offsets == list(clip.seconds)
        for path, digit in digits.shipped_images():
            answer = await ask(service, question(image(path.read_bytes()), "Read the digits."))
            assert answer.text == str(digit), path.name


async def test_a_second_question_about_the_same_video_encodes_nothing() -> None:
    clip = digits.shipped_clips()[-1]
    async with running() as service:
        first = await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
        again = await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
        other = await ask(service, question(video(clip.path.read_bytes()), "Which digit is at 1.0 seconds?"))
        assert (first.encoded, again.encoded, other.encoded) == (len(clip.digits), 0, 0)
        assert service.encoder.counts.encoded_units == len(clip.digits)
    assert again.ids == first.ids
    assert other.text == str(clip.digits[1])


async def test_concurrent_questions_about_different_videos_do_not_mix() -> None:
    rng = np.random.default_rng(22)
    async with running() as service:
        requests = []
        for _ in range(8):
            frames, _ = drawn(rng, 4)
            requests.append(question("Read the digits.", video(digits.clip(frames))))
        alone = [await ask(service, request) for request in requests]
        await service.store.flush()
        together = await ask_all(service, requests * 2)
    assert [a.ids for a in together] == [a.ids for a in alone] * 2
