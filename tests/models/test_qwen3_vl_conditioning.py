"""A Qwen3-VL cut after a layer: what of a checkpoint it reads and what it leaves, and the rules of the reference that
it keeps, each shown by itself. That its states are the reference's is for `tests/oracles/conditioning`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from chiasm.client import AsyncClient, Image
from chiasm.errors import CheckpointError, InvalidRequest
from chiasm.layers.linear import Linear
from chiasm.layers.norm import RMSNorm
from chiasm.local import LocalService, LocalSettings
from chiasm.models.checkpoint import Tensors, split
from chiasm.models.qwen3_vl_conditioning.text import Qwen3VLConditioner
from chiasm.models.registry import Model
from tests import checkpoints_qwen3_vl, checkpoints_tiny

CPU = torch.device("cpu")
PREFIX = "model.language_model."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four layers; taps behind the first two."""
    return checkpoints_qwen3_vl.write(tmp_path / "tiny")


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_only_the_layers_that_are_kept_are_read(folder: Path, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    inner = Tensors.__getitem__

    def reading(self: Tensors, name: str) -> torch.Tensor:
        read.append(name)
        return inner(self, name)

    model = Model(folder, condition_layers=layers)
    monkeypatch.setattr(Tensors, "__getitem__", reading)
    half = model.decoder()
    assert isinstance(half, Qwen3VLConditioner) and len(half.layers) == half.layers_total == layers
    kept = {f"layers.{number}" for number in range(layers)} | {"embed_tokens.weight"}
    assert {".".join(name.removeprefix(PREFIX).split(".")[:2]) for name in read} == kept
    assert not any(name.startswith(("norm", "lm_head")) for name, _ in half.named_parameters())


def test_what_is_left_is_the_norm_the_head_and_the_layers_behind_and_nothing_else(folder: Path) -> None:
    model = Model(folder, condition_layers=3)
    decoder = {name for name in model.checkpoint.tensors if not name.startswith("model.visual.")}
    behind = {name for name in decoder if name.startswith(f"{PREFIX}layers.3.")}
    left = {name for name in model.weights.left if name in decoder}
    assert behind and left == behind | {f"{PREFIX}norm.weight", "lm_head.weight"}


def test_other_tensors_and_missing_ones_are_errors_as_ever(tmp_path: Path) -> None:
    data = checkpoints_qwen3_vl.config()
    made = checkpoints_qwen3_vl.tensors(data)
    made["model.language_model.layers.4.mlp.up_proj.weight"] = torch.zeros(2, 2)  # behind the last there is
    del made["model.language_model.layers.1.self_attn.k_proj.weight"]
    del made["model.language_model.layers.3.mlp.up_proj.weight"]  # behind the cut
    model = Model(checkpoints_qwen3_vl.write(tmp_path / "tiny", data, made=made), condition_layers=2)
    with pytest.raises(CheckpointError) as caught:
        model.decoder()
    first, second = caught.value.problems
    assert "layers.4.mlp.up_proj.weight is not a tensor" in first and "layers.1.self_attn.k_proj.weight" in second


def test_a_folder_that_holds_no_more_than_is_kept_is_enough(folder: Path, tmp_path: Path) -> None:
    model = Model(folder, condition_layers=2)
    split(model.checkpoint, model.weights.names("decoder"), tmp_path / "cut")
    again = Model(tmp_path / "cut", condition_layers=2)
    ours, theirs = again.decoder(), model.decoder()
    assert isinstance(ours, nn.Module) and isinstance(theirs, nn.Module)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert again.checkpoint.fingerprint == model.checkpoint.fingerprint


def test_a_tied_head_is_the_table_and_is_kept_as_that(tmp_path: Path) -> None:
    folder = checkpoints_qwen3_vl.write(tmp_path / "tied", tie_word_embeddings=True)
    half = Model(folder, condition_layers=1).decoder()
    assert isinstance(half, Qwen3VLConditioner) and not half.headed


@pytest.mark.parametrize("layers", [0, 5, 99])
def test_a_layer_that_is_not_there_is_refused_with_both_numbers(folder: Path, layers: int) -> None:
    with pytest.raises(CheckpointError, match=f"layer {layers}, its text has layers 1 to 4"):
        Model(folder, condition_layers=layers)


def test_a_family_that_is_not_cut_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="moss_vl, whose decoder is not cut"):
        Model(checkpoints_tiny.write(tmp_path / "tiny"), condition_layers=1)


def test_where_it_is_cut_is_in_what_names_its_text_and_not_in_what_names_its_entries(folder: Path) -> None:
    models = [Model(folder, condition_layers=layers) for layers in (None, 2, 3)]
    assert len({model.text_fingerprint for model in models}) == 3
    assert len({model.checkpoint.fingerprint for model in models}) == 1
    assert len({model.processor.describe() for model in models}) == 1


# -- rules of the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 64, 65, 300])
def test_products_made_as_one_are_bit_by_bit_those_made_one_by_one(rows: int, dtype: torch.dtype) -> None:
    """A row of a weight is multiplied by itself, whatever stands above and below it."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 256, generator=generator).to(dtype)
    weights = [torch.randn(outputs, 256, generator=generator).to(dtype) for outputs in (512, 128, 128)]
    stacked = Linear(256, 768, device=CPU, dtype=dtype)
    apart = []
    with torch.no_grad():
        stacked.weight.copy_(torch.cat(weights))
        for weight in weights:
            one = Linear(256, len(weight), device=CPU, dtype=dtype)
            one.weight.copy_(weight)
            apart.append(one(x))
        assert torch.equal(stacked(x), torch.cat(apart, dim=1))


def test_norms_are_reduced_in_32_bits_and_the_weight_is_multiplied_in_the_models_type() -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 256, generator=generator) * 30).to(torch.bfloat16)
    weight = torch.randn(256, generator=generator).to(torch.bfloat16)
    ours = RMSNorm(256, 1e-6, device=CPU, dtype=torch.bfloat16)
    theirs = Qwen3VLTextRMSNorm(256, 1e-6).to(torch.bfloat16)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
        assert torch.equal(ours(x), theirs(x))
        assert not torch.equal(ours(x), F.rms_norm(x.float(), (256,), weight.float(), 1e-6).to(torch.bfloat16))


def test_rotary_tables_are_of_32_bits_whatever_the_modules_are_cast_to(folder: Path) -> None:
    model = Model(folder, condition_layers=2)
    half, encoder = model.decoder(), model.encoder()
    assert isinstance(half, Qwen3VLConditioner) and isinstance(encoder, nn.Module)
    positions = torch.tensor([[1000], [2001], [31_999]])
    before = half.rope.tables(positions, torch.float32)
    half.to(torch.bfloat16)
    encoder.to(torch.bfloat16)
    assert half.rope.inverse.dtype == torch.float32
    for one, other in zip(before, half.rope.tables(positions, torch.float32), strict=True):
        assert torch.equal(one, other)
    assert not any(
        "rope" in name or "inv_freq" in name for name, _ in [*half.named_buffers(), *encoder.named_buffers()]
    )


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[tuple[AsyncClient, LocalService]]:
    services: list[LocalService] = []

    async def opened() -> LocalService:
        services.append(await LocalService.start(str(folder), LocalSettings(condition_layers=3, **settings)))
        return services[0]

    async with AsyncClient(transport=opened) as client:
        await client.open()
        yield client, services[0]


START, END, IMAGE_PAD = 1019, 1020, 1022
PICTURES = [np.random.default_rng(number).integers(0, 256, (64, 96, 3), dtype=np.uint8) for number in range(2)]
PADS = [IMAGE_PAD] * 6


async def test_ids_with_pads_are_typed_by_themselves_and_adjacent_media_stay_two(folder: Path) -> None:
    """Each region of pads is a medium of its own, with positions of its own."""
    ids = [5, START, *PADS, END, START, *PADS, END, 6]
    images = [Image(picture) for picture in PICTURES]
    async with served(folder) as (client, service):
        both = await client.condition(service.name, token_ids=ids, media=images, layers=[1, 3])
        parts = await client.condition(service.name, images, layers=[1, 3])
        swapped = await client.condition(service.name, token_ids=ids, media=images[::-1], layers=[1, 3])
    assert both.states.shape == (2, len(ids), 48) and parts.states.shape == (2, len(ids) - 2, 48)
    assert [len(one.usage.media) for one in (both, parts)] == [2, 2]
    assert np.abs(both.states - swapped.states).max() > 0.1


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        ([START, *PADS[1:], END], 1),
        ([START, *PADS, IMAGE_PAD, END], 1),
        ([START, *PADS, *PADS, END], 2),
        ([START, *PADS, END], 2),
        ([START, *PADS, END, START, *PADS, END], 1),
    ],
    ids=["too few", "too many", "fused", "a medium too many", "a run too many"],
)
async def test_runs_and_pads_are_counted_before_anything_is_computed(folder: Path, ids: list[int], count: int) -> None:
    async with served(folder) as (client, service):
        with pytest.raises(InvalidRequest) as caught:
            await client.condition(
                service.name, token_ids=ids, media=[Image(picture) for picture in PICTURES[:count]], layer=1
            )
        assert caught.value.reason == "PLACEHOLDER_MISMATCH", caught.value
        assert not service.decoder.scheduler.counts.rows
        assert len([part for part in str(caught.value).replace(",", " ").split() if part.isdecimal()]) >= 2
