"""What FlashInfer's kernels gain over torch's on the same device: cross-attention of three kinds of step.

One device, random keys, heads of the 8-billion model (32 over 8, 128 dimensions) in bfloat16, two cross layers, frames
of 145 visual tokens. `prefill`: 512 rows of which every tenth sees a new frame, the last of them 256 frames.
`together`: a decode row of each of 16 questions about one video of 64 frames. `apart`: the same over 16 copies.
A: torch. B: FlashInfer. The order is A B B A; medians of each. A ratio includes planning, which is also told apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from chiasm.attention.backend import Attention, SequenceRows, Step
from chiasm.attention.choose import AttentionName, make
from chiasm.attention.pages import Pools

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS = 2
FRAME = 145
PREFILL_FRAMES, PREFILL_ROWS, QUESTIONS, QUESTION_FRAMES = 256, 512, 16, 64


def looking(seen: Sequence[int], slot: int) -> SequenceRows:
    """A sequence whose rows see so many frames each, of a video that lies from a slot on."""
    boundaries = np.array([(0, FRAME * frames) for frames in seen], dtype=np.int64)
    extents = [(FRAME * i, slot + FRAME * i, FRAME) for i in range(max(seen))]
    return SequenceRows(0, len(seen), list(range(-(-len(seen) // 16))), boundaries, extents)


def steps() -> dict[str, Step]:
    first = PREFILL_FRAMES - PREFILL_ROWS // 10
    video = FRAME * QUESTION_FRAMES
    return {
        "prefill": Step([looking([min(PREFILL_FRAMES, first + row // 10) for row in range(PREFILL_ROWS)], 0)]),
        "together": Step([looking([QUESTION_FRAMES], 0) for _ in range(QUESTIONS)]),
        "apart": Step([looking([QUESTION_FRAMES], video * i) for i in range(QUESTIONS)]),
    }


def seconds(attention: Attention, step: Step, q: torch.Tensor) -> tuple[float, float]:
    """Of planning, and of all layers after it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    attention.plan(Step([]))  # nothing of the step before is kept
    attention.plan(step)
    planned = time.perf_counter()
    for layer in range(LAYERS):
        attention.attend_cross(q, layer=layer)
    torch.cuda.synchronize()
    return planned - began, time.perf_counter() - planned


@torch.inference_mode()
def measure(device: torch.device, rounds: int) -> dict[str, object]:
    pools = Pools(
        self_layers=1,
        cross_layers=LAYERS,
        pages=PREFILL_ROWS // 16,
        page_size=16,
        slots=FRAME * max(PREFILL_FRAMES, QUESTIONS * QUESTION_FRAMES),
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        device=device,
        dtype=torch.bfloat16,
    )
    pools.cross_kv.normal_()
    names: tuple[AttentionName, ...] = ("torch", "flashinfer")
    backends = {name: make(name, pools, heads=HEADS) for name in names}
    result: dict[str, object] = {}
    for kind, step in steps().items():
        q = torch.randn(step.rows, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        taken: dict[AttentionName, list[tuple[float, float]]] = {name: [] for name in backends}
        for attention in backends.values():
            seconds(attention, step, q)
        for _ in range(rounds):
            for name in (*names, *reversed(names)):
                taken[name].append(seconds(backends[name], step, q))
        plan, run = ({n: statistics.median(t[i] for t in all_) for n, all_ in taken.items()} for i in (0, 1))
        result[f"{kind}_ratio"] = round((plan["torch"] + run["torch"]) / (plan["flashinfer"] + run["flashinfer"]), 3)
        for name in backends:
            result[f"{kind}_{name}_ms"] = round(1000 * run[name], 3)
            result[f"{kind}_{name}_plan_ms"] = round(1000 * plan[name], 3)
    return {**result, "device": torch.cuda.get_device_name(device), "layers": LAYERS, "rounds": rounds}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks gpu_attention", description=__doc__)
    parser.add_argument("--device", default="cuda", help="a CUDA device")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: this measures nothing else")
    result = measure(torch.device(options.device), options.rounds)
    if not options.json:
        for kind in ("prefill", "together", "apart"):
            print(f"{kind}: torch takes {result[f'{kind}_ratio']} times as long")
    print(json.dumps(result))
