"""Small random checkpoints of any Qwen3-VL configuration, in Hugging Face layout. Equal seeds write equal bytes.

`transformers` opens them too. Every weight, norm and bias is random, so that each makes a difference; the taps are not
in ascending order, so that their order does. Sizes default to what runs in milliseconds on one core.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chiasm.models.qwen3_vl.config import read_config
from chiasm.models.qwen3_vl.weights import OLDER, weight_table
from tests import checkpoints_tiny
from tests.checkpoints_tiny import drawn, split_qkv

__all__ = ["TEMPLATE", "TEXT", "TOP", "VISION", "config", "older", "split_qkv", "tensors", "write"]

DATA = Path(__file__).parent / "oracles" / "qwen3_vl" / "data"

TEXT: Mapping[str, Any] = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}

VISION: Mapping[str, Any] = {
    "model_type": "qwen3_vl_vision",
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [2, 0],
}

TOP: Mapping[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 1022,
    "video_token_id": 1023,
    "vision_start_token_id": 1019,
    "vision_end_token_id": 1020,
    "tie_word_embeddings": False,
}
"""Token ids are those of the tokenizer that is written."""

TEMPLATE = """\
{%- macro shown(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}
{%- if part.type in ('image', 'video') -%}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + shown(message.content) + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""ChatML, for contents that are text and for such as are lists of parts."""


def config(
    text: Mapping[str, Any] | None = None, vision: Mapping[str, Any] | None = None, **top: Any
) -> dict[str, Any]:
    """The object of a config.json; what is given replaces single keys. All of it is the caller's to change."""
    made = {**TOP, **top, "text_config": {**TEXT, **(text or {})}, "vision_config": {**VISION, **(vision or {})}}
    copied: dict[str, Any] = json.loads(json.dumps(made))
    return copied


def tensors(data: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of that configuration, named as `transformers` does; no head where it is tied."""
    return drawn(weight_table(read_config(data, "tiny")), seed=seed, dtype=dtype)


def older(made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of older checkpoints."""
    renamed = {}
    for name, tensor in made.items():
        prefix = next((prefix for prefix in OLDER if name.startswith(prefix)), "")
        renamed[OLDER.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed


def write(
    folder: Path,
    data: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    made: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **top: Any,
) -> Path:
    """Writes a checkpoint folder, with a tokenizer of 1,024 ids, a template and small budgets, and returns it.

    Args:
        data: of config.json; if it is not given, `config(text, vision, **top)`.
        made: the tensors to write instead of random ones.
        shards: safetensors files; more than one with an index beside them.
    """
    data = config(text, vision, **top) if data is None else data
    made = tensors(data, seed=seed, dtype=dtype) if made is None else made
    checkpoints_tiny.write(folder, data, made=made, dtype=dtype, shards=shards)
    shutil.copyfile(DATA / "tokenizer.json", folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    sizes = data["vision_config"]
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        said = json.loads((DATA / file).read_text(encoding="utf-8"))
        said |= {"patch_size": sizes["patch_size"], "merge_size": sizes["spatial_merge_size"]}
        (folder / file).write_text(json.dumps(said), encoding="utf-8")
    return folder
