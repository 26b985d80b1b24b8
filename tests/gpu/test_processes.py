"""Three processes with both halves on a CUDA device: the ids that one process gives on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from chiasm import AsyncClient, Image, Video
from chiasm.client import Content
from tests import digits
from tests.processes import trio

QUESTION = "Read the digits."


@pytest.mark.gpu
@pytest.mark.timeout(240)
async def test_workers_on_a_gpu_answer_as_one_process_on_the_cpu(tmp_path: Path) -> None:
    """In float32, in which both devices agree to the last token. The decoder's pools stay small: two halves share the
    device with whatever else is there."""
    on_gpu = ["--device", "cuda", "--dtype", "float32"]
    clips, images = digits.shipped_clips(), digits.shipped_images()
    questions: list[Content] = [[QUESTION, Video(clip.path)] for clip in clips]
    questions.append([*(Image(path.read_bytes()) for path, _ in images[:2]), QUESTION])
    questions.append([Video(clips[0].path), "Which digit is at 1.0 seconds?"])
    with trio(tmp_path, encoder=on_gpu, decoder=[*on_gpu, "--pool-bytes", "64MiB"]) as served:
        async with AsyncClient.in_process("digits") as inside, AsyncClient(served.target) as outside:
            for asked in questions:
                here = await inside.generate("digits", asked, max_tokens=24)
                there = await outside.generate("digits", asked, max_tokens=24)
                assert (there.ids, there.text) == (here.ids, here.text)
        await served.settled()
