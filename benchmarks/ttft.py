"""How soon the first token comes of a question about a video that was asked about before.

One process, three sides. Cold: nothing is kept of the video, neither entries nor the memory of it. Hit: the same upload
with another text before and behind it, so that no row of text is cached, while the units are in the decoder's pool.
Text: a question of as many tokens without a video, no row of which is cached. 32 frames of 448 × 448 (6,304 visual
tokens) through a vision transformer of width 256 and depth 8; `TEXT` is the decoder. Text and hit in the order
A B B A, a cold one in every round; medians.

A hit reads, besides what a text does, all visual tokens in every cross layer, which a text skips. `limit_ratio` is the
ratio of the decoder's steps alone, and `outside_ms` what either side takes beside them. The decoder has 28 self layers
and one cross layer, 90 M parameters: with a cross layer for every three self layers, as in the 8B checkpoints, the
layers alone would make a hit 1.33 times a text.
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

import torch
from torch import Tensor

from benchmarks import _seeing
from chiasm.local import LocalService, LocalSettings
from chiasm.rpc.v1 import common_pb2 as pb
from decoder_service.engine import DecoderEngine, Work

FRAMES, BEFORE, QUESTION = 32, 20, 100

TEXT: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 29,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "cross_attention_layers": [14],
    "vocab_size": 447,
    "max_position_embeddings": 8192,
    "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
}


class Steps:
    """Seconds that a decoder's steps have taken since they were last asked for."""

    def __init__(self, engine: DecoderEngine) -> None:
        self._step = engine.step
        self._seconds = 0.0
        engine.step = self._timed  # type: ignore[method-assign]

    def _timed(self, batch: Sequence[Work]) -> list[Tensor]:
        began = time.perf_counter()
        logits = self._step(batch)
        self._seconds += time.perf_counter() - began
        return logits

    def taken(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


async def measure(folder: Path, rounds: int) -> dict[str, object]:
    service = await LocalService.start(str(_seeing.checkpoint(folder, TEXT)), LocalSettings(store_bytes=1 << 30))
    taken: dict[str, list[_seeing.Asked]] = {"cold": [], "hit": [], "text": []}
    inside: dict[str, list[float]] = {side: [] for side in taken}
    steps = Steps(service.decoder.engine)
    seed = 0

    async def ask(side: str) -> None:
        nonlocal seed
        seed += 1
        question: list[str | pb.Media] = [
            _seeing.text(service, BEFORE, 2 * seed),
            video,
            _seeing.text(service, QUESTION, 2 * seed + 1),
        ]
        if side == "text":
            more = taken["hit"][0].usage.prompt_tokens - bare
            question = [_seeing.text(service, more, 2 * seed)]
        if side == "cold":
            service.decoder.flush()
            await service.store.flush()
        steps.taken()
        taken[side].append(await _seeing.ask(service, question))
        inside[side].append(steps.taken())

    try:
        video = await _seeing.upload(service, _seeing.clip(FRAMES, 0), 1)
        bare = (await _seeing.ask(service, ["a"])).usage.prompt_tokens - 1
        for side in ("cold", "hit", "text"):
            await ask(side)
        for _ in range(rounds):
            for side in ("cold", "text", "hit", "hit", "text", "text", "hit", "hit", "text"):
                await ask(side)
    finally:
        await service.close()
    seconds = {side: statistics.median(one.seconds for one in asked[1:]) for side, asked in taken.items()}
    outside = {
        side: statistics.median(one.seconds - step for one, step in zip(asked[1:], inside[side][1:], strict=True))
        for side, asked in taken.items()
    }
    limit = statistics.median(inside["hit"][1:]) / statistics.median(inside["text"][1:])
    hit, text = taken["hit"][-1].usage, taken["text"][-1].usage
    assert hit.prompt_tokens == text.prompt_tokens, (hit.prompt_tokens, text.prompt_tokens)
    cached = max(one.usage.cached_prompt_tokens for asked in taken.values() for one in asked)
    return {
        "hit_ratio": round(seconds["hit"] / seconds["text"], 3),
        "cold_over_hit": round(seconds["cold"] / seconds["hit"], 2),
        **{f"{side}_ms": round(1000 * taken, 2) for side, taken in seconds.items()},
        "limit_ratio": round(limit, 3),
        "outside_ms": {side: round(1000 * outside[side], 2) for side in ("hit", "text")},
        "prompt_tokens": hit.prompt_tokens,
        "cached_prompt_tokens": cached,
        "visual_tokens": hit.visual_tokens,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks ttft", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), options.rounds))
    if not options.json:
        print(f"first token: cold {result['cold_ms']} ms, hit {result['hit_ms']} ms, text {result['text_ms']} ms")
    print(json.dumps(result))
