"""Weights arrive whole or not at all: every kind of wrong checkpoint is told with all that is wrong in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from chiasm.errors import CheckpointError
from chiasm.models.checkpoint import Checkpoint, split
from chiasm.models.moss_vl.config import read_config
from chiasm.models.moss_vl.weights import weight_table
from chiasm.models.registry import Model
from tests.checkpoints_tiny import config, split_qkv, tensors, write

QKV = "model.visual.blocks.0.attn.qkv"
Change = Callable[[dict[str, Tensor]], None]


def load(folder: Path) -> tuple[nn.Module, nn.Module]:
    model = Model(folder)
    encoder, decoder = model.encoder(), model.decoder()
    assert isinstance(encoder, nn.Module) and isinstance(decoder, nn.Module)
    return encoder, decoder


def problems(folder: Path, half: str) -> tuple[str, ...]:
    model = Model(folder)
    with pytest.raises(CheckpointError) as caught:
        getattr(model, half)()
    return caught.value.problems


def changed(folder: Path, change: Change) -> Path:
    made = tensors(config())
    change(made)
    return write(folder, made=made)


def equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- what is right -----------------------------------------------------------------------------------------------------


def test_the_table_has_every_tensor_of_the_released_size() -> None:
    text = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "cross_attention_layers": list(range(2, 48, 4)),
        "vocab_size": 151_936,
        "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
    }
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    table = weight_table(read_config(config(text, vision), "released"))
    stored = [part for weight in table.weights for part in weight.ways[0]]
    assert len(stored) == len({part.name for part in stored}) == 895
    parameters = sum(torch.Size(part.shape).numel() for part in stored)
    assert parameters == pytest.approx(11.34e9, rel=1e-3)
    shapes = {part.name: part.shape for part in stored}
    assert shapes["model.visual.merger.linear_fc1.weight"] == (18432, 18432)
    assert shapes["model.visual.patch_embed.proj.weight"] == (1152, 3, 1, 16, 16)
    assert shapes["model.language_model.layers.46.cross_attn.k_proj.weight"] == (1024, 4096)


def test_fused_split_and_sharded_fill_the_same_parameters(tmp_path: Path) -> None:
    made = tensors(config())
    whole = load(write(tmp_path / "whole", made=made))
    renamed = {re.sub(r"\.attn\.([qkv])\.", r".attn.\1_proj.", name): t for name, t in split_qkv(made).items()}
    for i, (stored, shards) in enumerate(((made, 3), (split_qkv(made), 1), (renamed, 2))):
        other = load(write(tmp_path / str(i), made=stored, shards=shards))
        assert equal(whole[0], other[0]) and equal(whole[1], other[1])


def test_every_tensor_reaches_the_parameter_the_table_names(tmp_path: Path) -> None:
    made = tensors(config())
    model = Model(write(tmp_path / "tiny", made=made))
    modules = dict(zip(("encoder", "decoder"), load(tmp_path / "tiny"), strict=True))
    for weight in model.weights.weights:
        filled = dict(modules[weight.half].named_parameters())[weight.parameter]
        stored = torch.cat([made[part.name].reshape(-1) for part in weight.ways[0]]).reshape(filled.shape)
        rows = stored if weight.order is None else stored[list(weight.order)]
        assert torch.equal(filled, rows), weight.parameter


def test_weights_are_cast_to_the_type_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", dtype=torch.bfloat16)
    half = Model(folder).decoder()
    assert isinstance(half, nn.Module) and half.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    wide = Model(folder).decoder(dtype=torch.float32)
    assert isinstance(wide, nn.Module)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in wide.parameters())


def test_rotary_frequencies_may_be_stored_and_are_not_read(tmp_path: Path) -> None:
    def add(made: dict[str, Tensor]) -> None:
        made["model.language_model.rotary_emb.inv_freq"] = torch.full((8,), torch.nan)
        made["model.visual.rotary_emb.inv_freq"] = torch.full((4,), torch.nan)

    load(changed(tmp_path / "tiny", add))


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_missing_weights_are_all_listed(tmp_path: Path) -> None:
    gone = {
        "encoder": ["model.separator_token", f"{QKV}.bias", "model.language_model.layers.1.cross_attn.k_norm.weight"],
        "decoder": ["lm_head.weight", "model.language_model.layers.3.cross_attn_mlp_gate"],
    }

    def remove(made: dict[str, Tensor]) -> None:
        for names in gone.values():
            for name in names:
                del made[name]

    folder = changed(tmp_path / "tiny", remove)
    for half, names in gone.items():
        assert set(problems(folder, half)) == {f"{name} is missing" for name in names}


def test_unused_tensors_are_all_listed_by_both_halves(tmp_path: Path) -> None:
    extra = ["model.language_model.layers.0.self_attn.q_proj.bias", "model.visual.merger.norms.9.weight", "x.inv_freq"]
    folder = changed(tmp_path / "tiny", lambda made: made.update({name: torch.zeros(2) for name in extra}))
    for half in ("encoder", "decoder"):
        assert set(problems(folder, half)) == {f"{name} is not a tensor of this model" for name in extra}


def test_a_half_filled_fused_weight_names_what_is_missing(tmp_path: Path) -> None:
    made = split_qkv(tensors(config()))
    del made["model.visual.blocks.0.attn.k.weight"], made["model.visual.blocks.2.attn.v.bias"]
    found = problems(write(tmp_path / "tiny", made=made), "encoder")
    assert found == (
        f"{QKV}.weight is half-filled: model.visual.blocks.0.attn.k.weight missing",
        "model.visual.blocks.2.attn.qkv.bias is half-filled: model.visual.blocks.2.attn.v.bias missing",
    )


def test_a_projection_that_lacks_a_part_names_it(tmp_path: Path) -> None:
    layers = "model.language_model.layers"
    gone = [f"{layers}.0.self_attn.k_proj.weight", f"{layers}.1.mlp.up_proj.weight"]

    def remove(made: dict[str, Tensor]) -> None:
        for name in gone:
            del made[name]

    assert set(problems(changed(tmp_path / "tiny", remove), "decoder")) == {
        f"{layers}.0.self_attn.q_proj.weight is half-filled: {gone[0]} missing",
        f"{layers}.1.mlp.gate_proj.weight is half-filled: {gone[1]} missing",
    }


@pytest.mark.parametrize("parts", ["qkv", "q"])
def test_a_weight_that_is_there_fused_and_split_is_refused(tmp_path: Path, parts: str) -> None:
    def double(made: dict[str, Tensor]) -> None:
        made.update({f"model.visual.blocks.0.attn.{part}.weight": torch.zeros(32, 32) for part in parts})

    (found,) = problems(changed(tmp_path / "tiny", double), "encoder")
    assert found.startswith(f"{QKV}.weight is there more than once")


def test_wrong_shapes_are_all_listed_with_both_shapes(tmp_path: Path) -> None:
    def reshape(made: dict[str, Tensor]) -> None:
        made["model.visual.pos_embed.weight"] = torch.zeros(49, 32)
        made["model.separator_token"] = torch.zeros(1, 48)

    assert set(problems(changed(tmp_path / "tiny", reshape), "encoder")) == {
        "model.visual.pos_embed.weight has shape [49, 32], must have [36, 32]",
        "model.separator_token has shape [1, 48], must have [48]",
    }


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_quantised_weight_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.language_model.layers.0.self_attn.q_proj.weight"

    def quantise(made: dict[str, Tensor]) -> None:
        made[name] = made[name].to(dtype)

    (found,) = problems(changed(tmp_path / "tiny", quantise), "decoder")
    assert name in found and "quantised" in found


def test_all_kinds_of_fault_are_told_together(tmp_path: Path) -> None:
    def spoil(made: dict[str, Tensor]) -> None:
        del made["model.language_model.norm.weight"]
        made["lm_head.weight"] = torch.zeros(96, 47)
        made["stray"] = torch.zeros(1)
        made["model.language_model.embed_tokens.weight"] = torch.zeros(96, 48, dtype=torch.int8)

    found = problems(changed(tmp_path / "tiny", spoil), "decoder")
    assert len(found) == 4


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_shard_cut_short_and_a_shard_that_is_gone_are_both_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", shards=3)
    first, second, _ = sorted(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:200])
    second.unlink()
    found = problems(folder, "encoder")
    assert [problem.split(" ")[0] for problem in found] == [first.name, second.name]
    assert all("cannot be read" in problem for problem in found)


def test_an_index_that_promises_what_a_shard_lacks_is_told_tensor_by_tensor(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", shards=2)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    file = places["lm_head.weight"]
    index.write_text(json.dumps({"weight_map": {**places, "ghost.a": file, "ghost.b": file}}), encoding="utf-8")
    found = problems(folder, "decoder")
    assert found == tuple(f"{file} lacks {name}, which {index.name} promises" for name in ("ghost.a", "ghost.b"))


def test_a_shard_that_holds_what_the_index_does_not_list_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny", shards=2)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    file = places.pop("lm_head.weight")
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    assert problems(folder, "decoder") == (f"{file} holds lm_head.weight, which {index.name} does not list",)


def test_an_index_may_not_point_outside_the_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny")
    save_file({"lm_head.weight": torch.zeros(96, 48)}, tmp_path / "other.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../other.safetensors"}}), encoding="utf-8")
    assert any("outside the folder" in problem for problem in problems(folder, "decoder"))


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_told(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path / "tiny")
    (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    assert problems(folder, "decoder")


def test_a_folder_without_weights_or_configuration_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in problems(folder, "decoder")[0]
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        Model(folder)
    with pytest.raises(CheckpointError, match="is not a folder"):
        Model(tmp_path / "nowhere")


@pytest.mark.parametrize("named", [None, [], ["A", "B"], "MossVLForConditionalGeneration", ["LlamaForCausalLM"]])
def test_an_architecture_nobody_claims_is_told(tmp_path: Path, named: object) -> None:
    folder = write(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps({**config(), "architectures": named}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="architecture"):
        Model(folder)


# -- identity ----------------------------------------------------------------------------------------------------------


def test_the_fingerprint_names_weights_and_configuration_and_not_how_they_are_stored(tmp_path: Path) -> None:
    def fingerprint(name: str, made: dict[str, Tensor], data: dict[str, object] | None = None, shards: int = 1) -> str:
        return Checkpoint(write(tmp_path / name, data, made=made, shards=shards)).fingerprint

    made = tensors(config())
    other = {**made, "lm_head.weight": made["lm_head.weight"].clone()}
    other["lm_head.weight"][0, 0] += 1e-3
    same = fingerprint("a", made)
    assert len(same) == 64
    assert fingerprint("b", made, shards=3) == same
    assert fingerprint("c", other) != same
    assert fingerprint("d", made, config(text={"rms_norm_eps": 1e-5})) != same
    swapped = {**made, "model.visual.blocks.0.norm1.weight": made["model.visual.blocks.0.norm2.weight"]}
    swapped["model.visual.blocks.0.norm2.weight"] = made["model.visual.blocks.0.norm1.weight"]
    assert fingerprint("e", swapped) != same


def test_a_half_cut_from_a_checkpoint_keeps_its_name_and_lacks_the_other_half(tmp_path: Path) -> None:
    whole = Model(write(tmp_path / "tiny"))
    for half, other in (("encoder", "decoder"), ("decoder", "encoder")):
        split(whole.checkpoint, whole.weights.names(half), tmp_path / half)  # type: ignore[arg-type]
        cut = Model(tmp_path / half)
        assert cut.checkpoint.fingerprint == whole.checkpoint.fingerprint
        assert equal(getattr(cut, half)(), getattr(whole, half)())
        assert all(problem.endswith("is missing") for problem in problems(tmp_path / half, other))
