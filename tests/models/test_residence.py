"""Weights leave the device and come back as they were: of streamed halves and of others, of both families."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from chiasm.models.registry import Model, families
from chiasm.models.residence import Residence
from chiasm.models.streaming import Streaming
from tests.models.carriers import Rooms
from tests.models.test_families import TINY, answered
from tests.models.test_streaming import X, alive, encoded, same, tower

each_family = pytest.mark.parametrize("family", sorted(families()))
each_way = pytest.mark.parametrize("streaming", [None, Streaming()], ids=["resident", "streamed"])


@pytest.fixture
def model(family: str, tmp_path: Path) -> Model:
    return Model(TINY[family](tmp_path / "tiny"))


@each_way
@each_family
def test_weights_that_were_away_compute_the_same_bits(family: str, streaming: Streaming | None, model: Model) -> None:
    encoder, decoder = model.encoder(streaming=streaming), model.decoder(streaming=streaming)
    form = model.entry_shape.forms[0]
    entries = encoded(encoder, model)
    expected = answered(decoder, model, entries, form)
    for _ in range(2):
        for half in (encoder, decoder):
            residence = Residence.of(half)
            residence.offload()
            residence.offload()
            parameters = [*cast(nn.Module, half).parameters()]
            assert not residence.here and all(bool(p.isnan().all()) for p in parameters)
            assert alive(half) < 64, "they share a few numbers"
            residence.load()
            residence.load()
            assert residence.here
        assert same(encoded(encoder, model), entries)
        assert torch.equal(answered(decoder, model, entries, form), expected)


def test_a_half_has_one_residence_whoever_asks(tmp_path: Path) -> None:
    model = Model(TINY["moss_vl"](tmp_path / "tiny"))
    for streaming in (None, Streaming()):
        half = model.decoder(streaming=streaming)
        assert Residence.of(half) is Residence.of(half)
        assert Residence.of(half).streams is (streaming is not None)


def test_the_device_is_waited_for_before_anything_leaves_and_what_is_outside_is_copied_once() -> None:
    carrier = Rooms()
    made, like, residence = tower(3, 2, carrier)
    made(X)
    carrier.log.clear()
    residence.offload()
    assert carrier.log[:2] == [("settle", -1), ("keep", 1)] and carrier.log[-1] == ("freed", -1)
    assert not carrier.told("fetch")
    residence.load()
    residence.offload()
    assert not carrier.told("keep")
    residence.load()
    assert torch.equal(made(X), like(X))


def test_weights_that_find_no_room_stay_away_and_come_later() -> None:
    class Full(Rooms):
        """A device without room, for a while."""

        full = False

        def room(self, size: int) -> torch.Tensor:
            if self.full and size > 200:  # a block; what is outside is smaller
                raise torch.OutOfMemoryError("no room")
            return super().room(size)

    carrier = Full()
    made, like, residence = tower(3, 2, carrier)
    residence.offload()
    carrier.full = True
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            residence.load()
        assert not residence.here and all(bool(p.isnan().all()) for p in made.parameters())
    carrier.full = False
    residence.load()
    assert torch.equal(made(X), like(X))


def test_weights_that_the_host_has_no_room_for_stay_where_they_are(tmp_path: Path) -> None:
    class Small(Rooms):
        """A host that keeps the blocks and nothing else."""

        def keep(self, sizes):  # type: ignore[no-untyped-def]
            if len(sizes) == 1:
                raise OSError("no room")
            return super().keep(sizes)

    made, like, residence = tower(3, 2, Small())
    with pytest.raises(OSError, match="no room"):
        residence.offload()
    assert residence.here and torch.equal(made(X), like(X))
