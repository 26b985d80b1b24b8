"""Prompt tokens a second to states after a layer, against Hugging Face's model of the same checkpoint, truncated.

One process, bfloat16, the same number of threads: 8 prompts of 512 token ids each, after layer 8 of 10, of a random
checkpoint. Ours: the whole system, all prompts at once, from ids at the client to arrays at the client: router, decoder
cut after that layer, pages, hashes, wire; every prompt is new, so nothing is found that was computed before. Theirs:
one static batch, layers behind the cut, last norm and head taken off. `ratio` is ours over theirs. The order is
A B B A; medians.

Before anything is timed both compute one prompt in float32; the states must be equal within rounding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.qwen3_vl_vs_hf import TEXT, VISION
from chiasm.client import AsyncClient
from chiasm.local import LocalService, LocalSettings
from tests import checkpoints_qwen3_vl
from tests.oracles.conditioning.compare import apart
from tests.oracles.qwen3_vl.undivided import Undivided

PROMPTS, TOKENS, LAYER = 8, 512, 8
IDS = 1000
"""Ids below the control tokens."""


class Theirs:
    """transformers' model, truncated."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        whole = Undivided(folder, dtype, attention="sdpa").model
        self._text: Any = whole.model.language_model
        self._text.layers = self._text.layers[:LAYER]
        self._text.norm = nn.Identity()

    @torch.inference_mode()
    def states(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """(prompts, tokens, width)."""
        states: Tensor = self._text(input_ids=torch.tensor(prompts), use_cache=False).last_hidden_state
        return states


def opened(folder: Path, dtype: torch.dtype) -> AsyncClient:
    async def service() -> LocalService:
        return await LocalService.start(str(folder), LocalSettings(dtype=dtype, condition_layers=LAYER))

    return AsyncClient(transport=service)


def prompts(seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, IDS, (PROMPTS, TOKENS)).tolist()  # type: ignore[no-any-return]


async def measure(folder: Path, rounds: int) -> dict[str, object]:
    path = checkpoints_qwen3_vl.write(folder / "qwen3_vl", text=TEXT, vision=VISION, dtype=torch.bfloat16)
    (one, *_) = prompts(0)
    async with opened(path, torch.float32) as client:
        got = await client.condition("qwen3_vl", token_ids=one, layer=LAYER)
    assert apart(got.states, Theirs(path, torch.float32).states([one])[0]) < 1e-4, "the two differ"

    theirs, seed = Theirs(path, torch.bfloat16), 1
    taken: dict[str, list[float]] = {"ours": [], "hf": []}
    async with opened(path, torch.bfloat16) as client:

        async def ours() -> None:
            calls = [
                client.condition("qwen3_vl", token_ids=ids, layer=LAYER, dtype="bfloat16") for ids in prompts(seed)
            ]
            told = await asyncio.gather(*calls)
            assert not any(one.usage.cached_prompt_tokens for one in told), "no prompt is known"

        for turn in range(1 + rounds):
            for side in ("ours", "hf", "hf", "ours"):
                seed += 1
                began = time.perf_counter()
                await (ours() if side == "ours" else asyncio.to_thread(theirs.states, prompts(seed)))
                if turn:  # the first warms up
                    taken[side].append(PROMPTS * TOKENS / (time.perf_counter() - began))
    ours_rate, hf = (statistics.median(taken[side]) for side in ("ours", "hf"))
    return {
        "ratio": round(ours_rate / hf, 3),
        "ours_per_s": round(ours_rate, 1),
        "hf_per_s": round(hf, 1),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks conditioning_vs_hf", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), options.rounds))
    if not options.json:
        print(f"tokens a second over those of transformers: {result['ratio']}")
    print(json.dumps(result))
