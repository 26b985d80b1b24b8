"""What every family must be, over every folder of `chiasm.models`. A new family adds its tiny checkpoint here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.entry import open_entry, seal
from chiasm.cache.form import Form
from chiasm.cache.quantised import SCHEMES, dequantise
from chiasm.chat_template import Slot
from chiasm.errors import CheckpointError
from chiasm.models.checkpoint import split
from chiasm.models.entries import contract_of, identity_of
from chiasm.models.family import DecoderHalf
from chiasm.models.forms import CODECS, payloads
from chiasm.models.registry import Model, families, find
from chiasm.timeline import UnitName
from decoder_service.engine import DecoderEngine, Work
from decoder_service.laid import SizedSlot
from tests import checkpoints_qwen3_vl, checkpoints_tiny

TINY: dict[str, Callable[[Path], Path]] = {
    "moss_vl": checkpoints_tiny.write,
    "qwen3_vl": partial(checkpoints_qwen3_vl.write, vision={"patch_size": 4}),
    "qwen3_vl_conditioning": partial(checkpoints_qwen3_vl.write, vision={"patch_size": 4}),
}
"""By family, what writes a small random checkpoint of it into a folder, with patches of 4x4 pixels merged 2x2."""

CUT = {"qwen3_vl_conditioning": 3}
"""By family whose decoder is cut, after how many layers of a tiny checkpoint it is here."""

TWICE: dict[str, Callable[[Model], set[str]]] = {
    "moss_vl": lambda model: {
        f"model.language_model.layers.{layer}.cross_attn.{part}.weight"
        for layer in model.config.text.cross_attention_layers
        for part in ("k_proj", "v_proj", "k_norm")
    }
}
"""By family whose decoder makes keys and values of states, the tensors that both halves load where it does. A family
whose states are laid over placeholders is not among them."""

each_family = pytest.mark.parametrize("family", sorted(families()))
each_projecting = pytest.mark.parametrize("family", sorted(TWICE))
each_form = pytest.mark.parametrize(
    ("family", "form"),
    [(family, form) for family in sorted(families()) for form in Form if family in TWICE or form is Form.STATES],
)


@pytest.fixture
def model(family: str, tmp_path: Path) -> Model:
    return Model(TINY[family](tmp_path / "tiny"), condition_layers=CUT.get(family))


def test_every_family_has_a_tiny_checkpoint() -> None:
    assert set(TINY) == set(families())


@each_family
def test_entries_are_laid_over_placeholders_or_made_into_keys_and_values(family: str, model: Model) -> None:
    shape = model.entry_shape
    assert shape.overlaid is (family not in TWICE)
    assert shape.forms == ((Form.STATES,) if shape.overlaid else tuple(Form))
    layout = model.processor.unit_layout((4, 6))
    assert len(layout.placeholder_ids) == (layout.vision_tokens if shape.overlaid else 1)
    assert model.processor.key_steps((4, 6)).shape == (3, layout.vision_tokens)


def test_no_two_families_claim_one_architecture() -> None:
    claimed = [architecture for family in families().values() for architecture in family.architectures]
    assert claimed and len(set(claimed)) == len(claimed)
    assert not set(claimed) & {architecture for family in families().values() for architecture in family.refused}


@each_family
def test_a_folder_is_named_for_its_family(family: str, model: Model) -> None:
    assert type(model.family).__module__ == f"chiasm.models.{family}"
    assert model.family.name == family
    assert find(str(model.checkpoint.directory)) == model.checkpoint.directory


@each_family
def test_the_halves_cover_every_weight_once(family: str, model: Model) -> None:
    encoder, decoder = model.weights.names("encoder"), model.weights.names("decoder")
    assert encoder.isdisjoint(decoder)
    left = model.weights.left
    assert set(model.checkpoint.tensors) <= encoder | decoder | left and left.isdisjoint(encoder | decoder)
    assert bool(left) is (family in CUT)
    for half, name in ((model.encoder(), "encoder"), (model.decoder(), "decoder")):
        declared = [weight.parameter for weight in model.weights.weights if weight.half == name]
        assert sorted(declared) == sorted(dict(cast(nn.Module, half).named_parameters()))


@each_projecting
def test_a_decoder_that_projects_states_loads_of_the_encoders_weights_what_makes_keys_and_values(
    family: str, model: Model
) -> None:
    """Everything else is loaded once, whatever entries hold."""
    encoder, decoder = model.weights.names("encoder"), model.weights.names("decoder", projects=True)
    assert encoder | decoder == model.weights.names()
    assert encoder & decoder == TWICE[family](model)
    half = cast(nn.Module, model.decoder(projects=True))
    filled = dict(half.named_parameters())
    assert sorted(filled) == sorted(weight.parameter for weight in model.weights.of("decoder", projects=True))
    theirs = dict(cast(nn.Module, model.encoder()).named_parameters())
    for weight in model.weights.weights:
        if weight.projects:
            assert torch.equal(filled[weight.parameter], theirs[weight.parameter])
    assert cast(DecoderHalf, half).projects and not model.decoder().projects


@each_projecting
def test_a_folder_cut_for_a_decoder_projects_if_it_was_cut_so(family: str, model: Model, tmp_path: Path) -> None:
    for projects in (True, False):
        folder = tmp_path / str(projects)
        split(model.checkpoint, model.weights.names("decoder", projects=projects), folder)
        cut = Model(folder)
        assert cut.can_project is projects and model.can_project
        assert not cut.decoder().projects
        if projects:
            assert cut.decoder(projects=True).projects
        else:
            with pytest.raises(CheckpointError) as caught:
                cut.decoder(projects=True)
            assert len(caught.value.problems) == len(TWICE[family](model))


@each_family
def test_the_halves_agree_on_entries_and_describe_their_processing(family: str, model: Model) -> None:
    assert model.encoder().entry_shape == model.decoder().entry_shape
    assert model.processor.describe() == Model(model.checkpoint.directory).processor.describe() != b""


FRAMES = [
    torch.randint(0, 256, (1, 3, *size), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    for size in ((16, 16), (16, 24))
]
DARK = [torch.zeros_like(frame) for frame in FRAMES]
GRIDS = [(4, 4), (4, 6)]


def answered(decoder: DecoderHalf, model: Model, entries: Sequence[Tensor], form: Form = Form.CROSS_KV) -> Tensor:
    """(rows, vocabulary) logits over text and both frames; (rows, width) states of a half that has none."""
    engine = DecoderEngine(decoder, model.processor, text_tokens=64, visual_tokens=64)
    sequence = engine.sequence()
    sequence.extend([[1, 2, 3]])
    for slot, (entry, grid) in enumerate(zip(entries, GRIDS, strict=True)):
        sequence.size(slot, SizedSlot([0], [grid], [0.0], final=True))
        sequence.extend([Slot(slot), [4, 5]])
        engine.attach(sequence, UnitName(slot, 0), entry, form)
    layers = () if decoder.headed else (decoder.layers_total,)
    (found,) = engine.step([Work(sequence, len(sequence.timeline), "all", layers=layers)])
    return found if decoder.headed else found[0]


@each_family
def test_what_is_seen_changes_what_is_said(family: str, model: Model) -> None:
    form = model.entry_shape.forms[0]
    with torch.inference_mode():
        one, other = (payloads(model.encoder(), seen, [form] * 2, TorchVarlen()) for seen in (FRAMES, DARK))
    first, second = (answered(model.decoder(), model, entries, form) for entries in (one, other))
    assert torch.equal(first[:3], second[:3]), "before it is seen"
    assert (first - second)[-1].abs().max() > 1e-3 * first.abs().max()


@each_form
@pytest.mark.parametrize("separate", [False, True])
def test_divided_through_bytes_equals_handed_over(
    family: str, separate: bool, form: Form, model: Model, tmp_path: Path
) -> None:
    """Frames to logits: entries of each form as sealed bytes between halves of their own folders, against what the
    encoder half gives in one hand: keys and values, or states where there are no others. Exact forms give equal logits;
    those of 8 bits what their stated error gives."""
    ours = theirs = model
    if separate:
        for half in ("encoder", "decoder"):
            split(model.checkpoint, model.weights.names(half, projects=form is Form.STATES), tmp_path / half)
        ours = Model(tmp_path / "encoder")
        theirs = Model(tmp_path / "decoder", condition_layers=CUT.get(family))
    with torch.inference_mode():
        plainest = model.entry_shape.forms[0]
        direct = payloads(model.encoder(), FRAMES, [plainest] * len(FRAMES), TorchVarlen())
        sent = payloads(ours.encoder(), FRAMES, [form] * len(FRAMES), TorchVarlen())
    identity = identity_of(ours.processor, fingerprint=ours.checkpoint.fingerprint, dtype=torch.float32).digest()
    came = []
    for slot, (payload, grid) in enumerate(zip(sent, GRIDS, strict=True)):
        contract = contract_of(
            ours.entry_shape,
            ours.processor,
            key=bytes([slot]) * 32,
            identity=identity,
            dtype=torch.float32,
            grid=grid,
            form=form,
        )
        opened = open_entry(seal(contract, payload, bytes(32)), contract, bytes(32))
        assert not isinstance(opened, str)
        came.append(opened)
    expected = answered(model.decoder(), model, direct, plainest)
    got = answered(theirs.decoder(projects=form is Form.STATES), theirs, came, form)
    if not form.quantised:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        return
    shapes = [ours.entry_shape.of(entry.shape[3], form) for entry in direct]
    read = [dequantise(p, form, shape, torch.float32) for p, shape in zip(came, shapes, strict=True)]
    for entry, one in zip(direct, read, strict=True):
        assert bool(((entry - one).abs() <= SCHEMES[form].max_error * entry.abs().amax(3, keepdim=True)).all())
    assert torch.equal(got, answered(model.decoder(), model, read)), "nothing but the entry is off"
    assert not torch.equal(got, expected)


@each_projecting
def test_units_of_several_forms_are_encoded_together(family: str, model: Model) -> None:
    frames = [FRAMES[0], FRAMES[1], FRAMES[0], FRAMES[1]]
    forms = [Form.STATES, Form.CROSS_KV, Form.CROSS_KV_INT8, Form.STATES]
    wanted = [*zip(frames, forms, strict=True)]
    encoder, decoder = model.encoder(), model.decoder(projects=True)
    with torch.inference_mode():
        made = payloads(encoder, frames, forms, TorchVarlen())
        alone = [payloads(encoder, [frame], [form], TorchVarlen())[0] for frame, form in wanted]
        kv = encoder.encode(frames, TorchVarlen())
    for form, one, single, entry in zip(forms, made, alone, kv, strict=True):
        assert one.shape == single.shape
        tokens = entry.shape[3]
        taken, again = (CODECS[form].decode(payload, decoder, tokens) for payload in (one, single))
        torch.testing.assert_close(taken, again, rtol=1e-4, atol=1e-4 if not form.quantised else 0.05)
        if not form.quantised:
            torch.testing.assert_close(taken, entry, rtol=1e-4, atol=1e-5)
