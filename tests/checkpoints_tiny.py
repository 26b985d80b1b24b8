"""Small random checkpoints of any MOSS-VL configuration, in Hugging Face layout. Equal seeds write equal bytes.

For tests that need a checkpoint of some shape, not a model that says anything. Sizes default to what runs in
milliseconds on one core; every one of them can be set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from chiasm.models.moss_vl.config import read_config
from chiasm.models.moss_vl.weights import weight_table
from chiasm.models.weights import WeightTable

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

TEXT: Mapping[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "cross_attention_layers": [1, 3],
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}

VISION: Mapping[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [0, 1],
}

TOP: Mapping[str, Any] = {
    "architectures": ["MossVLForConditionalGeneration"],
    "model_type": "moss_vl",
    "dtype": "float32",
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "vision_seq_pad_multiple": 1,
    "tie_word_embeddings": False,
}


def config(
    text: Mapping[str, Any] | None = None, vision: Mapping[str, Any] | None = None, **top: Any
) -> dict[str, Any]:
    """The object of a config.json; what is given replaces single keys. All of it is the caller's to change."""
    made = {**TOP, **top, "text_config": {**TEXT, **(text or {})}, "vision_config": {**VISION, **(vision or {})}}
    copied: dict[str, Any] = json.loads(json.dumps(made))
    return copied


def tensors(data: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of that configuration, query, key and value of the ViT fused.

    Matrices keep the size of what passes through them, norms and gates are away from their neutral values: so every
    tensor makes a difference to the logits.
    """
    return drawn(weight_table(read_config(data, "tiny")), seed=seed, dtype=dtype)


def drawn(table: WeightTable, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of a table of any family, stored in the first of its ways."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for weight in table.weights:
        for part in weight.ways[0]:
            noise = torch.randn(part.shape, generator=generator)
            if "norm" in part.name and part.name.endswith("weight"):
                noise = 1 + 0.1 * noise
            elif part.name.endswith("bias"):
                noise = 0.1 * noise
            elif len(part.shape) > 1 and "embed_tokens" not in part.name and "pos_embed" not in part.name:
                noise = noise / (noise.numel() / part.shape[0]) ** 0.5
            made[part.name] = noise.to(dtype)
    return made


def split_qkv(fused: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with query, key and value of every ViT block on their own, as some checkpoints store them."""
    made = {}
    for name, tensor in fused.items():
        if ".attn.qkv." in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                made[name.replace(".qkv.", f".{part}.")] = rows.clone()
        else:
            made[name] = tensor
    return made


def write(
    directory: Path,
    data: dict[str, Any] | None = None,
    *,
    made: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Path:
    """Writes a checkpoint folder and returns it.

    Args:
        data: of config.json; `config()` if not given. Its dtype is set to `dtype`.
        made: the tensors to write instead of random ones.
        shards: safetensors files; more than one with an index beside them.
    """
    data = config() if data is None else data
    made = tensors(data, seed=seed, dtype=dtype) if made is None else made
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**data, "dtype": _NAMES[dtype]}), encoding="utf-8")
    if shards == 1:
        save_file(dict(made), directory / "model.safetensors")
        return directory
    places: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        held = {name: tensor for i, (name, tensor) in enumerate(sorted(made.items())) if i % shards == shard}
        save_file(held, directory / file)
        places |= dict.fromkeys(held, file)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory
