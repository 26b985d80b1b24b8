"""Qwen3-VL's weights arrive under the names of any release, with a tied head or its own, whole or by halves."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from chiasm.errors import CheckpointError
from chiasm.models.checkpoint import split
from chiasm.models.qwen3_vl.config import REFUSED, read_config
from chiasm.models.qwen3_vl.weights import weight_table
from chiasm.models.registry import Model
from chiasm.models.weights import HalfName
from tests.checkpoints_qwen3_vl import config, older, split_qkv, tensors, write

EMBEDDINGS = "model.language_model.embed_tokens.weight"
HEAD = "lm_head.weight"
HALVES: tuple[HalfName, HalfName] = ("encoder", "decoder")

Store = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def load(folder: Path, half: HalfName) -> dict[str, Tensor]:
    made = getattr(Model(folder), half)()
    assert isinstance(made, nn.Module)
    return dict(made.named_parameters())


def problems(folder: Path, half: HalfName) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        getattr(Model(folder), half)()
    return caught.value.problems


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def projected(made: dict[str, Tensor]) -> dict[str, Tensor]:
    return {re.sub(r"\.attn\.([qkv])\.", r".attn.\1_proj.", name): t for name, t in split_qkv(made).items()}


# -- what is right -----------------------------------------------------------------------------------------------------


def test_the_table_has_every_tensor_of_a_released_size() -> None:
    text = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "rope_parameters": {"mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5e6},
    }
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    table = weight_table(read_config(config(text, vision), "released"))
    stored = [part for weight in table.weights for part in weight.ways[0]]
    assert len(stored) == len({part.name for part in stored}) == 750
    assert sum(torch.Size(part.shape).numel() for part in stored) == pytest.approx(8.767e9, rel=1e-3)
    shapes = {part.name: part.shape for part in stored}
    assert shapes["model.visual.patch_embed.proj.weight"] == (1152, 3, 2, 16, 16)
    assert shapes["model.visual.merger.norm.weight"] == (1152,)
    assert shapes["model.visual.deepstack_merger_list.2.norm.weight"] == (4608,)


@pytest.mark.parametrize("store", [older, split_qkv, projected, lambda made: older(split_qkv(made))])
@pytest.mark.parametrize("tie", [False, True])
def test_names_of_any_release_fill_the_same_parameters(tmp_path: Path, store: Store, tie: bool) -> None:
    data = config(tie_word_embeddings=tie)
    made = tensors(data)
    stored = store(made)
    assert set(stored) != set(made)
    write(tmp_path / "one", data, made=made)
    write(tmp_path / "other", data, made=stored, shards=2)
    for half in HALVES:
        assert equal(load(tmp_path / "one", half), load(tmp_path / "other", half))


@pytest.mark.parametrize("tie", [False, True])
def test_every_tensor_reaches_the_parameter_the_table_names(tmp_path: Path, tie: bool) -> None:
    data = config(tie_word_embeddings=tie)
    made = tensors(data)
    model = Model(write(tmp_path / "tiny", data, made=made))
    modules = {half: load(tmp_path / "tiny", half) for half in HALVES}
    used = set()
    for weight in model.weights.weights:
        filled = modules[weight.half][weight.parameter]
        used |= {part.name for part in weight.ways[0]}
        stored = torch.cat([made[part.name].reshape(-1) for part in weight.ways[0]]).reshape(filled.shape)
        assert torch.equal(filled, stored if weight.order is None else stored[list(weight.order)]), weight.parameter
    assert used == set(made)


@pytest.mark.parametrize("naming", [dict, older])
def test_each_half_loads_from_a_folder_that_holds_nothing_else(tmp_path: Path, naming: Store) -> None:
    whole = Model(write(tmp_path / "tiny", made=naming(tensors(config()))))
    for half, other in (HALVES, HALVES[::-1]):
        cut, bare = tmp_path / half, write(tmp_path / f"bare {half}")
        split(whole.checkpoint, whole.weights.names(half), cut)
        save_file({name: whole.checkpoint.tensors[name] for name in Model(cut).checkpoint.tensors}, bare / "x")
        (bare / "x").rename(bare / "model.safetensors")
        for folder in (cut, bare):
            assert equal(load(folder, half), load(tmp_path / "tiny", half))
            assert all(problem.endswith("is missing") for problem in problems(folder, other))
        assert Model(cut).checkpoint.fingerprint == whole.checkpoint.fingerprint


# -- the head ----------------------------------------------------------------------------------------------------------


def test_a_tied_head_is_stored_once_or_twice_alike_under_either_name(tmp_path: Path) -> None:
    data = config(tie_word_embeddings=True)
    made = tensors(data)
    assert HEAD not in made
    once = load(write(tmp_path / "once", data, made=made), "decoder")
    assert HEAD not in once
    twice = made | {HEAD: made[EMBEDDINGS].clone()}
    renamed = {HEAD if name == EMBEDDINGS else name: tensor for name, tensor in made.items()}
    for number, stored in enumerate((twice, older(twice), renamed)):
        assert equal(load(write(tmp_path / str(number), data, made=stored), "decoder"), once)


def test_a_head_that_is_tied_and_differs_is_refused_with_both_names(tmp_path: Path) -> None:
    data = config(tie_word_embeddings=True)
    made = tensors(data)
    other = made[EMBEDDINGS].clone()
    other[0, 0] += 1
    folder = write(tmp_path / "tiny", data, made=made | {HEAD: other})
    assert problems(folder, "decoder") == (f"{EMBEDDINGS} and {HEAD} are tied, and differ",)
    folder = write(tmp_path / "shape", data, made=made | {HEAD: other[1:].clone()})
    assert problems(folder, "decoder") == (f"{HEAD} has shape [1023, 48], must have [1024, 48]",)
    load(folder, "encoder")


def test_an_untied_head_has_to_be_there(tmp_path: Path) -> None:
    made = tensors(config())
    del made[HEAD]
    folder = write(tmp_path / "tiny", made=made)
    assert problems(folder, "decoder") == (f"{HEAD} is missing",)
    load(folder, "encoder")


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_a_tensor_that_is_there_under_both_names_is_refused(tmp_path: Path) -> None:
    made = tensors(config())
    name, other = "model.language_model.norm.weight", "model.norm.weight"
    folder = write(tmp_path / "tiny", made=made | {other: made[name].clone()})
    assert problems(folder, "decoder") == (f"{name} is there more than once: {name}, {other}",)


def test_what_is_missing_left_over_or_half_there_is_listed(tmp_path: Path) -> None:
    made = split_qkv(tensors(config()))
    del made["model.visual.blocks.0.attn.k.weight"], made["model.visual.deepstack_merger_list.1.norm.bias"]
    made["model.visual.deepstack_merger_list.2.norm.bias"] = torch.zeros(128)
    assert set(problems(write(tmp_path / "tiny", made=made), "encoder")) == {
        "model.visual.deepstack_merger_list.2.norm.bias is not a tensor of this model",
        "model.visual.blocks.0.attn.qkv.weight is half-filled: model.visual.blocks.0.attn.k.weight missing",
        "model.visual.deepstack_merger_list.1.norm.bias is missing",
    }


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_relative_is_refused_by_name_with_the_reason_alone(tmp_path: Path, architecture: str) -> None:
    folder = write(tmp_path / "tiny", architectures=[architecture], made={})
    with pytest.raises(CheckpointError) as caught:
        Model(folder)
    assert caught.value.problems == (f"architecture {architecture} is not supported: {REFUSED[architecture]}",)
