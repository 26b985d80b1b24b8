"""How long one decode step of a single answer takes, against Hugging Face's on the same weights.

One process, one thread, a random Qwen3 of 23 M parameters in 36 layers, 256 tokens of context that grow by those drawn.
Ours: one `DecoderEngine.step` of one row and the greedy draw of the sampler. Theirs: the cached forward pass of
`Qwen3ForCausalLM` (SDPA, `DynamicCache`, one logit row kept, inference mode) and an argmax. The order is A B B A, a few
steps each, so both grow alike; medians of the single steps. `ratio` is of float32; bfloat16 is told beside it.

`limit` is the ratio that a step would reach which did nothing but multiply one row with every weight, as our layers do.

Before anything is timed both are given the same tokens and their logits compared, prefill and steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import _qwen3
from chiasm.layers.decoder_layer import DecoderLayer
from chiasm.layers.linear import Linear
from chiasm.models.moss_vl.text import MossVLDecoder
from chiasm.models.registry import Model
from decoder_service.engine import DecoderEngine, Work
from decoder_service.sampler import Draw, Drawing, draw_rows

CONTEXT, COMPARED, BLOCK = 256, 16, 8
"""Tokens of the prompt, steps that are compared before any is timed, and steps between turns."""


class Ours:
    """One sequence in an engine."""

    def __init__(self, folder: Path, dtype: torch.dtype, tokens: int) -> None:
        model = Model(folder)
        self._engine = DecoderEngine(model.decoder(dtype=dtype), model.processor, text_tokens=tokens, visual_tokens=64)
        self._sequence = self._engine.sequence()
        self._drawing = Drawing()
        self._index = 0

    def logits(self, ids: list[int]) -> Tensor:
        """(vocabulary,) after these tokens."""
        self._sequence.extend([ids])
        (logits_rv,) = self._engine.step([Work(self._sequence, len(ids), "last")])
        return logits_rv[-1]

    def step(self, token: int) -> int:
        (drawn,) = draw_rows(self.logits([token]).unsqueeze(0), [Draw(self._drawing, self._index)])
        assert isinstance(drawn, int), drawn
        self._index += 1
        return drawn

    def multiply(self) -> float:
        """Seconds that one row takes through every weight of the self layers and the head."""
        assert isinstance(self._engine.half, MossVLDecoder)
        layers = [layer for layer in self._engine.half.layers if isinstance(layer, DecoderLayer)]
        weights = [one for layer in layers for one in layer.modules() if isinstance(one, Linear)]
        weights.append(self._engine.half.lm_head)
        rows = [torch.ones(1, one.in_features, dtype=one.weight.dtype) for one in weights]
        began = time.perf_counter()
        for one, row in zip(weights, rows, strict=True):
            one(row)
        return time.perf_counter() - began


class Theirs:
    """One cache of Hugging Face."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self._model = model
        self._cache = DynamicCache(config=model.config)

    def logits(self, ids: list[int]) -> Tensor:
        out = self._model(input_ids=torch.tensor([ids]), cache=self._cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1]
        return logits

    def step(self, token: int) -> int:
        return int(self.logits([token]).argmax())


@torch.inference_mode()
def compare(folder: Path, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Both sides' median milliseconds, and by how much their logits differ at most."""
    made = _qwen3.both(folder, dtype)
    ours = Ours(made.folder, dtype, CONTEXT + COMPARED + 2 * BLOCK * (rounds + 1) + 64)
    theirs = Theirs(made.theirs)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_qwen3.ORDINARY_IDS.start, _qwen3.ORDINARY_IDS.stop, (CONTEXT,), generator=generator).tolist()
    difference = 0.0
    for _ in range(COMPARED):
        one, other = ours.logits(ids), theirs.logits(ids).float()
        difference = max(difference, float((one - other).abs().max()))
        ids = [int(one.argmax())]
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    products: list[float] = []
    sides: dict[str, Callable[[int], int]] = {"ours": ours.step, "theirs": theirs.step}
    for warm in range(rounds + 1):
        products.append(ours.multiply())
        for side in ("ours", "theirs", "theirs", "ours"):
            token = ids[0]
            for _ in range(BLOCK):
                began = time.perf_counter()
                token = sides[side](token)
                if warm:
                    seconds[side].append(time.perf_counter() - began)
    ms = {side: 1000 * statistics.median(taken) for side, taken in seconds.items()}
    return {
        "ratio": round(ms["ours"] / ms["theirs"], 3),
        "limit": round(1000 * statistics.median(products) / ms["theirs"], 3),
        "ours_ms": round(ms["ours"], 3),
        "hf_ms": round(ms["theirs"], 3),
        "max_abs_diff": round(difference, 7),
    }


def measure(rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        full = compare(Path(folder), torch.float32, rounds)
        half = compare(Path(folder), torch.bfloat16, rounds)
    return {
        **full,
        "dtype": "float32",
        **{f"bfloat16_{name}": value for name, value in half.items()},
        "context": CONTEXT,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks step_vs_hf", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(options.rounds)
    if not options.json:
        print(f"one step: ours {result['ours_ms']} ms, Hugging Face {result['hf_ms']} ms")
    print(json.dumps(result))
