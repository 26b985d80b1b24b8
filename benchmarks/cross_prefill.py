"""How much sooner cross-attention by row boundaries is done than SDPA with a dense boolean mask.

One process, one layer, a quarter of the 8B model's heads. 64 frames are spread evenly over the text, so that half of
rows times keys is hidden; then once more with all frames before the text, where nothing is. A: `TorchAttention`, its
plan included. B: SDPA over the same keys with a mask made beforehand. The order is A B B A; medians of each. `limit` is
the share of rows times keys that is seen, turned over: what two equally fast kernels would differ by.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._alternate import alternate
from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.pages import Pools
from chiasm.attention.torch_backend import TorchAttention

KV_HEADS, GROUP, DIM = 2, 4, 128


def case(pools: Pools, last: npt.NDArray[np.int64], q_nhd: Tensor, rounds: int) -> dict[str, float]:
    """Times one step whose rows see the first `last[i]` slots of the pool, both ways."""
    rows, slots = len(last), pools.cross_kv.shape[3]
    boundaries = np.stack([np.zeros_like(last), last], axis=1)
    step = Step([SequenceRows(0, rows, range(rows // pools.page_size), boundaries, [(0, 0, slots)])])
    attention = TorchAttention(pools)
    keys, values = pools.cross_kv[0].unsqueeze(1)
    mask = torch.arange(slots) < torch.from_numpy(last).unsqueeze(1)

    def by_boundaries() -> Tensor:
        attention.plan(step)
        return attention.attend_cross(q_nhd, layer=0)

    def by_mask() -> Tensor:
        q = q_nhd.transpose(0, 1).unsqueeze(0)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    difference = (by_boundaries() - by_mask()).abs().max().item()
    ours, theirs = alternate(by_boundaries, by_mask, rounds)
    return {"ratio": theirs / ours, "ms": 1000 * ours, "dense_mask_ms": 1000 * theirs, "max_abs_diff": difference}


@torch.inference_mode()
def measure(rows: int, slots: int, frames: int, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    pools = Pools(
        self_layers=1,
        cross_layers=1,
        pages=rows // 16,
        page_size=16,
        slots=slots,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    random = torch.Generator().manual_seed(0)
    pools.cross_kv.normal_(generator=random)
    q_nhd = torch.randn(rows, KV_HEADS * GROUP, DIM, generator=random).to(dtype)
    frame_of_row = np.arange(rows) * frames // rows
    spread = case(pools, (frame_of_row + 1) * (slots // frames), q_nhd, rounds)
    first = case(pools, np.full(rows, slots), q_nhd, rounds)
    return {
        **{name: round(value, 8 if name == "max_abs_diff" else 3) for name, value in spread.items()},
        "frames_first_ratio": round(first["ratio"], 3),
        "frames_first_max_abs_diff": round(first["max_abs_diff"], 8),
        "limit": round(2 * frames / (frames + 1), 3),
        "rows": rows,
        "slots": slots,
        "frames": frames,
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks cross_prefill", description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(options.rows, options.slots, options.frames, getattr(torch, options.dtype), options.rounds)
    if not options.json:
        print(f"cross-attention: by boundaries {result['ms']} ms, dense mask {result['dense_mask_ms']} ms")
    print(json.dumps(result))
