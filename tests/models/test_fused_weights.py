"""Fused weights are filled part by part, and every part that is not as it should be is told, in every family.

What is fused is read from the tables: queries, keys and values of either tower, gate and up of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chiasm.errors import CheckpointError
from chiasm.models.registry import Model, families
from chiasm.models.weights import HalfName, Weight
from tests import checkpoints_qwen3_vl, checkpoints_tiny

Write = Callable[[Path, dict[str, Tensor]], Path]

TENSORS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "moss_vl": lambda: checkpoints_tiny.tensors(checkpoints_tiny.config()),
    "qwen3_vl": lambda: checkpoints_qwen3_vl.tensors(checkpoints_qwen3_vl.config()),
}
WRITE: dict[str, Write] = {
    "moss_vl": lambda folder, made: checkpoints_tiny.write(folder, made=made),
    "qwen3_vl": lambda folder, made: checkpoints_qwen3_vl.write(folder, made=made),
}
HALVES: tuple[HalfName, HalfName] = ("encoder", "decoder")

# One that is cut has a part of the table of the whole.
each_family = pytest.mark.parametrize("family", sorted(name for name in families() if name in TENSORS))
each_half = pytest.mark.parametrize("half", HALVES)


def split(family: str) -> dict[str, Tensor]:
    """Every tensor of a checkpoint in which each part of what is fused is stored by itself."""
    return checkpoints_tiny.split_qkv(TENSORS[family]())


def fused(model: Model, half: HalfName) -> list[Weight]:
    """Those that this checkpoint stores in parts."""
    return [weight for weight in model.weights.of(half) if any(len(way) > 1 for way in weight.ways)]


def parts(model: Model, weight: Weight) -> list[str]:
    """As they are stored here."""
    (way,) = (way for way in weight.ways if all(part.name in model.checkpoint.tensors for part in way))
    return [part.name for part in way]


def problems(model: Model, half: HalfName) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        getattr(model, half)()
    return [*caught.value.problems]


@each_family
def test_the_parts_of_a_weight_fill_each_of_its_rows_once(family: str, tmp_path: Path) -> None:
    model = Model(WRITE[family](tmp_path / "tiny", split(family)))
    for half in HALVES:
        shapes = {name: tensor.shape for name, tensor in getattr(model, half)().named_parameters()}
        for weight in model.weights.of(half):
            for way in weight.ways:
                spans = [part.rows or (0, part.shape[0]) for part in way]
                if any(part.rows for part in way):
                    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
                    assert spans[-1][1] == shapes[weight.parameter][0]
                    assert all(part.shape[0] == stop - start for part, (start, stop) in zip(way, spans, strict=True))
                else:
                    (part,) = way
                    assert torch.Size(part.shape).numel() == shapes[weight.parameter].numel()


@each_half
@each_family
def test_each_part_that_is_missing_is_told_and_all_of_them_together(
    family: str, half: HalfName, tmp_path: Path
) -> None:
    made = split(family)
    whole = Model(WRITE[family](tmp_path / "whole", made))
    expected = []
    for number, weight in enumerate(fused(whole, half)):
        names = parts(whole, weight)
        gone = [names[number % len(names)]] if number % 4 else names[:-1]  # one part, or all but one
        for name in gone:
            del made[name]
        expected.append(f"{weight.ways[0][0].name} is half-filled: {', '.join(gone)} missing")
    assert len(expected) > 4
    assert sorted(problems(Model(WRITE[family](tmp_path / "tiny", made)), half)) == sorted(expected)


@each_half
@each_family
def test_a_part_of_another_shape_or_type_is_told_beside_one_that_is_missing(
    family: str, half: HalfName, tmp_path: Path
) -> None:
    made = split(family)
    whole = Model(WRITE[family](tmp_path / "whole", made))
    weight = fused(whole, half)[0]
    first, *_, last = parts(whole, weight)
    del made[first]
    made[last] = made[last][:-1].to(torch.int8)
    told = problems(Model(WRITE[family](tmp_path / "tiny", made)), half)
    assert len(told) == 3
    assert told[0] == f"{weight.ways[0][0].name} is half-filled: {first} missing"
    assert told[1].startswith(f"{last} is of type I8") and told[2].startswith(f"{last} has shape")


@each_family
def test_parts_that_are_begun_in_several_ways_are_told_as_missing_and_unused(family: str, tmp_path: Path) -> None:
    made = split(family)
    name = "model.visual.blocks.1.attn.{}.weight"
    made[name.format("k_proj")] = made.pop(name.format("k"))
    assert problems(Model(WRITE[family](tmp_path / "tiny", made)), "encoder") == [
        f"{name.format('qkv')} is half-filled: {name.format('k')} missing, {name.format('k_proj')} unused"
    ]


@each_family
def test_a_part_beside_the_whole_is_told_and_so_is_one_that_no_table_has(family: str, tmp_path: Path) -> None:
    made = TENSORS[family]()
    qkv, part = (f"model.visual.blocks.0.attn.{name}.bias" for name in ("qkv", "v_proj"))
    made[part] = torch.zeros(32)
    made["model.visual.blocks.0.attn.w.bias"] = torch.zeros(32)
    told = problems(Model(WRITE[family](tmp_path / "tiny", made)), "encoder")
    assert told == [
        "model.visual.blocks.0.attn.w.bias is not a tensor of this model",
        f"{qkv} is there more than once: {qkv}, {part}",
    ]
