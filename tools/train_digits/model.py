"""The checkpoint's three files: config.json, tokenizer.json, and weights between modules and safetensors.

Knows sizes, words and names. How the weights come to be is `train`'s.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor, nn

from chiasm.models.moss_vl import FAMILY
from chiasm.models.moss_vl.config import ARCHITECTURE, Config, read_config
from chiasm.models.moss_vl.text import CrossLayer, MossVLDecoder
from chiasm.models.moss_vl.vision import MossVLEncoder
from chiasm.models.registry import Model
from chiasm.models.weights import HalfName

CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|time_start|>",
    "<|time_end|>",
    "<|silence|>",
    "<|response|>",
)

WORDS = (
    *("user", "assistant", "system"),
    *("Read", "Which", "Say", "You", "Answer"),
    *(" the", " digits", " digit", " is", " at", " seconds", " each", " you", " see", " read", " in", " order"),
)
"""Words that are one token, so that a prompt is short."""

TIMES = tuple(f"{whole}.{tenth}" for whole in range(10) for tenth in range(10))
"""The end of a time as it is stamped, one token each, so that a question by time has one thing to look for. Elsewhere a
digit is a token of its own, and so in every answer."""

OPEN_GATE = 0.5
"""Gates of the cross layers at the start. At zero, where a pretrained text model has them, no image gets through."""


def tokenizer_json() -> str:
    """A byte-level BPE: the 256 bytes, the words with all their beginnings, the control tokens."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in (*TIMES, *WORDS):
        left = ""
        for right in word.replace(" ", "Ġ"):
            if left and left + right not in vocabulary:
                merges.append((left, right))
                vocabulary[left + right] = len(vocabulary)
            left += right
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # Not cut into words first: a time is digits and a full stop.
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    return made.to_str(pretty=True)


def config_json(tokenizer: str) -> dict[str, object]:
    """The config.json that goes with a tokenizer.json."""
    tokens = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "moss_vl",
        "dtype": "bfloat16",
        "image_token_id": tokens["<|image_pad|>"],
        "video_token_id": tokens["<|video_pad|>"],
        "vision_start_token_id": tokens["<|vision_start|>"],
        "vision_end_token_id": tokens["<|vision_end|>"],
        "vision_seq_pad_multiple": 1,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "moss_vl_text",
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "cross_attention_layers": [1, 3, 5],
            "vocab_size": 1 + max(tokens.values()),
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_theta": 1_000_000.0,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
        },
        "vision_config": {
            "model_type": "moss_vl_vision",
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "out_hidden_size": 96,
            "num_position_embeddings": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": [1, 2],
        },
    }


def fresh(config: Config, generator: torch.Generator) -> tuple[MossVLEncoder, MossVLDecoder]:
    """Both halves in float32 with every parameter drawn from `generator` or set to its neutral value."""
    cpu = torch.device("cpu")
    encoder = FAMILY.encoder(config, device=cpu, dtype=torch.float32)
    decoder = FAMILY.decoder(config, device=cpu, dtype=torch.float32)
    for half in (encoder, decoder):
        for name, parameter in half.named_parameters():
            nn.init.constant_(parameter, 1.0) if _is_norm(name) else nn.init.zeros_(parameter)
            if parameter.ndim == 2:
                _draw(name, parameter, generator)
    nn.init.normal_(encoder.separator_token, std=0.5, generator=generator)
    for layer in decoder.layers:
        if isinstance(layer, CrossLayer):
            nn.init.constant_(layer.cross_attn_attn_gate, OPEN_GATE)
            nn.init.constant_(layer.cross_attn_mlp_gate, OPEN_GATE)
    return encoder, decoder


def saved(directory: Path) -> tuple[MossVLEncoder, MossVLDecoder]:
    """Both halves of a checkpoint in float32, to be trained further."""
    found = Model(directory)
    encoder, decoder = found.encoder(dtype=torch.float32), found.decoder(dtype=torch.float32)
    assert isinstance(encoder, MossVLEncoder) and isinstance(decoder, MossVLDecoder)
    return encoder.requires_grad_(True), decoder.requires_grad_(True)


def _is_norm(name: str) -> bool:
    return name.endswith(".weight") and "norm" in name


def _draw(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    tables = {"embed_tokens.weight": 0.5, "visual.pos_embed.weight": 0.1, "lm_head.weight": 0.02}
    nn.init.normal_(parameter, std=tables.get(name, 1 / math.sqrt(3 * parameter.shape[1])), generator=generator)


def save(directory: Path, encoder: MossVLEncoder, decoder: MossVLDecoder) -> None:
    """Writes the whole checkpoint, weights in bfloat16. Makes the folder; files already there are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_json()
    (directory / "tokenizer.json").write_text(tokenizer + "\n", encoding="utf-8")
    config = json.dumps(config_json(tokenizer), indent=2)
    (directory / "config.json").write_text(config + "\n", encoding="utf-8")
    weights = directory / "model.safetensors"
    save_file(_tensors(encoder, decoder), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library writes it for its owner only


def _tensors(encoder: MossVLEncoder, decoder: MossVLDecoder) -> dict[str, Tensor]:
    table = FAMILY.weights(encoder.config)
    halves: dict[HalfName, nn.Module] = {"encoder": encoder, "decoder": decoder}
    tensors: dict[str, Tensor] = {}
    for half, module in halves.items():
        parameters = dict(module.named_parameters())
        for weight in table.of(half):
            parameter = parameters[weight.parameter].detach().to(torch.bfloat16)
            if weight.order is not None:
                parameter = parameter[torch.tensor(weight.order).argsort()]
            for part in weight.ways[0]:
                rows = parameter if part.rows is None else parameter[slice(*part.rows)]
                tensors[part.name] = rows.reshape(part.shape).contiguous()
    return tensors


def configuration() -> Config:
    """The configuration as the library reads it."""
    return read_config(config_json(tokenizer_json()), "digits")
