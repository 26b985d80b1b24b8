"""Entries: a key says everything an entry depends on, and a doubtful entry is never believed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chiasm.cache import wire
from chiasm.cache.entry import HEADER_BYTES, Contract, Identity, finite, open_entry, seal, tag_secret, unit_key
from chiasm.cache.form import Form
from chiasm.cache.place import InMemory
from chiasm.cache.quantised import SCHEMES, quantise
from chiasm.cache.sealed import TAG_BYTES, EntryKey, Sealed
from chiasm.cache.tenant import tenant_root
from chiasm.errors import ServerError
from chiasm.rpc.v1 import common_pb2 as pb

steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no fault of what is tested."""

MASTER = bytes(range(32))
SECRET = bytes(31) + b"\1"
IDENTITY = Identity("f" * 64, b'{"resize": "a"}', torch.float32)
SHAPE = (2, 2, 3, 7, 4)


def pixels(height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)


def key(**changes: Any) -> EntryKey:
    """The key of one unit; what is given replaces one of the things it is made of."""
    made: dict[str, Any] = {
        "root": tenant_root(MASTER, "alice"),
        "identity": IDENTITY.digest(),
        "grid": (4, 6),
        "pixels": [pixels(16, 24)],
        "form": Form.CROSS_KV,
        "dtype": torch.float32,
    }
    return unit_key(**(made | changes))


def contract(**changes: Any) -> Contract:
    made = Contract(key(), IDENTITY.digest(), Form.CROSS_KV, torch.float32, (4, 6), SHAPE)
    return replace(made, **changes)


def payload(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)


def sealed(dtype: torch.dtype = torch.float32) -> Sealed:
    return seal(contract(dtype=dtype), payload(dtype), SECRET)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_equal_units_have_equal_keys_of_full_width() -> None:
    assert key() == key(pixels=[pixels(16, 24)])
    assert len(key()) == 32
    spread = pixels(24, 16).transpose(1, 2)
    assert not spread.is_contiguous()
    assert key(pixels=[spread]) == key(pixels=[spread.contiguous()])


def changed_pixel() -> Tensor:
    made = pixels(16, 24)
    made[2, 15, 23] ^= 1
    return made


@pytest.mark.parametrize(
    "change",
    [
        {"root": tenant_root(MASTER, "bob")},
        {"root": tenant_root(MASTER, "alice", epoch=1)},
        {"root": tenant_root(bytes(32), "alice")},
        {"identity": replace(IDENTITY, fingerprint="e" * 64).digest()},
        {"grid": (6, 4)},
        {"pixels": [changed_pixel()]},
        {"pixels": [pixels(16, 24).flip(0)]},
        {"pixels": [pixels(16, 24), pixels(16, 24)]},
        {"form": Form.STATES},
        {"form": Form.CROSS_KV_INT8},
        {"form": Form.CROSS_KV_FP8},
        {"dtype": torch.bfloat16},
    ],
    ids=[
        "tenant",
        "epoch",
        "master",
        "model",
        "grid",
        "one_bit",
        "channels_swapped",
        "two_frames",
        "states",
        "int8",
        "fp8",
        "stored",
    ],
)
def test_whatever_an_entry_depends_on_changes_its_key(change: dict[str, Any]) -> None:
    assert key(**change) != key()


def test_equal_bytes_of_another_shape_have_another_key() -> None:
    """30x150 and 150x30 pixels of the same bytes, each with the grid of its own shape and with the other's."""
    flat = torch.arange(3 * 30 * 150, dtype=torch.int64).remainder(251).to(torch.uint8)
    wide, tall = flat.view(3, 30, 150), flat.view(3, 150, 30)
    keys = {key(pixels=[frame], grid=grid) for frame in (wide, tall) for grid in ((2, 10), (10, 2))}
    assert len(keys) == 4


def test_frames_cannot_be_cut_elsewhere() -> None:
    """Two frames of a unit and other two with the same bytes in a row."""
    whole = pixels(8, 6).reshape(-1)
    one = [whole[:96].view(3, 4, 8), whole[96:].view(3, 4, 4)]
    other = [whole[:48].view(3, 4, 4), whole[48:].view(3, 4, 8)]
    assert key(pixels=one) != key(pixels=other)


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "0" * 64},
        {"processor": b'{"resize": "b"}'},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
    ],
)
def test_whatever_two_encoders_may_differ_in_changes_their_identity(change: dict[str, Any]) -> None:
    assert replace(IDENTITY, **change).digest() != IDENTITY.digest()


@steady
@given(st.text(max_size=6), st.binary(max_size=6), st.text(max_size=6), st.binary(max_size=6))
def test_fields_cannot_run_into_each_other(a: str, b: bytes, c: str, d: bytes) -> None:
    one, other = (replace(IDENTITY, fingerprint=f, processor=p).digest() for f, p in ((a, b), (c, d)))
    assert (one == other) == ((a, b) == (c, d))


def test_fields_that_read_the_same_in_a_row_are_told_apart() -> None:
    one, other = (replace(IDENTITY, fingerprint=f, processor=p).digest() for f, p in (("ab", b"c"), ("a", b"bc")))
    assert one != other


@steady
@given(st.text(max_size=8), st.integers(0, 2**32 - 1), st.text(max_size=8), st.integers(0, 2**32 - 1))
def test_no_two_tenants_and_epochs_share_a_root(one: str, epoch: int, other: str, another: int) -> None:
    same = tenant_root(MASTER, one, epoch=epoch) == tenant_root(MASTER, other, epoch=another)
    assert same == ((one, epoch) == (other, another))


def test_roots_and_secrets_are_not_each_other() -> None:
    root = tenant_root(MASTER, "alice")
    secrets = {
        root,
        tag_secret(MASTER, root),
        tag_secret(root, MASTER),
        tag_secret(MASTER, tenant_root(MASTER, "bob")),
        MASTER,
    }
    assert len(secrets) == 5
    assert all(len(secret) == 32 for secret in secrets)


# -- sealing and opening -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_was_sealed_is_opened_bit_by_bit(dtype: torch.dtype) -> None:
    entry = sealed(dtype)
    opened = open_entry(entry, contract(dtype=dtype), SECRET)
    assert isinstance(opened, Tensor)
    assert opened.dtype == dtype and torch.equal(opened, payload(dtype))
    assert entry.size == HEADER_BYTES + math.prod(SHAPE) * dtype.itemsize + TAG_BYTES
    assert Contract.unpack(entry.header) == contract(dtype=dtype)


def test_what_is_opened_does_not_depend_on_how_it_lay_in_memory() -> None:
    spread = payload().transpose(0, 4).contiguous().transpose(0, 4)
    assert not spread.is_contiguous()
    assert seal(contract(), spread, SECRET).payload == sealed().payload


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_published(value: float) -> None:
    spoiled = payload()
    spoiled[1, 0, 2, 6, 3] = value
    with pytest.raises(ServerError) as caught:
        seal(contract(), spoiled, SECRET)
    assert caught.value.reason == "NONFINITE"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@steady
@given(at=st.integers(0, math.prod(SHAPE) - 1), value=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_one_value_anywhere_that_is_not_finite_is_seen_and_largest_values_are_finite(
    dtype: torch.dtype, at: int, value: float
) -> None:
    largest = torch.full(SHAPE, torch.finfo(dtype).max, dtype=dtype)
    for whole in (payload(dtype), largest, -largest):
        seal(contract(dtype=dtype), whole, SECRET)
        spoiled = whole.clone()
        spoiled.view(-1)[at] = value
        with pytest.raises(ServerError):
            seal(contract(dtype=dtype), spoiled, SECRET)


def test_infinities_that_would_cancel_are_seen() -> None:
    spoiled = payload()
    spoiled[0, 0, 0, 0, 0], spoiled[0, 0, 0, 0, 1] = math.inf, -math.inf
    with pytest.raises(ServerError):
        seal(contract(), spoiled, SECRET)


def flipped(data: bytes | memoryview, at: int, bit: int) -> bytes:
    made = bytearray(data)
    made[at] ^= 1 << bit
    return bytes(made)


PARTS: dict[str, Callable[[Sealed, int, int], Sealed]] = {
    "header": lambda s, at, bit: replace(s, header=flipped(s.header, at % len(s.header), bit)),
    "payload": lambda s, at, bit: replace(s, payload=memoryview(flipped(s.payload, at % s.payload.nbytes, bit))),
    "tag": lambda s, at, bit: replace(s, tag=flipped(s.tag, at % len(s.tag), bit)),
}


@pytest.mark.parametrize("part", PARTS)
@steady
@given(at=st.integers(0, 2**16), bit=st.integers(0, 7))
def test_any_bit_flipped_anywhere_is_seen(part: str, at: int, bit: int) -> None:
    assert isinstance(open_entry(PARTS[part](sealed(), at, bit), contract(), SECRET), str)


def test_every_bit_of_the_header_counts() -> None:
    for at in range(HEADER_BYTES):
        for bit in range(8):
            assert isinstance(open_entry(PARTS["header"](sealed(), at, bit), contract(), SECRET), str), (at, bit)


EACH: dict[Form, tuple[int, ...]] = {
    Form.CROSS_KV: SHAPE,
    Form.STATES: (7, 6),
    Form.CROSS_KV_INT8: SHAPE,
    Form.CROSS_KV_FP8: SHAPE,
}

each_form = pytest.mark.parametrize("form", Form)


def formed(form: Form) -> tuple[Contract, Tensor]:
    """An entry of a form: what it is, and its payload."""
    made = contract(form=form, shape=EACH[form], key=key(form=form))
    numbers = torch.randn(EACH[form], generator=torch.Generator().manual_seed(2))
    return made, quantise(numbers, form) if form.quantised else numbers


@each_form
def test_every_form_is_opened_as_it_was_sealed(form: Form) -> None:
    made, numbers = formed(form)
    entry = seal(made, numbers, SECRET)
    assert Contract.unpack(entry.header) == made
    assert entry.payload.nbytes == made.payload_bytes
    opened = open_entry(entry, made, SECRET)
    assert isinstance(opened, Tensor) and opened.dtype == numbers.dtype and torch.equal(opened, numbers)


@each_form
def test_any_byte_of_any_form_that_was_changed_is_seen(form: Form) -> None:
    made, numbers = formed(form)
    entry = seal(made, numbers, SECRET)
    for part, size in (("header", HEADER_BYTES), ("payload", entry.payload.nbytes), ("tag", TAG_BYTES)):
        for at in range(size):
            assert isinstance(open_entry(PARTS[part](entry, at, at % 8), made, SECRET), str), (part, at)


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(Form, 2)])
def test_no_form_is_read_as_another(one: Form, other: Form) -> None:
    """Keys and values and states, and the two of 8 bits, can be of equally many bytes."""
    made, numbers = formed(one)
    assert open_entry(seal(made, numbers, SECRET), contract(form=other, shape=EACH[other]), SECRET) == "form"
    assert formed(other)[0].key != made.key


@each_form
def test_what_is_not_finite_is_published_in_no_form(form: Form) -> None:
    made, _ = formed(form)
    spoiled = torch.randn(EACH[form])
    spoiled.view(-1)[-1] = math.nan
    with pytest.raises(ServerError) as caught:
        seal(made, quantise(spoiled, form) if form.quantised else spoiled, SECRET)
    assert caught.value.reason == "NONFINITE"


@each_form
def test_an_announcement_says_all_that_is_needed_to_read_its_form(form: Form) -> None:
    made, _ = formed(form)
    told = pb.Entry.FromString(wire.announce(made, InMemory()).SerializeToString())
    assert wire.read(told) == made
    assert told.HasField("quantization") == form.quantised
    if form.quantised:
        assert list(told.quantization.scale_shape) == [2, 2, 3, 4]
        assert told.quantization.max_error == pytest.approx(SCHEMES[form].max_error)
        assert told.quantization.computed_dtype == pb.DTYPE_FLOAT32


@each_form
@pytest.mark.parametrize(
    "change",
    [
        {"form": 99},
        {"form": pb.ENTRY_FORM_EMBEDDINGS},
        {"dtype": pb.DTYPE_INT32},
        {"dtype": 99},
        {"shape": [2, 2]},
        {"shape": []},
        {"byte_length": 1},
        {"frame_boundaries": [1]},
        {"frame_boundaries": []},
        {"key": b""},
        {"fingerprint": bytes(31)},
        {"grid": None},
        {"quantization": pb.Quantization(max_error=0.1)},
    ],
    ids=lambda change: "_".join(map(str, *change.items()))[:24],
)
def test_an_announcement_that_contradicts_itself_is_refused(form: Form, change: dict[str, Any]) -> None:
    told = wire.announce(formed(form)[0], InMemory())
    for field in change:
        told.ClearField(field)  # type: ignore[arg-type]
    told.MergeFrom(pb.Entry(**{field: value for field, value in change.items() if value is not None}))
    with pytest.raises(ServerError) as caught:
        wire.read(told)
    assert caught.value.reason == "ENTRY_CONTRACT"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", key(grid=(6, 4))),
        ("identity", bytes(32)),
        ("dtype", torch.bfloat16),
        ("grid", (6, 4)),
        ("form", Form.CROSS_KV_INT8),
    ],
)
def test_an_entry_of_another_contract_is_refused_by_the_field_that_differs(field: str, value: Any) -> None:
    assert open_entry(sealed(), contract(**{field: value}), SECRET) == field


@pytest.mark.parametrize(
    ("axis", "shape"),
    [
        ("layers", (3, 2, 3, 7, 4)),
        ("heads", (2, 2, 4, 7, 4)),
        ("tokens", (2, 2, 3, 8, 4)),
        ("width", (2, 2, 3, 7, 8)),
    ],
)
def test_an_entry_of_another_shape_is_refused_by_the_axis_that_differs(axis: str, shape: tuple[int, ...]) -> None:
    """With both numbers."""
    assert open_entry(sealed(), contract(shape=shape), SECRET) == axis
    mismatch = contract().mismatch(contract(shape=shape))
    assert mismatch is not None and mismatch.field == axis
    at = [one != other for one, other in zip(shape, SHAPE, strict=True)].index(True)
    assert (mismatch.got, mismatch.needed) == (str(SHAPE[at]), str(shape[at]))
    assert f"{axis} {SHAPE[at]}, needed {shape[at]}" == str(mismatch)


def test_an_entry_under_another_secret_is_refused() -> None:
    assert open_entry(sealed(), contract(), bytes(32)) == "tag"


def test_an_entry_whose_header_was_exchanged_for_another_good_one_is_refused() -> None:
    other = contract(key=key(grid=(6, 4)), grid=(6, 4))
    mixed = replace(sealed(), header=other.pack())
    assert open_entry(mixed, other, SECRET) == "tag"


@pytest.mark.parametrize("bytes_kept", [0, 1, 100, 1339])
def test_a_payload_cut_short_or_drawn_out_is_refused(bytes_kept: int) -> None:
    whole = bytes(sealed().payload)
    assert bytes_kept < len(whole)
    assert open_entry(replace(sealed(), payload=memoryview(whole[:bytes_kept])), contract(), SECRET) == "size"
    assert open_entry(replace(sealed(), payload=memoryview(whole + b"\0")), contract(), SECRET) == "size"


@steady
@given(st.data())
def test_an_entry_cut_or_drawn_out_anywhere_is_refused(data: st.DataObject) -> None:
    entry = sealed()
    parts = {"header": entry.header, "payload": bytes(entry.payload), "tag": entry.tag}
    part = data.draw(st.sampled_from(sorted(parts)))
    whole = parts[part]
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    longer = whole + data.draw(st.binary(min_size=1, max_size=200))
    middle = data.draw(st.integers(0, len(whole) - 1))
    for changed in (cut, longer, whole[:middle] + whole[middle + 1 :], whole[:middle] + b"\0" + whole[middle:]):
        made: dict[str, Any] = {part: memoryview(changed) if part == "payload" else changed}
        assert open_entry(replace(entry, **made), contract(), SECRET) in ("header", "size", "tag")


def test_an_entry_found_under_the_key_of_another_is_refused_although_every_sum_is_right() -> None:
    other = contract(key=key(pixels=[changed_pixel()]))
    assert open_entry(seal(other, payload(), SECRET), contract(), SECRET) == "key"


@pytest.mark.parametrize("part", ["header", "payload", "tag"])
def test_two_good_entries_of_one_tenant_with_a_part_exchanged_are_refused(part: str) -> None:
    """Both ways, as the one and as the other."""
    other = contract(key=key(pixels=[changed_pixel()]))
    one, two = sealed(), seal(other, payload() + 1, SECRET)
    for mixed in (replace(one, **{part: getattr(two, part)}), replace(two, **{part: getattr(one, part)})):
        assert isinstance(open_entry(mixed, contract(), SECRET), str)
        assert isinstance(open_entry(mixed, other, SECRET), str)


def test_an_entry_of_another_tenant_or_forged_by_who_knows_only_one_of_both_secrets_is_refused() -> None:
    alice, bob = (tenant_root(MASTER, name) for name in ("alice", "bob"))
    workers = bytes(range(1, 33))
    secret = tag_secret(workers, alice)
    assert isinstance(open_entry(seal(contract(), payload(), secret), contract(), secret), Tensor)
    forgeries = [tag_secret(workers, bob), tag_secret(bytes(32), alice), workers, alice, bytes(32)]
    for known in forgeries:
        assert open_entry(seal(contract(), payload(), known), contract(), secret) == "tag"


def test_an_entry_of_another_encoder_is_refused() -> None:
    for changed in (
        replace(IDENTITY, fingerprint="e" * 64),
        replace(IDENTITY, processor=b"{}"),
        replace(IDENTITY, dtype=torch.float16),
    ):
        other = contract(identity=changed.digest())
        assert open_entry(seal(other, payload(), SECRET), contract(), SECRET) == "identity"


@pytest.mark.parametrize("header", [b"", b"CHSE", bytes(HEADER_BYTES), b"\xff" * HEADER_BYTES, bytes(HEADER_BYTES + 1)])
def test_what_is_no_header_is_refused(header: bytes) -> None:
    assert Contract.unpack(header) is None
    assert open_entry(replace(sealed(), header=header), contract(), SECRET) == "header"


@steady
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_are_not_and_never_an_error(noise: bytes) -> None:
    known = contract().pack()
    for header in (noise, known[:8] + noise[8:], known[:80] + noise[80:]):
        found = Contract.unpack(header)
        assert found is None or found.pack() == header


@pytest.mark.parametrize("tag", [b"", bytes(TAG_BYTES), bytes(TAG_BYTES - 1)])
def test_a_tag_of_any_length_is_refused_and_not_an_error(tag: bytes) -> None:
    assert open_entry(replace(sealed(), tag=tag), contract(), SECRET) == "tag"


def test_an_opened_entry_outlives_whoever_held_it() -> None:
    entry = sealed()
    copied = replace(entry, payload=memoryview(bytearray(entry.payload)))
    opened = open_entry(copied, contract(), SECRET)
    assert isinstance(opened, Tensor)
    del entry, copied
    assert torch.equal(opened, payload())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_stands(dtype: torch.dtype, bad: float) -> None:
    extremes = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0], dtype=dtype)
    for size in (1, 3, 16, 31, 33, 1000, 70_001):
        payload = extremes.repeat(size // 3 + 1)[:size]
        assert finite(payload)
        for at in {0, size // 2, size - 1, min(size - 1, 17)}:
            spoiled = payload.clone()
            spoiled[at] = bad
            assert not finite(spoiled), (size, at)
