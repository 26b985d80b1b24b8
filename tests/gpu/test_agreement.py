"""The same system on a CUDA device: the same answers as on the CPU."""

from __future__ import annotations

import pytest
import torch

from chiasm.local import LocalSettings
from tests import digits
from tests.asking import ask, question, running, video


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_the_shipped_clips_are_read_alike_on_both_devices(dtype: torch.dtype) -> None:
    requests = [question("Read the digits.", video(clip.path.read_bytes())) for clip in digits.shipped_clips()]
    ids = {}
    for device in ("cpu", "cuda"):
        async with running(settings=LocalSettings(device=device, dtype=dtype)) as service:
            ids[device] = [(await ask(service, request)).ids for request in requests]
    assert ids["cuda"] == ids["cpu"]
