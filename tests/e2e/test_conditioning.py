"""A cut decoder among real processes: states over sockets equal those of one process, and answers are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chiasm import AsyncClient, Frames, Image, InvalidRequest, Unsupported
from chiasm.client import Content
from tests import checkpoints_qwen3_vl
from tests.processes import trio

LAYERS = 3


async def test_a_folder_that_is_cut_is_served_by_processes_and_tells_states_alone(tmp_path: Path) -> None:
    folder = checkpoints_qwen3_vl.write(tmp_path / "tiny")
    rng = np.random.default_rng(1)
    pictures = [rng.integers(0, 256, (64, 96, 3), dtype=np.uint8) for _ in range(4)]
    asked: list[Content] = ["a red fox", ["See ", Image(pictures[0]), Frames(pictures[1:], fps=2.0), " here."]]
    with trio(tmp_path, model=folder, decoder=["--condition-layers", str(LAYERS)]) as served:
        async with AsyncClient.in_process(str(folder)) as whole, AsyncClient(served.target) as client:
            (model,) = await client.list_models()
            assert (model.operations, model.layers) == (("condition",), LAYERS)
            for content in asked:
                expected = await whole.condition(str(folder), content, layers=[LAYERS, 1])
                for known in (False, True):
                    got = await client.condition(model.name, content, layers=[LAYERS, 1])
                    np.testing.assert_allclose(got.states, expected.states, rtol=1e-4, atol=1e-4)
                    assert (got.usage.cached_prompt_tokens == got.usage.prompt_tokens) is known
            with pytest.raises(Unsupported) as caught:
                await client.generate(model.name, "a red fox")
            assert caught.value.reason == "OPERATION_UNSUPPORTED"
            with pytest.raises(InvalidRequest, match=f"1 to {LAYERS}"):
                await client.condition(model.name, "a red fox", layer=LAYERS + 1)
        await served.settled()
