"""Tokens a second of many answers at once: continuous batching against Hugging Face's `generate` in static batches.

One process, one thread, a random Qwen3 of 23 M parameters in 36 layers, float32, 96 requests of 32 tokens each that all
wait at the start, answers of lognormal lengths (sigma 1, mean 64, at most 512, the same every time). Ours: 96 `Decode`
calls of a `DecoderServicer` with all that belongs to one, scheduler, sampler and protobuf messages, but no sockets.
Theirs: batches of 16 in the order of arrival, each until its longest answer is done. Greedy, no end but the length. The
order is A B B A; medians of each. Only tokens asked for count.

`limit` is how many row-steps the static batches compute for one that is wanted. What a step costs with more rows or
fewer comes on top of it, both ways. `equal_ids` of `compared_ids` greedy tokens of all requests are the same on both
sides up to the first that differs in each request: two tokens of random weights are sometimes within rounding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import _qwen3
from chiasm.rpc.v1 import decoder_pb2 as dpb
from tests.decoder_service.halves import CLOSE, ROOT, Halves, halves

REQUESTS, BATCH, PROMPT = 96, 16, 32
MEAN, SIGMA, LONGEST = 64, 1.0, 512

Ids = list[list[int]]


class Asked(NamedTuple):
    prompt: list[int]
    tokens: int
    """Of the answer."""


class Ran(NamedTuple):
    """What one side did with all requests: the ids of every answer, and how long it took."""

    ids: Ids
    seconds: float


def requests() -> list[Asked]:
    """The same every time."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, REQUESTS)
    prompts = rng.integers(_qwen3.ORDINARY_IDS.start, _qwen3.ORDINARY_IDS.stop, (REQUESTS, PROMPT))
    return [
        Asked(prompt.tolist(), min(max(round(length), 1), LONGEST))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def opened(system: Halves, asked: Asked) -> dpb.DecodeOpen:
    opened = dpb.DecodeOpen(
        model="digits",
        fingerprint=system.decoder.identity_digest,
        tenant_root=ROOT,
        sample=dpb.SAMPLE_MODE_WHEN_CLOSED,
        seed=0,
        attempt=1,
    )
    opened.prompt.plain.parts.add().tokens.ids.extend(asked.prompt)
    opened.sampling.max_tokens = asked.tokens
    opened.sampling.ignore_eos = True
    opened.sampling.temperature = 0
    return opened


async def ours(system: Halves, asked: Sequence[Asked]) -> Ran:
    """All requests at once; nothing is kept of the run before."""
    system.decoder.flush()
    messages = [opened(system, one) for one in asked]
    began = time.perf_counter()
    told = await asyncio.gather(*(system.told(message, CLOSE) for message in messages))
    return Ran([one.ids for one in told], time.perf_counter() - began)


def theirs(model: Any, asked: Sequence[Asked]) -> Ran:
    ids: Ids = []
    began = time.perf_counter()
    for at in range(0, len(asked), BATCH):
        batch = asked[at : at + BATCH]
        longest = max(one.tokens for one in batch)
        prompts = torch.tensor([one.prompt for one in batch])
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=longest, do_sample=False, use_cache=True
        )
        made = out[:, PROMPT:].tolist()
        ids += [answer[: one.tokens] for answer, one in zip(made, batch, strict=True)]
    return Ran(ids, time.perf_counter() - began)


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


async def measure(folder: Path, rounds: int, dtype: torch.dtype) -> dict[str, object]:
    asked = requests()
    tokens = sum(one.tokens for one in asked)
    made = _qwen3.both(folder, dtype)
    async with halves(made.folder, dtype=dtype, text_tokens=1 << 15, visual_tokens=64) as system:
        sides: dict[str, Callable[[], Awaitable[Ran]]] = {
            "ours": lambda: ours(system, asked),
            "theirs": lambda: asyncio.to_thread(theirs, made.theirs, asked),
        }
        some = [one._replace(tokens=8) for one in asked[:BATCH]]
        await ours(system, some)
        theirs(made.theirs, some)
        ran: dict[str, list[Ran]] = {side: [] for side in sides}
        before = system.decoder.scheduler.counts.steps, system.decoder.scheduler.counts.rows
        for _ in range(rounds):
            for side in ("ours", "theirs", "theirs", "ours"):
                ran[side].append(await sides[side]())
                assert [len(ids) for ids in ran[side][-1].ids] == [one.tokens for one in asked]
        counts = system.decoder.scheduler.counts
        steps, rows = (
            (now - then) // (2 * rounds) for now, then in zip((counts.steps, counts.rows), before, strict=True)
        )
    seconds = {side: statistics.median(one.seconds for one in runs) for side, runs in ran.items()}
    batches = [asked[at : at + BATCH] for at in range(0, len(asked), BATCH)]
    static_steps = [max(one.tokens for one in batch) for batch in batches]
    pairs = list(zip(ran["ours"][0].ids, ran["theirs"][0].ids, strict=True))
    same = [agreeing(one, other) for one, other in pairs]
    return {
        "ratio": round(seconds["theirs"] / seconds["ours"], 3),
        "ours_tokens_per_s": round(tokens / seconds["ours"], 1),
        "hf_tokens_per_s": round(tokens / seconds["theirs"], 1),
        "limit": round(BATCH * sum(static_steps) / tokens, 2),
        "tokens": tokens,
        "longest": max(one.tokens for one in asked),
        "steps": steps,
        "rows": rows,
        "hf_steps": sum(static_steps),
        "hf_rows": BATCH * (sum(static_steps) + len(batches) * (PROMPT - 1)),
        "equal_ids": sum(same),
        "compared_ids": sum(
            len(one) if count == len(one) else count + 1 for count, (one, _) in zip(same, pairs, strict=True)
        ),
        "equal_answers": sum(count == len(one) for count, (one, _) in zip(same, pairs, strict=True)),
        "requests": REQUESTS,
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks decode_vs_hf", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), options.rounds, getattr(torch, options.dtype)))
    if not options.json:
        print(f"tokens a second: ours {result['ours_tokens_per_s']}, Hugging Face {result['hf_tokens_per_s']}")
    print(json.dumps(result))
