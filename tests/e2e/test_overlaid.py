"""Processes of a model whose units are two frames of a video and lie over placeholders: a long video is made by two
encoders, and an answer goes on where its decoder was killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from chiasm.local import LocalService, LocalSettings
from chiasm.rpc.v1 import router_pb2 as rpb
from tests import checkpoints_qwen3_vl, digits
from tests.asking import ask, image, question, video
from tests.e2e.test_digits import drawn
from tests.e2e.test_resuming import asking, listen
from tests.processes import Trio, trio
from tests.router.drawing import Heard

FRAMES, TOKENS = 63, 96
"""Of a video, an odd number; and of an answer."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints_qwen3_vl.write(tmp_path_factory.mktemp("checkpoint") / "pairs")


@pytest.fixture(scope="module")
def served(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with trio(
        tmp_path_factory.mktemp("overlaid"),
        model=pairs,
        encoders=2,
        encoder=["--dtype", "float32", "--lease-seconds", "3"],
        decoder=["--dtype", "float32", "--deterministic"],
        router=["--fan-out", "2"],
    ) as made:
        yield made


def asked(seed: int) -> rpb.GenerateRequest:
    frames, _ = drawn(np.random.default_rng(seed), FRAMES)
    shown = digits.shipped_images()[0][0].read_bytes()
    request = question("See ", video(digits.clip(frames, fps=2)), image(shown), ": which?", max_tokens=TOKENS)
    request.model = "pairs"
    request.sampling.ignore_eos, request.sampling.seed, request.sampling.temperature = True, 11, 0.8
    return request


def encoded(served: Trio) -> list[float]:
    return [encoder.counted()["chiasm_encoder_units_total:encoded"] for encoder in served.encoders]


@pytest.mark.timeout(240)
async def test_a_long_video_is_made_by_both_and_an_answer_goes_on_where_its_decoder_was_killed(
    pairs: Path, served: Trio
) -> None:
    request = asked(1)
    settings = LocalSettings(dtype=torch.float32, deterministic=True)
    inside = await LocalService.start(str(pairs), settings)
    try:
        alone = await ask(inside, request)
    finally:
        await inside.close()
    async with asking(served) as stub:
        whole = await listen(stub, request, Heard())
        made = encoded(served)
        assert sum(made) == (FRAMES + 1) // 2 + 1 and min(made) >= 16, "turns of eight, and a picture"
        heard, reached = Heard(), asyncio.Event()
        listening = asyncio.create_task(listen(stub, request, heard, meanwhile=(TOKENS // 2, reached)))
        await reached.wait()
        await asyncio.to_thread(served.decoder.kill)
        served.decoder.start()
        await listening
    assert whole.ids[0] == alone.ids and len(set(alone.ids)) > TOKENS // 4
    assert heard.tokens == whole.tokens and heard.text == whole.text
    assert [point.attempt for point in heard.points] == [1, 2]
    assert heard.finished[-1].usage.output_tokens == TOKENS
    assert encoded(served) == made, "nothing was encoded again"
    await asyncio.to_thread(served.decoder.wait_for, "ready")
    await served.settled(seconds=45)
