"""What CUDA graphs gain: decode steps that are replayed against the same steps launched kernel by kernel.

One device, a decoder of the 11-billion model's shape (36 self and 12 cross layers, 4,096 wide, 32 heads over 8) with
random weights in bfloat16, FlashInfer's kernels in both. A step is planned, computed and its best tokens read by the
host. Every row has 1,000 text tokens behind it and sees nothing (`text`), its own video (`own`) or the one video that
all of them see (`one`). A: eager. B: graph. The order is A B B A; medians of each, and how far the logits are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.shared_video import TEXT_CONFIG, VISION_CONFIG
from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.capture import CudaDevice
from chiasm.attention.choose import make
from chiasm.attention.flashinfer_backend import FlashInferAttention
from chiasm.attention.pages import Pools
from chiasm.models.moss_vl.config import Config
from chiasm.models.moss_vl.text import MossVLDecoder
from decoder_service.forward import EagerForward, Forward
from decoder_service.graphs import GraphForward

BATCHES = (1, 16, 32)
TEXT, PAGE = 1_000, 16
PAGES = -(-TEXT // PAGE)
FRAME = 145


def decoder(layers: int, device: torch.device) -> MossVLDecoder:
    """Random weights; gates that let what the cross layers say through."""
    text = replace(
        TEXT_CONFIG,
        hidden_size=4_096,
        intermediate_size=12_288,
        num_hidden_layers=layers,
        cross_attention_layers=tuple(range(2, layers, 4)),
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        mrope_section=(24, 20, 20),
    )
    tokens = dict.fromkeys(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), text.vocab_size - 1
    )
    half = MossVLDecoder(Config(vision=VISION_CONFIG, text=text, **tokens), device=device, dtype=torch.bfloat16)
    for name, parameter in half.named_parameters():
        if name.endswith("gate"):
            parameter.data.fill_(1.0)
    return half


def pools(half: MossVLDecoder, slots: int) -> Pools:
    """Random keys and values of the largest batch's text, and of so many visual tokens."""
    made = Pools(
        self_layers=half.self_layers,
        cross_layers=half.entry_shape.layers,
        pages=max(BATCHES) * PAGES,
        page_size=PAGE,
        slots=slots,
        kv_heads=half.kv_heads,
        head_dim=half.head_dim,
        device=half.device,
        dtype=half.dtype,
        spare=True,
    )
    made.self_kv.normal_()
    made.cross_kv[:, :, :, :slots].normal_()
    return made


def steps(frames: int) -> dict[str, Step]:
    """The next token of every sequence, by what they see and how many they are."""
    video = FRAME * frames
    made = {}
    for rows in BATCHES:
        for kind in ("text", "own", "one"):
            seen = 0 if kind == "text" else video
            made[f"{kind}_{rows}"] = Step(
                [
                    SequenceRows(
                        TEXT - 1,
                        1,
                        range(i * PAGES, (i + 1) * PAGES),
                        np.array([[0, seen]], dtype=np.int64),
                        [(0, video * i if kind == "own" else 0, video)] if seen else [],
                    )
                    for i in range(rows)
                ]
            )
    return made


def logits(forward: Forward, step: Step) -> Tensor:
    rows = len(step.sequences)
    return forward(step, list(range(7, 7 + rows)), np.full((3, rows), TEXT - 1), range(rows))


def seconds(forward: Forward, step: Step) -> float:
    """Until the host has the tokens that would be drawn."""
    began = time.perf_counter()
    logits(forward, step).argmax(-1).tolist()
    return time.perf_counter() - began


def compare(eager: Forward, graph: Forward, step: Step, rounds: int) -> dict[str, float]:
    expected, got = logits(eager, step), logits(graph, step)  # and whatever has to be built or captured
    taken: dict[Forward, list[float]] = {eager: [], graph: []}
    for _ in range(rounds):
        for forward in (eager, graph, graph, eager):
            taken[forward].append(seconds(forward, step))
    one, other = (statistics.median(taken[forward]) for forward in (eager, graph))
    return {
        "ratio": round(one / other, 3),
        "eager_ms": round(1000 * one, 3),
        "graph_ms": round(1000 * other, 3),
        "apart": round(((got - expected).abs().max() / expected.abs().max()).item(), 5),
    }


@torch.inference_mode()
def measure(device: torch.device, *, layers: int, frames: int, rounds: int) -> dict[str, object]:
    half = decoder(layers, device)
    held = pools(half, max(BATCHES) * FRAME * frames)
    attention = make("flashinfer", held, heads=half.heads, fixed_rows=max(BATCHES))
    assert isinstance(attention, FlashInferAttention)
    eager = EagerForward(half, attention)
    graph = GraphForward(half, half.forward, eager, attention.fixed(max(BATCHES)), CudaDevice(device))
    began = time.perf_counter()
    before = torch.cuda.memory_reserved(device)
    graph.prepare()
    result: dict[str, object] = {
        "prepare_s": round(time.perf_counter() - began, 2),
        "prepare_mib": (torch.cuda.memory_reserved(device) - before) >> 20,
    }
    for kind, step in steps(frames).items():
        replayed = graph.replayed
        result |= {f"{kind}_{name}": value for name, value in compare(eager, graph, step, rounds).items()}
        assert graph.replayed == replayed + 2 * rounds + 1, "a step was not replayed"
    return {
        **result,
        "device": torch.cuda.get_device_name(device),
        "layers": layers,
        "visual_tokens": FRAME * frames,
        "rounds": rounds,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks gpu_decode", description=__doc__)
    parser.add_argument("--device", default="cuda", help="a CUDA device")
    parser.add_argument("--layers", type=int, default=48, help="fewer fit on a smaller device")
    parser.add_argument("--frames", type=int, default=64, help="of each video")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: this measures nothing else")
    result = measure(torch.device(options.device), layers=options.layers, frames=options.frames, rounds=options.rounds)
    if not options.json:
        for rows in BATCHES:
            ratios = (f"{kind} {result[f'{kind}_{rows}_ratio']}" for kind in ("text", "own", "one"))
            print(f"{rows} rows, eager against graph: {', '.join(ratios)}")
    print(json.dumps(result))
