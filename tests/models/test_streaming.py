"""Blocks that come to the device one by one compute what resident ones do, in little memory, and are there in time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.errors import CheckpointError
from chiasm.layers.stack import Stack
from chiasm.models.carrying import Mapped
from chiasm.models.family import DecoderHalf, EncoderHalf
from chiasm.models.forms import payloads
from chiasm.models.registry import Model, families
from chiasm.models.residence import Residence, stacks
from chiasm.models.streaming import Streaming
from chiasm.settings import SettingsError
from decoder_service.engine import DecoderEngine, Work
from tests import checkpoints_qwen3_vl, checkpoints_tiny
from tests.mapped import mapped_here
from tests.models.carriers import Rooms
from tests.models.test_families import FRAMES, TINY, answered

each_family = pytest.mark.parametrize("family", sorted(families()))
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def model(family: str, tmp_path: Path) -> Model:
    return Model(TINY[family](tmp_path / "tiny"))


@torch.inference_mode()
def encoded(half: EncoderHalf, model: Model) -> list[Tensor]:
    form = model.entry_shape.forms[0]
    return payloads(half, FRAMES, [form] * len(FRAMES), TorchVarlen())


def same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def alive(half: object) -> int:
    """Bytes of the memory that parameters take: what is away shares one number."""
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in cast(nn.Module, half).parameters()
    }
    return sum(storages.values())


# -- of both families --------------------------------------------------------------------------------------------------


@each_family
def test_each_half_has_one_stack_of_blocks(family: str, model: Model) -> None:
    for half in (model.encoder(), model.decoder()):
        ((name, stack),) = stacks(cast(nn.Module, half))
        assert name.rpartition(".")[2] in ("blocks", "layers") and len(stack) > 1


@pytest.mark.parametrize("blocks", [2, 3, 100])
@each_type
@each_family
def test_streamed_halves_give_the_same_bits(family: str, dtype: torch.dtype, blocks: int, model: Model) -> None:
    streaming = Streaming(resident_blocks=blocks)
    form = model.entry_shape.forms[0]
    encoder, decoder = model.encoder(dtype=dtype), model.decoder(dtype=dtype)
    streamed = model.encoder(dtype=dtype, streaming=streaming), model.decoder(dtype=dtype, streaming=streaming)
    entries = encoded(encoder, model)
    expected = answered(decoder, model, entries, form)
    for _ in range(3):  # the first time nothing is there, and then what the last time left
        assert same(encoded(streamed[0], model), entries)
        assert torch.equal(answered(streamed[1], model, entries, form), expected)


@each_family
def test_steps_that_leave_cross_layers_out_are_the_same_too(family: str, model: Model) -> None:
    """Steps of both kinds in turn: the guess of what comes next is wrong now and then."""
    form = model.entry_shape.forms[0]
    entries = encoded(model.encoder(), model)

    def spoken(half: DecoderHalf) -> list[Tensor]:
        engine = DecoderEngine(half, model.processor, text_tokens=64, visual_tokens=64)
        sequence = engine.sequence()
        made = []
        for token in range(1, 5):
            sequence.extend([[token]])
            made += engine.step([Work(sequence, 1, "all")])
            made.append(answered(half, model, entries, form))
        return made

    assert same(spoken(model.decoder(streaming=Streaming())), spoken(model.decoder()))


@each_type
@each_family
def test_a_streamed_weight_lies_as_a_resident_one(family: str, dtype: torch.dtype, model: Model) -> None:
    """Else products would be summed in another order."""
    for half in ("encoder", "decoder"):
        resident = dict(getattr(model, half)(dtype=dtype).named_parameters())
        streamed = getattr(model, half)(dtype=dtype, streaming=Streaming())
        kept = Residence.of(streamed).kept
        assert kept and set(kept) < set(resident)
        for name, parameter in streamed.named_parameters():
            here = kept.get(name, parameter)
            assert here.stride() == resident[name].stride() and here.data_ptr() % 64 == 0, name
            assert torch.equal(here, resident[name]), name


@each_family
def test_what_is_outside_of_the_blocks_stays_and_the_blocks_are_bounded(family: str, model: Model) -> None:
    half = model.decoder(streaming=Streaming(resident_blocks=2))
    outside = alive(half)
    residence = Residence.of(half)
    (layers,) = residence.streamed
    entries, form = encoded(model.encoder(), model), model.entry_shape.forms[0]
    for _ in range(2):
        answered(half, model, entries, form)
        assert len(layers.here) == 2
        away = [name for name, p in cast(nn.Module, half).named_parameters() if p.isnan().all()]
        assert {name.split(".")[1] for name in away} >= {str(n) for n in range(4)} - {str(n) for n in layers.here}
        assert alive(half) <= outside + sum(kept.untyped_storage().nbytes() for kept in layers.kept[:1])
    named = dict(cast(nn.Module, half).named_parameters())
    assert not named["embed_tokens.weight"].isnan().any() and not named["norm.weight"].isnan().any()


def test_pages_of_blocks_that_are_away_are_not_in_this_process(tmp_path: Path) -> None:
    text = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 16}
    folder = checkpoints_qwen3_vl.write(tmp_path / "tiny", text=text, vision={"patch_size": 4, "out_hidden_size": 256})
    model = Model(folder)
    half = model.decoder(streaming=Streaming(resident_blocks=3))
    (layers,) = Residence.of(half).streamed
    assert sum(map(mapped_here, layers.kept)) <= layers.kept[0].nbytes, "all of them were written"
    for _ in range(3):
        answered(half, model, encoded(model.encoder(), model), model.entry_shape.forms[0])
        assert len(layers.here) == 3
        for number, kept in enumerate(layers.kept):
            # Around a page that is read the system maps some more, beyond the end of a block too.
            assert number in layers.here or mapped_here(kept) <= kept.nbytes / 8


# -- the order ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x @ weight, and what is away would make NaN of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * self.scale


class Tower(nn.Module):
    """Blocks, and a head outside of them."""

    def __init__(self, blocks: int, width: int = 8) -> None:
        super().__init__()
        self.blocks = Stack(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3, bias=False)

    def forward(self, x: Tensor, without: Sequence[int] = ()) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number not in without:
                x = block(x)
        out: Tensor = self.head(x)
        return out


def tower(blocks: int, resident: int, carrier: Rooms) -> tuple[Tower, Callable[..., Tensor], Residence]:
    """A streamed one, what its like gives that is resident, and where its weights are."""
    torch.manual_seed(blocks)
    made, like = Tower(blocks), Tower(blocks)
    like.load_state_dict(made.state_dict())
    for half in (made, like):
        half.requires_grad_(False)
    filled = {name: parameter.clone() for name, parameter in made.named_parameters()}
    residence = Residence(made, torch.device("cpu"), carrier, resident_blocks=resident)
    for name, kept in residence.kept.items():
        kept.copy_(filled[name])
    residence.begin()
    return made, like, residence


X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def test_the_next_block_is_fetched_when_one_is_called_and_behind_the_last_the_first() -> None:
    carrier = Rooms()
    made, like, _ = tower(4, 2, carrier)
    assert carrier.told("fetch", "arrive") == [("fetch", 0)]
    for _ in range(3):
        assert torch.equal(made(X), like(X))
        order = [(what, number % 4) for n in range(4) for what, number in (("arrive", n), ("fetch", n + 1))]
        assert carrier.told("fetch", "arrive") == order


@pytest.mark.parametrize(("resident", "fetched"), [(2, 8), (3, 7), (5, 5), (7, 3), (8, 0), (20, 0)])
def test_rooms_beyond_two_spare_a_copy_each_in_every_pass(resident: int, fetched: int) -> None:
    carrier = Rooms()
    made, like, residence = tower(8, resident, carrier)
    for _ in range(2):
        made(X)
    carrier.told()
    for _ in range(5):
        assert torch.equal(made(X), like(X))
        assert len(residence.streamed[0].here) == min(resident, 8)
    assert len(carrier.told("fetch")) <= 5 * fetched + 1
    assert carrier.room_bytes == min(resident, 8) * residence.streamed[0].kept[0].nbytes


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("resident", [2, 3, 4])
def test_no_copy_meets_a_block_that_computes_whatever_is_left_out(late: bool, resident: int) -> None:
    made, like, _ = tower(6, resident, Rooms(late=late))
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        without = torch.nonzero(torch.rand(6, generator=generator) < 0.4).flatten().tolist()
        assert torch.equal(made(X, without), like(X, without))


def test_what_is_left_out_every_time_is_no_longer_fetched() -> None:
    carrier = Rooms()
    made, like, _ = tower(6, 2, carrier)
    for _ in range(2):
        made(X, [2, 4])
    carrier.told()
    assert torch.equal(made(X, [2, 4]), like(X, [2, 4]))
    assert carrier.told("fetch") == [("fetch", number) for number in (1, 3, 5, 0)]
    assert torch.equal(made(X), like(X)), "a wrong guess is waited for"


def test_a_pass_that_breaks_off_leaves_the_next_as_it_is() -> None:
    made, like, _ = tower(5, 2, Rooms())
    with pytest.raises(RuntimeError):
        made(torch.ones(2, 7))
    for block in [*made.blocks][:3]:
        block(X)
    assert torch.equal(made(X), like(X))


def test_a_stack_of_one_block_is_outside() -> None:
    made, like, residence = tower(1, 2, Rooms())
    assert not residence.streams and torch.equal(made(X), like(X))


def test_what_is_away_has_its_shape_and_type_and_no_memory_and_reads_as_nan() -> None:
    made, _, _ = tower(3, 2, Rooms())
    weight = cast(Block, made.blocks[2]).weight
    assert weight.shape == (8, 8) and weight.dtype == torch.float32
    assert weight.untyped_storage().nbytes() == 4 and bool(weight.isnan().all())


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_a_wrong_checkpoint_is_told_as_it_is_of_resident_halves(tmp_path: Path) -> None:
    made = checkpoints_tiny.tensors(checkpoints_tiny.config())
    del made["model.visual.blocks.1.attn.qkv.weight"], made["model.language_model.layers.2.mlp.up_proj.weight"]
    made["stray"] = torch.zeros(1)
    model = Model(checkpoints_tiny.write(tmp_path / "tiny", made=made))
    for half in ("encoder", "decoder"):
        told = []
        for streaming in (None, Streaming()):
            with pytest.raises(CheckpointError) as caught:
                getattr(model, half)(streaming=streaming)
            told.append(caught.value.problems)
        assert told[0] == told[1] and len(told[0]) == 2


def test_a_folder_that_cannot_hold_the_blocks_is_told_with_the_bytes(tmp_path: Path) -> None:
    model = Model(checkpoints_tiny.write(tmp_path / "tiny"))
    for folder in (tmp_path / "nowhere", tmp_path / "tiny" / "config.json"):
        with pytest.raises(SettingsError, match=r"\d+ bytes of weights") as caught:
            model.decoder(streaming=Streaming(directory=folder))
        assert caught.value.where == "--offload-dir"


def test_the_file_of_the_blocks_has_no_name_and_goes_with_the_half(tmp_path: Path) -> None:
    model = Model(checkpoints_tiny.write(tmp_path / "tiny"))
    folder = tmp_path / "blocks"
    folder.mkdir()
    half = model.decoder(streaming=Streaming(directory=folder))
    assert not list(folder.iterdir())
    assert str(folder) in Path("/proc/self/maps").read_text(encoding="utf-8")
    del half
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_nothing_may_be_kept() -> None:
    (kept,) = Mapped().keep([0])
    assert not kept.nbytes
