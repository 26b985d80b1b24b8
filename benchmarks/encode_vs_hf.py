"""How fast frames become merged vision states, against Hugging Face's `Qwen3VLVisionModel` on the same weights.

One process, one thread, bfloat16, both from the same normalised patches. `ratio_64`: a model 64 wide, 64 images of 8x8
patches. `ratio_1152`: four blocks of the released width, 8 frames of 18x32 patches, where most of the time are products
that both leave to the same library. Ours: `MossVLEncoder.states` without taps, whose merger is then theirs. Theirs: the
stock model with SDPA. The order is A B B A; medians.

Before anything is timed the outputs are compared; the largest difference is told as a share of the largest value.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks._alternate import alternate
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.layers.vit import rows_paired
from chiasm.layers.vit_places import Grid
from chiasm.models.moss_vl.config import Config, TextConfig, VisionConfig
from chiasm.models.moss_vl.vision import MossVLEncoder

PATCH, MERGE, SIDE = 16, 2, 48
OUT = {64: 64, 1152: 2048}
"""Width of the merged states, by the width of the blocks."""


def both(width: int, heads: int, intermediate: int, depth: int) -> tuple[MossVLEncoder, Any]:
    """Ours and theirs, of the same random weights, in bfloat16."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(0)
    config = Qwen3VLVisionConfig(
        depth=depth,
        hidden_size=width,
        intermediate_size=intermediate,
        num_heads=heads,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        temporal_patch_size=1,
        out_hidden_size=OUT[width],
        num_position_embeddings=SIDE**2,
        deepstack_visual_indexes=[],
        hidden_act="gelu_pytorch_tanh",
    )
    config._attn_implementation = "sdpa"
    theirs: Any = Qwen3VLVisionModel(config)
    theirs.eval().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.03)
    ours = encoder(width, heads, intermediate, depth)
    state = {name: tensor for name, tensor in theirs.state_dict().items() if not name.startswith("merger.")}
    state["patch_embed.weight"] = state.pop("patch_embed.proj.weight").flatten(1)
    state["patch_embed.bias"] = state.pop("patch_embed.proj.bias")
    order = list(rows_paired(width, heads))
    ours.visual.load_state_dict({name: t[order] if ".qkv." in name else t for name, t in state.items()})
    merger = {name.removeprefix("merger."): t for name, t in theirs.state_dict().items() if name.startswith("merger.")}
    ours.merger.load_state_dict({name.replace("norm.", "norms.0."): tensor for name, tensor in merger.items()})
    return ours, theirs


def encoder(width: int, heads: int, intermediate: int, depth: int) -> MossVLEncoder:
    """An encoder half with one narrow cross layer, which is not timed."""
    vision = VisionConfig(
        depth=depth,
        hidden_size=width,
        intermediate_size=intermediate,
        num_heads=heads,
        in_channels=3,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        out_hidden_size=OUT[width],
        num_position_embeddings=SIDE**2,
        deepstack_visual_indexes=(),
    )
    text = TextConfig(
        hidden_size=OUT[width],
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        cross_attention_layers=(1,),
        vocab_size=128,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        mrope_section=(4, 2, 2),
    )
    ids = dict.fromkeys(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), text.vocab_size - 1
    )
    made = MossVLEncoder(Config(vision=vision, text=text, **ids), device=torch.device("cpu"), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    return made.eval()


@torch.inference_mode()
def compare(
    width: int, heads: int, intermediate: int, depth: int, grids: Sequence[Grid], rounds: int
) -> dict[str, float]:
    """Median milliseconds of both, their ratio, and how far their outputs are apart."""
    ours, theirs = both(width, heads, intermediate, depth)
    attention = TorchVarlen()
    rows = sum(a * b for a, b in grids)
    values = 3 * PATCH**2
    patches = torch.rand(rows, values, generator=torch.Generator().manual_seed(1)).sub_(0.5).mul_(2).to(torch.bfloat16)
    grid_thw = torch.tensor([(1, *grid) for grid in grids])
    separators = torch.cumsum(torch.tensor([a * b // MERGE**2 + 1 for a, b in grids]), 0) - 1

    def mine() -> Tensor:
        return ours.states(patches, grids, attention)

    def stock() -> Tensor:
        out: Tensor = theirs(patches, grid_thw=grid_thw).pooler_output
        return out

    keep = torch.ones(rows // MERGE**2 + len(grids), dtype=torch.bool)
    keep[separators] = False
    expected = stock().float()
    apart = float((mine()[keep].float() - expected).abs().max() / expected.abs().max())
    seconds, their_seconds = alternate(mine, stock, rounds)
    return {
        f"ratio_{width}": round(their_seconds / seconds, 3),
        f"ours_ms_{width}": round(1000 * seconds, 2),
        f"hf_ms_{width}": round(1000 * their_seconds, 2),
        f"apart_{width}": round(apart, 4),
    }


def measure(rounds: int) -> dict[str, object]:
    small = compare(64, 4, 256, 4, [(8, 8)] * 64, 5 * rounds)
    large = compare(1152, 16, 4304, 4, [(18, 32)] * 8, rounds)
    return {**small, **large, "dtype": "bfloat16", "rounds": rounds, "threads": torch.get_num_threads()}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks encode_vs_hf", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(options.rounds)
    if not options.json:
        for width in OUT:
            print(f"{width} wide: ours {result[f'ours_ms_{width}']} ms, Hugging Face {result[f'hf_ms_{width}']} ms")
    print(json.dumps(result))
