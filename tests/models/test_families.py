"""What every family must be, over every folder of `chiasm.models`. A new family adds its tiny checkpoint here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.entry import open_entry, seal
from chiasm.chat_template import Slot
from chiasm.models.checkpoint import split
from chiasm.models.entries import contract_of, identity_of
from chiasm.models.registry import Model, families, find
from chiasm.timeline import UnitName
from decoder_service.engine import DecoderEngine, Work
from decoder_service.laid import SizedSlot
from tests import checkpoints_tiny

TINY: dict[str, Callable[[Path], Path]] = {"moss_vl": checkpoints_tiny.write}
"""By family, what writes a small random checkpoint of it into a folder."""

each_family = pytest.mark.parametrize("family", sorted(families()))


@pytest.fixture
def model(family: str, tmp_path: Path) -> Model:
    return Model(TINY[family](tmp_path / "tiny"))


def test_every_family_has_a_tiny_checkpoint() -> None:
    assert set(TINY) == set(families())


def test_no_two_families_claim_one_architecture() -> None:
    claimed = [architecture for family in families().values() for architecture in family.architectures]
    assert claimed and len(set(claimed)) == len(claimed)


@each_family
def test_a_folder_is_named_for_its_family(family: str, model: Model) -> None:
    assert type(model.family).__module__ == f"chiasm.models.{family}"
    assert model.family.name == family
    assert find(str(model.checkpoint.directory)) == model.checkpoint.directory


@each_family
def test_the_halves_cover_every_weight_once(family: str, model: Model) -> None:
    encoder, decoder = model.weights.names("encoder"), model.weights.names("decoder")
    assert encoder.isdisjoint(decoder)
    assert set(model.checkpoint.tensors) <= encoder | decoder
    for half, name in ((model.encoder(), "encoder"), (model.decoder(), "decoder")):
        declared = [weight.parameter for weight in model.weights.weights if weight.half == name]
        assert sorted(declared) == sorted(dict(cast(nn.Module, half).named_parameters()))


@each_family
def test_the_halves_agree_on_entries_and_describe_their_processing(family: str, model: Model) -> None:
    assert model.encoder().entry_shape == model.decoder().entry_shape
    assert model.processor.describe() == Model(model.checkpoint.directory).processor.describe() != b""


@each_family
@pytest.mark.parametrize("separate", [False, True])
def test_divided_through_bytes_equals_handed_over(family: str, separate: bool, model: Model, tmp_path: Path) -> None:
    """Frames to logits: entries as sealed bytes between halves of their own folders, against tensors in one hand."""
    ours = theirs = model
    if separate:
        for half in ("encoder", "decoder"):
            split(model.checkpoint, model.weights.names(half), tmp_path / half)
        ours, theirs = Model(tmp_path / "encoder"), Model(tmp_path / "decoder")
    generator = torch.Generator().manual_seed(3)
    frames = [
        torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8) for size in ((16, 16), (16, 24))
    ]
    grids = [(4, 4), (4, 6)]
    with torch.inference_mode():
        direct = model.encoder().encode(frames, TorchVarlen())
        sent = ours.encoder().encode(frames, TorchVarlen())
    shape, fingerprint = ours.encoder().entry_shape, ours.checkpoint.fingerprint
    identity = identity_of(ours.processor, fingerprint=fingerprint, dtype=torch.float32).digest()
    logits = []
    for entries, reader in ((direct, model), (sent, theirs)):
        engine = DecoderEngine(reader.decoder(), reader.processor, text_tokens=64, visual_tokens=64)
        sequence = engine.sequence()
        sequence.extend([[1, 2, 3]])
        for slot, (entry, grid) in enumerate(zip(entries, grids, strict=True)):
            payload = entry
            if entries is sent:
                key = bytes([slot]) * 32
                contract = contract_of(shape, ours.processor, key=key, identity=identity, dtype=entry.dtype, grid=grid)
                opened = open_entry(seal(contract, entry, bytes(32)), contract, bytes(32))
                assert not isinstance(opened, str)
                payload = opened
            sequence.size(slot, SizedSlot([0], [grid], [0.0], final=True))
            sequence.extend([Slot(slot), [4, 5]])
            engine.attach(sequence, UnitName(slot, 0), payload)
        logits.append(engine.step([Work(sequence, len(sequence.timeline), "all")])[0])
    assert torch.equal(*logits)
