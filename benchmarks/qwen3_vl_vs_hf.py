"""Output tokens a second of Qwen3-VL, against Hugging Face's `generate` on the same random checkpoint.

Bfloat16, the same number of threads, and as many cores as threads: this process and the media process that it starts
are bound to them, so nothing of ours runs beside what is counted. Every request is an image of its own of 224 x 288 and
a question; all answers have one length. Ours: the whole system, from encoded pictures to the last token: sandbox,
encoder, store, decoder and router, so many requests at once. Theirs: one static batch of as many with SDPA in inference
mode, prompts of equal length, from patches that were cut before; nothing is decoded, resized or tokenised in their
time. Both keep the memory that they free, as the services do. `ratio_N` is ours over theirs with N requests. The order
is A B B A; medians. Nothing of a picture is kept from one round to the next.

`cpu_ratio_N` is the same of processor time: of all threads of this process and of the media process. On a machine that
others use it is the steadier of the two.

Before anything is timed both answer one request in float32; the tokens must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from chiasm.allocation import keep_freed
from chiasm.local import LocalService, LocalSettings
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Rgb
from chiasm.models.registry import Model
from tests import checkpoints_qwen3_vl
from tests.asking import ask, image, question
from tests.oracles.qwen3_vl.undivided import Laid, Medium, Undivided, lay

HEIGHT, WIDTH = 224, 288
TOKENS = 64
CONCURRENCY = (1, 4, 16)
QUESTION = "What is to be seen here?"

TEXT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 6,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_heads": 8,
    "out_hidden_size": 1024,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [1, 3],
}


def pictures(count: int, seed: int) -> list[Rgb]:
    """Smooth ones, all different."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, HEIGHT // 32, WIDTH // 32, 3), np.uint8)
    return [np.ascontiguousarray(one.repeat(32, 0).repeat(32, 1)) for one in coarse]


def png(picture: Rgb) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(picture).save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


class Ran(NamedTuple):
    """Seconds of one side, by the clock and of processors."""

    clock: float
    cpu: float


class Spent:
    """Measures from when it is made: of this process, and of the media processes of a sandbox, those that have ended
    meanwhile too."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._began = self._now()

    def ran(self) -> Ran:
        return Ran(*(now - then for now, then in zip(self._now(), self._began, strict=True)))

    def _now(self) -> tuple[float, float]:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = time.process_time() + ended.ru_utime + ended.ru_stime
        for pid in self._sandbox.pids:
            with suppress(OSError):  # it has ended just now
                cpu += time.clock_gettime(_cpu_clock(pid))
        return time.perf_counter(), cpu


def _cpu_clock(pid: int) -> int:
    """The kernel's clock of a process's processor time, as `clock_getcpuclockid` names it."""
    return (~pid << 3) | 2


class Sides:
    """Both, of one checkpoint."""

    def __init__(self, service: LocalService, model: Model, theirs: Undivided, tokens: int) -> None:
        self._service = service
        self._model = model
        self._theirs = theirs
        self._tokens = tokens
        self._seed = 0

    async def ours(self, count: int) -> Ran:
        self._seed += 1
        requests = []
        for picture in pictures(count, self._seed):
            requests.append(question(image(png(picture)), QUESTION, model=self._service.name, max_tokens=self._tokens))
            requests[-1].sampling.ignore_eos = True
        spent = Spent(self._service.sandbox)
        answers = await asyncio.gather(*(ask(self._service, request) for request in requests))
        ran = spent.ran()
        assert all(len(answer.ids) == self._tokens for answer in answers)
        assert sum(answer.encoded for answer in answers) == count, "no picture is known"
        return ran

    def hf(self, count: int) -> Ran:
        self._seed += 1
        laid = [self._laid(picture) for picture in pictures(count, self._seed)]
        inputs = [self._theirs.inputs(one) for one in laid]
        batch = {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
        spent = Spent(self._service.sandbox)
        with torch.inference_mode():
            out = self._theirs.model.generate(
                **batch, max_new_tokens=self._tokens, min_new_tokens=self._tokens, do_sample=False
            )
        ran = spent.ran()
        assert out.shape[1] == batch["input_ids"].shape[1] + self._tokens
        return ran

    def _laid(self, picture: Rgb) -> Laid:
        sequence = self._service.decoder.engine.sequence()
        return lay(self._model, [("user", [Medium("image", [picture]), QUESTION])], sequence)

    async def equal(self, folder: Path) -> bool:
        """Whether both answer alike, in float32."""
        (picture,) = pictures(1, 0)
        theirs = Undivided(folder)
        expected = theirs.greedy(self._laid(picture), 8, sorted(self._model.prompt().banned_ids))
        service = await LocalService.start(str(folder), LocalSettings(dtype=torch.float32))
        try:
            asked = question(image(png(picture)), QUESTION, model=service.name, max_tokens=8)
            asked.sampling.ignore_eos = True
            return (await ask(service, asked)).ids == expected
        finally:
            await service.close()


async def measure(folder: Path, rounds: int, tokens: int) -> dict[str, object]:
    path = checkpoints_qwen3_vl.write(
        folder / "qwen3_vl", text=TEXT, vision=VISION, dtype=torch.bfloat16, tie_word_embeddings=True
    )
    model, theirs = Model(path), Undivided(path, torch.bfloat16, attention="sdpa")
    parameters = sum(parameter.numel() for parameter in theirs.model.parameters())
    service = await LocalService.start(str(path), LocalSettings(dtype=torch.bfloat16))
    result: dict[str, object] = {}
    try:
        sides = Sides(service, model, theirs, tokens)
        assert await sides.equal(path), "the two answer differently"
        for count in CONCURRENCY:
            taken: dict[str, list[Ran]] = {"ours": [], "hf": []}
            await sides.ours(count)
            await asyncio.to_thread(sides.hf, count)
            for _ in range(rounds):
                for side in ("ours", "hf", "hf", "ours"):
                    ran = await sides.ours(count) if side == "ours" else await asyncio.to_thread(sides.hf, count)
                    taken[side].append(ran)
            ours, hf = (Ran(*map(statistics.median, zip(*taken[side], strict=True))) for side in ("ours", "hf"))
            result |= {
                f"ratio_{count}": round(hf.clock / ours.clock, 3),
                f"cpu_ratio_{count}": round(hf.cpu / ours.cpu, 3),
                f"ours_per_s_{count}": round(count * tokens / ours.clock, 1),
                f"hf_per_s_{count}": round(count * tokens / hf.clock, 1),
            }
    finally:
        await service.close()
    return result | {
        "parameters": parameters,
        "tokens": tokens,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks qwen3_vl_vs_hf", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads :])
    keep_freed()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), options.rounds, options.tokens))
    if not options.json:
        ratios = ", ".join(f"{result[f'ratio_{n}']} at {n}" for n in CONCURRENCY)
        print(f"tokens a second over those of generate: {ratios}")
    print(json.dumps(result))
