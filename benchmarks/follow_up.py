"""How much sooner a follow-up question is answered when its conversation and its video are cached.

One process, a random model of about 25 M parameters in the text half, one short video and about 2,000 tokens of text,
then a turn of about 100 new ones. A: nothing is cached, neither text nor units nor entries. B: the first question was
asked before, and the video is known by its digest. The order is A B B A; medians of each of the time to the first
token. `limit` is the ratio of prompt tokens to those computed: what one gains at most where only rows cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import torch

from chiasm.local import LocalService, LocalSettings
from chiasm.models.finding import SHIPPED
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests import checkpoints_tiny

TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "cross_attention_layers": [3, 7],
    "vocab_size": 447,
    "max_position_embeddings": 8192,
    "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
}

OLD, NEW = 2000, 100
"""Tokens of the conversation so far and of the new turn, about."""


class Asked(NamedTuple):
    seconds: float
    """To the first token."""
    tokens: int
    """Of the prompt."""
    cached: int


def checkpoint(folder: Path) -> Path:
    """A random model with the tokenizer and the eyes of the shipped one."""
    digits = SHIPPED / "digits"
    shipped = json.loads((digits / "config.json").read_text())
    ids = {name: value for name, value in shipped.items() if name.endswith("_token_id")}
    vision = {**shipped["vision_config"], "out_hidden_size": TEXT["hidden_size"]}
    made = checkpoints_tiny.write(folder / "random", checkpoints_tiny.config(TEXT, vision, **ids))
    shutil.copy(digits / "tokenizer.json", made)
    return made


def conversation(service: LocalService, *, follow_up: bool) -> rpb.GenerateRequest:
    """The first question, or that, an answer and the next one."""
    line = "Here is the next line of a long text about what is to be seen. "
    per_line = len(service.decoder.prompt.text(line))
    request = rpb.GenerateRequest(model=service.name)
    turns = request.prompt.conversation.turns
    first = turns.add(role=pb.ROLE_USER)
    first.parts.add(slot=0)
    first.parts.add(text=line * (OLD // per_line))
    if follow_up:
        turns.add(role=pb.ROLE_ASSISTANT).parts.add(text="I see.")
        turns.add(role=pb.ROLE_USER).parts.add(text=line * (NEW // per_line))
    clip = (SHIPPED / "digits" / "held_out" / "clip_8.mp4").read_bytes()
    request.media.add(kind=pb.MEDIA_KIND_VIDEO, data=clip)
    request.sampling.max_tokens = 1
    return request


async def ask(service: LocalService, request: rpb.GenerateRequest) -> Asked:
    began = time.perf_counter()
    first: float | None = None
    async with aclosing(service.generate(request)) as events:
        async for event in events:
            if event.HasField("tokens"):
                first = first or time.perf_counter() - began
            if event.HasField("finished"):
                usage = event.finished.usage
                assert first is not None, "an answer has a token"
                return Asked(first, usage.prompt_tokens, usage.cached_prompt_tokens)
    raise AssertionError("an answer ends")


async def measure(folder: Path, rounds: int) -> dict[str, object]:
    service = await LocalService.start(str(checkpoint(folder)), LocalSettings(text_tokens=8192))
    asked: dict[bool, list[Asked]] = {True: [], False: []}
    try:
        await ask(service, conversation(service, follow_up=True))
        for _ in range(rounds):
            for hit in (False, True, True, False):
                service.decoder.flush()
                await service.store.flush()
                if hit:
                    await ask(service, conversation(service, follow_up=False))
                asked[hit].append(await ask(service, conversation(service, follow_up=True)))
    finally:
        await service.close()
    cold, warm = (statistics.median(one.seconds for one in asked[hit]) for hit in (False, True))
    last = asked[True][-1]
    return {
        "ratio": round(cold / warm, 3),
        "limit": round(last.tokens / (last.tokens - last.cached), 1),
        "cold_ms": round(1000 * cold, 2),
        "hit_ms": round(1000 * warm, 2),
        "prompt_tokens": last.tokens,
        "cached_prompt_tokens": last.cached,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks follow_up", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), options.rounds))
    if not options.json:
        print(f"first token of a follow-up: cold {result['cold_ms']} ms, cached {result['hit_ms']} ms")
    print(json.dumps(result))
