"""What it costs to believe an entry: the share of the miss path that goes into digests and checks.

Frames of 18 by 32 patches through a vision tower of MOSS-VL's width (1152) with 4 of its 27 blocks, its merger and the
keys and values of 12 cross layers (8 heads of 128), bfloat16, random weights. The miss path: encode, publish (`seal`,
`put` into a region), attach (`get`, `open_entry`; rotation is left out). Counted as verification: all of `seal` (the
finite check, the header, the digest) and all of `open_entry` (the contract, the digest again). Medians, one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from benchmarks.publish_attach import SECRET, contract, store
from chiasm.allocation import keep_freed
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.entry import open_entry, seal
from chiasm.models.moss_vl import FAMILY
from chiasm.models.moss_vl.config import read_config
from tests import checkpoints_tiny

GRID = (18, 32)
PATCH = 16

TEXT = {
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "cross_attention_layers": list(range(3, 48, 4)),
    "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
VISION = {
    "depth": 4,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": PATCH,
    "out_hidden_size": 4096,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}


def measure(frames: int, rounds: int) -> dict[str, object]:
    keep_freed()  # as a decoder does
    torch.manual_seed(0)
    config = read_config(checkpoints_tiny.config(TEXT, VISION), "benchmark")
    half = FAMILY.encoder(config, device=torch.device("cpu"), dtype=torch.bfloat16)
    for parameter in cast(nn.Module, half).parameters():
        parameter.requires_grad_(False)
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
    pixels = [torch.randint(0, 256, (1, 3, GRID[0] * PATCH, GRID[1] * PATCH), dtype=torch.uint8) for _ in range(frames)]
    spent: dict[str, list[float]] = {part: [] for part in ("encode", "seal", "put", "get", "open")}

    def timed(part: str, began: float) -> float:
        spent[part].append(time.perf_counter() - began)
        return time.perf_counter()

    with asyncio.Runner() as runner, store(256 << 20) as arena, torch.inference_mode():
        contracts = [contract(number) for number in range(frames)]
        for _ in range(rounds + 1):
            began = time.perf_counter()
            entries = half.encode(pixels, TorchVarlen())
            began = timed("encode", began)
            sealed = [seal(made, entry.contiguous(), SECRET) for made, entry in zip(contracts, entries, strict=True)]
            began = timed("seal", began)
            for made, one in zip(contracts, sealed, strict=True):
                runner.run(arena.put(one, made.key))
            began = timed("put", began)
            read = [runner.run(arena.get(made.key)) for made in contracts]
            began = timed("get", began)
            for made, found in zip(contracts, read, strict=True):
                assert found is not None and isinstance(open_entry(found, made, SECRET), Tensor)
            timed("open", began)
    middle = {part: statistics.median(seconds[1:]) for part, seconds in spent.items()}
    return {
        "share": round((middle["seal"] + middle["open"]) / sum(middle.values()), 4),
        "ms_per_frame": {part: round(1000 * seconds / frames, 3) for part, seconds in middle.items()},
        "frames": frames,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks verification", description=__doc__)
    parser.add_argument("--frames", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(options.frames, options.rounds)
    if not options.json:
        print(f"digests and checks: {result['share']:.1%} of the miss path")
    print(json.dumps(result))
