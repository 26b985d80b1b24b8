"""One random checkpoint that Chiasm and Hugging Face both load, for the measurements against Hugging Face.

A MOSS-VL text half without its cross layers is a Qwen3: the same tensors under other names. A text alone skips the
cross layers, so here the model has one (its configuration must) and Hugging Face is given the others.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from chiasm.models.finding import SHIPPED
from chiasm.models.registry import Model
from tests import checkpoints_tiny

TEXT: dict[str, Any] = {
    "hidden_size": 224,
    "intermediate_size": 672,
    "num_hidden_layers": 37,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "cross_attention_layers": [18],
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
}
"""The text model of the 8B checkpoints, narrowed to 23 M parameters: their 36 self layers, an MLP three times as wide,
four query heads to a key head. The cross layer is left out of that."""

ORDINARY_IDS = range(16, 256)
"""Ids of the shipped tokenizer that are bytes of text, whatever control tokens it has."""


class Both(NamedTuple):
    """The checkpoint's folder, and the same weights as Hugging Face has them."""

    folder: Path
    theirs: Any


def both(folder: Path, dtype: torch.dtype, text: Mapping[str, Any] = TEXT) -> Both:
    """Writes the checkpoint, in float32, and loads it into Hugging Face's Qwen3 as `dtype`."""
    digits = SHIPPED / "digits"
    shipped = json.loads((digits / "config.json").read_text())
    ids = {name: value for name, value in shipped.items() if name.endswith("_token_id")}
    vision = {**shipped["vision_config"], "out_hidden_size": text["hidden_size"]}
    data = checkpoints_tiny.config(text, vision, **ids)
    made = checkpoints_tiny.tensors(data)
    # Placeholders are never drawn by us; of logits as random as these, zero is never the largest.
    made["lm_head.weight"][list(ids.values())] = 0
    written = checkpoints_tiny.write(folder / "qwen3", data, made=made)
    shutil.copy(digits / "tokenizer.json", written)
    return Both(written, _theirs(written, dtype))


def _theirs(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    t = Model(folder).config.text
    config = Qwen3Config(
        vocab_size=t.vocab_size,
        hidden_size=t.hidden_size,
        intermediate_size=t.intermediate_size,
        num_hidden_layers=len(t.self_attention_layers),
        num_attention_heads=t.num_attention_heads,
        num_key_value_heads=t.num_key_value_heads,
        head_dim=t.head_dim,
        max_position_embeddings=t.max_position_embeddings,
        rms_norm_eps=t.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": t.rope_theta},
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    config._attn_implementation = "sdpa"
    model: Any = Qwen3ForCausalLM(config)
    model.to(dtype).eval()
    model.load_state_dict(_renamed(load_file(folder / "model.safetensors"), t.self_attention_layers))
    return model


def _renamed(tensors: dict[str, Tensor], layers: tuple[int, ...]) -> dict[str, Tensor]:
    """The tensors of the self layers, those numbered anew, and of what is around them."""
    numbers = {str(layer): str(number) for number, layer in enumerate(layers)}
    made = {"lm_head.weight": tensors["lm_head.weight"]}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"model\.language_model\.(?:(layers)\.(\d+)\.)?(.+)", name)
        if found is None or (found[1] and found[2] not in numbers):
            continue
        made[f"model.layers.{numbers[found[2]]}.{found[3]}" if found[1] else f"model.{found[3]}"] = tensor
    return made
