"""What 16 questions about one video save when its keys and values are kept and read once.

One process, the heads of the 8B model (32 of queries, 8 of keys, 128 wide), 2 cross layers, 8,192 visual tokens, 64
tokens of text to a question; each question computes its next row. A: all 16 look at the same slots of the cross pool.
B: each at a copy of its own. The same backend serves both, so what differs is the sharing. Of a step, first the
attention of both cross layers alone, its plan included, in bfloat16 and in float32; then all of a decoder of 6 self and
2 cross layers, 1,024 wide, in bfloat16. The order is A B B A; medians of each.

Freed memory is kept, as a decoder keeps it on a CPU: else the kernel's own buffers cost the shared side most.

The limit of the attention is what 16 readings take against the products of 64 rows: 5 to 6 in float32 on one core,
where products are as slow as memory. The limit of the bytes is 16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks._alternate import alternate
from chiasm.allocation import keep_freed
from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.pages import Pools
from chiasm.attention.torch_backend import TorchAttention
from chiasm.models.moss_vl.config import Config, TextConfig, VisionConfig
from chiasm.models.moss_vl.text import MossVLDecoder

TEXT_CONFIG = TextConfig(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    cross_attention_layers=(2, 6),
    vocab_size=32_000,
    max_position_embeddings=1 << 15,
    rms_norm_eps=1e-6,
    rope_theta=5e6,
    mrope_section=(24, 20, 20),
)
VISION_CONFIG = VisionConfig(
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    in_channels=3,
    patch_size=16,
    spatial_merge_size=2,
    out_hidden_size=1024,
    num_position_embeddings=4,
    deepstack_visual_indexes=(),
)
"""Of an encoder that is not built here."""

QUESTIONS, TEXT, SLOTS = 16, 64, 8192
LAYERS = len(TEXT_CONFIG.cross_attention_layers)
HEADS, KV_HEADS, DIM = TEXT_CONFIG.num_attention_heads, TEXT_CONFIG.num_key_value_heads, TEXT_CONFIG.head_dim
PAGE = 16


def pools(copies: int, dtype: torch.dtype) -> Pools:
    """Pools that hold the text of all questions and so many copies of one video."""
    made = Pools(
        self_layers=len(TEXT_CONFIG.self_attention_layers),
        cross_layers=LAYERS,
        pages=QUESTIONS * (TEXT // PAGE),
        page_size=PAGE,
        slots=copies * SLOTS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    random = torch.Generator().manual_seed(0)
    made.self_kv.normal_(generator=random)
    video = torch.randn(LAYERS, 2, KV_HEADS, SLOTS, DIM, generator=random).to(dtype)
    for copy in range(copies):
        made.cross_kv[:, :, :, copy * SLOTS : (copy + 1) * SLOTS] = video
    return made


def step(copies: int) -> Step:
    """The next token of every question, each of which sees its whole copy of the video."""
    pages = TEXT // PAGE
    sees = np.array([[0, SLOTS]], dtype=np.int64)
    return Step(
        [
            SequenceRows(TEXT - 1, 1, range(i * pages, (i + 1) * pages), sees, [(0, i % copies * SLOTS, SLOTS)])
            for i in range(QUESTIONS)
        ]
    )


def attention(copies: int, q_lnhd: Tensor) -> Callable[[], Tensor]:
    """(layers, rows, heads, dim) of the cross-attention of one step, its plan included."""
    backend, work = TorchAttention(pools(copies, q_lnhd.dtype)), step(copies)

    def run() -> Tensor:
        backend.plan(work)
        return torch.stack([backend.attend_cross(q_nhd, layer=layer) for layer, q_nhd in enumerate(q_lnhd)])

    return run


def whole_step(copies: int, half: MossVLDecoder) -> Callable[[], Tensor]:
    """(questions, vocabulary) logits of one step, its plan included."""
    backend, work = TorchAttention(pools(copies, half.dtype)), step(copies)
    ids, rows = torch.full((QUESTIONS,), 7), torch.arange(QUESTIONS)
    positions = torch.full((3, QUESTIONS), TEXT - 1)
    sees = torch.from_numpy(work.sees())

    def run() -> Tensor:
        backend.plan(work)
        logits: Tensor = half(ids, positions, sees, rows, backend)
        return logits

    return run


def decoder() -> MossVLDecoder:
    """Random weights, with gates that let what the cross layers say through."""
    tokens = dict.fromkeys(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), TEXT_CONFIG.vocab_size - 1
    )
    config = Config(vision=VISION_CONFIG, text=TEXT_CONFIG, **tokens)
    torch.manual_seed(2)
    half = MossVLDecoder(config, device=torch.device("cpu"), dtype=torch.bfloat16)
    for name, parameter in half.named_parameters():
        if name.endswith("gate"):
            parameter.fill_(1.0)
    return half


def compare(make: Callable[[int], Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """`make` is given 1 or 16 copies of the video."""
    shared, copied = make(1), make(QUESTIONS)
    difference = (shared().float() - copied().float()).abs().max().item()
    once, each = alternate(shared, copied, rounds)
    return {
        "ratio": round(each / once, 3),
        "shared_ms": round(1000 * once, 2),
        "copies_ms": round(1000 * each, 2),
        "max_abs_diff": round(difference, 8),
    }


def compare_attention(dtype: torch.dtype, rounds: int) -> dict[str, float]:
    q_lnhd = torch.randn(LAYERS, QUESTIONS, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    return compare(lambda copies: attention(copies, q_lnhd), rounds)


def kv_bytes(copies: int) -> int:
    """Of the slots of the cross pool that the questions hold, each counted once."""
    held = {(slot, length) for sequence in step(copies).sequences for _, slot, length in sequence.extents}
    token = LAYERS * 2 * KV_HEADS * DIM * torch.bfloat16.itemsize
    return sum(length for _, length in held) * token


@torch.inference_mode()
def measure(rounds: int) -> dict[str, object]:
    half = decoder()
    parts = {
        "attention": compare_attention(torch.bfloat16, rounds),
        "attention_float32": compare_attention(torch.float32, rounds),
        "step": compare(lambda copies: whole_step(copies, half), rounds),
    }
    return {
        **{f"{part}_{name}": value for part, result in parts.items() for name, value in result.items()},
        "kv_bytes_ratio": kv_bytes(QUESTIONS) / kv_bytes(1),
        "kv_bytes": kv_bytes(1),
        "dtype": "bfloat16",
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks shared_video", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed()
    result = measure(options.rounds)
    if not options.json:
        print(f"copies against one: attention {result['attention_ratio']}, step {result['step_ratio']}")
    print(json.dumps(result))
