"""An entry: what one unit became, under a key that says everything it depends on.

The key is a keyed BLAKE3 over tenant, model, processing, form, grid and resized pixels, at full width; no part of it
comes from the client. The tag is a keyed BLAKE3 over header and payload; whoever reads verifies it, and any doubt is
a miss. Nothing here knows where entries are kept, nor how numbers are quantised.

A payload is a tensor as its form has it (`chiasm.cache.form`), or the bytes of one in a quantised form, in one row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import NamedTuple

import blake3
import numpy as np
import torch
from torch import Tensor

from chiasm.cache.columns import Array
from chiasm.cache.form import Form
from chiasm.cache.framing import framed, u32
from chiasm.cache.quantised import SCHEMES, scales_of
from chiasm.cache.sealed import EntryKey, Sealed
from chiasm.cache.sealing import Floats, Sealing, nonfinite

FORMAT = 2
_MAGIC = b"CHSE"
_MOST_AXES = 5
_HEADER = struct.Struct(f"<4sHBBBB2x32s32s2I{_MOST_AXES}IQ")
_TYPES = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float64: 4,
    torch.int8: 5,
    torch.float8_e4m3fn: 6,
}
_FLOATS = {
    torch.float32: Floats(4, 0x7F80_0000),
    torch.bfloat16: Floats(2, 0x7F80),
    torch.float16: Floats(2, 0x7C00),
    torch.float64: Floats(8, 0x7FF0_0000_0000_0000),
}
_TYPE_OF = {code: dtype for dtype, code in _TYPES.items()}
_FORMS = frozenset(Form)


@dataclass(frozen=True, slots=True)
class Identity:
    """What all entries of one encoder have in common, whatever their form. Two encoders whose identity is equal make
    equal entries of a form; workers are paired by it.

    Attributes:
        fingerprint: of weights and configuration (`Checkpoint.fingerprint`).
        processor: everything about preprocessing that changes an entry (`Processor.describe`).
        dtype: in which entries are computed.
    """

    fingerprint: str
    processor: bytes
    dtype: torch.dtype

    def digest(self) -> bytes:
        """32 bytes."""
        return _digest(
            b"chiasm identity", [u32(FORMAT), self.fingerprint.encode(), self.processor, u32(_TYPES[self.dtype])]
        )


def stored_as(form: Form, dtype: torch.dtype) -> torch.dtype:
    """How the numbers of an entry are stored that was computed in a type."""
    return SCHEMES[form].dtype if form.quantised else dtype


def tag_secret(workers: bytes, root: bytes) -> bytes:
    """The secret under which a tenant's entries are tagged: 32 bytes, of the workers' common secret and the tenant's
    root. Who knows only one of the two can forge nothing."""
    derived = blake3.blake3(workers, derive_key_context="chiasm 2026 tags of entries")
    return derived.update(root).digest()


def unit_key(
    root: bytes,
    identity: bytes,
    grid: tuple[int, int],
    pixels: Sequence[Tensor],
    *,
    form: Form,
    dtype: torch.dtype,
) -> EntryKey:
    """The key of a unit: of its frames as they are encoded (uint8 RGB after resizing), its grid, its encoder and the
    form in which it is kept.

    Args:
        root: `tenant_root`.
        identity: `Identity.digest`.
        pixels: the unit's frames, uint8 (3, height, width) each; their sizes are part of the key.
        dtype: in which it is computed.
    """
    kept = [u32(form), u32(_TYPES[stored_as(form, dtype)])]
    digest = blake3.blake3(framed([b"chiasm unit", identity, *kept, u32(grid[0]), u32(grid[1])]), key=root)
    for frame in pixels:
        assert frame.dtype == torch.uint8 and frame.dim() == 3, (frame.dtype, frame.shape)
        digest.update(b"".join(u32(side) for side in frame.shape))
        digest.update(frame.contiguous().cpu().numpy().data.cast("B"))
    return digest.digest()


class Mismatch(NamedTuple):
    """A field in which an entry is not what is needed, and both values."""

    field: str
    got: str
    needed: str

    def __str__(self) -> str:
        return f"{self.field} {self.got}, needed {self.needed}"


@dataclass(frozen=True, slots=True)
class Contract:
    """What an entry is. An encoder writes it into the header, announces it, and a reader demands it field by field.

    Attributes:
        identity: `Identity.digest` of the encoder.
        dtype: in which the numbers were computed; how they are stored follows from the form.
        grid: patches of the unit.
        shape: as `form` has it.
    """

    key: EntryKey
    identity: bytes
    form: Form
    dtype: torch.dtype
    grid: tuple[int, int]
    shape: tuple[int, ...]

    @property
    def stored(self) -> torch.dtype:
        """How the numbers are stored."""
        return stored_as(self.form, self.dtype)

    @property
    def payload_bytes(self) -> int:
        return self.form.payload_bytes(self.shape, self.dtype.itemsize)

    @property
    def tokens(self) -> int:
        return self.form.tokens(self.shape)

    def mismatch(self, needed: Contract) -> Mismatch | None:
        """The first field in which this is not what is needed."""
        if self == needed:
            return None
        return next(Mismatch(name, ours, theirs) for name, ours, theirs in self._beside(needed) if ours != theirs)

    def _beside(self, other: Contract) -> Iterator[tuple[str, str, str]]:
        """Every field of two contracts, as it is told of them; what decides most comes first."""
        yield "form", self.form.label, other.form.label
        yield "dtype", _told(self.dtype), _told(other.dtype)
        yield "grid", _told(self.grid), _told(other.grid)
        if self.form.axes == other.form.axes:
            yield from zip(self.form.axes, map(str, self.shape), map(str, other.shape), strict=True)
        yield "identity", self.identity.hex(), other.identity.hex()
        yield "key", self.key.hex(), other.key.hex()

    def pack(self) -> bytes:
        """The header of an entry, `HEADER_BYTES` bytes."""
        return _HEADER.pack(
            _MAGIC,
            FORMAT,
            self.form,
            _TYPES[self.stored],
            _TYPES[self.dtype],
            len(self.shape),
            self.key,
            self.identity,
            *self.grid,
            *self.shape,
            *(0 for _ in range(_MOST_AXES - len(self.shape))),
            self.payload_bytes,
        )

    @classmethod
    def unpack(cls, header: bytes) -> Contract | None:
        """None for anything that is no header of this format, or that contradicts itself."""
        if len(header) != HEADER_BYTES:
            return None
        _, version, form, _, code, axes, key, identity, rows, columns, *shape, _ = _HEADER.unpack(header)
        if version != FORMAT or form not in _FORMS or code not in _TYPE_OF or axes != len(Form(form).axes):
            return None
        contract = cls(key, identity, Form(form), _TYPE_OF[code], (rows, columns), tuple(shape[:axes]))
        # Nothing may be written in two ways, nor anything that is not read.
        fits = contract.dtype.is_floating_point and contract.dtype.itemsize > 1 and contract.payload_bytes < 1 << 64
        return contract if fits and contract.pack() == header else None


def _told(value: torch.dtype | tuple[int, ...]) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return " x ".join(map(str, value))


HEADER_BYTES = _HEADER.size


def sealing(contract: Contract, payload: Tensor, secret: bytes) -> Sealing:
    """An entry for publication, which is checked and tagged while it is put.

    Args:
        payload: of the contract's shape and type; in a quantised form the bytes (`quantised.quantise`), in one row. Not
            written to from now on.

    Raises ServerError NONFINITE, now or when it is put, if the payload holds NaN or infinity: such an entry is never
    published.
    """
    assert _fits(contract, payload), (payload.shape, payload.dtype, contract)
    flat = payload.detach().contiguous().cpu().reshape(-1)
    if contract.form.quantised and not finite(scales_of(flat, contract.form, contract.shape)):
        raise nonfinite()
    return Sealing(contract.pack(), _bytes(flat).data, secret, _FLOATS.get(flat.dtype))


def seal(contract: Contract, payload: Tensor, secret: bytes) -> Sealed:
    """As `sealing`, tagged at once."""
    return sealing(contract, payload, secret).seal()


def finite(values: Tensor) -> bool:
    """Whether none is NaN or infinite."""
    return _FLOATS[values.dtype].finite(_bytes(values.reshape(-1)))


def _bytes(flat: Tensor) -> Array:
    made: Array = flat.view(torch.uint8).numpy()
    return made


def _fits(contract: Contract, payload: Tensor) -> bool:
    if contract.form.quantised:
        return payload.dtype == torch.uint8 and tuple(payload.shape) == (contract.payload_bytes,)
    return payload.dtype == contract.dtype and tuple(payload.shape) == contract.shape


def open_entry(sealed: Sealed, contract: Contract, secret: bytes) -> Tensor | str:
    """The payload over the stored bytes, as `seal` was given it, or the reason why it is not to be believed, in a word
    or two.

    The tensor shares the sealed memory and is not to be written.
    """
    found = Contract.unpack(sealed.header)
    if found is None:
        return "header"
    mismatch = found.mismatch(contract)
    if mismatch is not None:
        return mismatch.field
    if sealed.payload.nbytes != contract.payload_bytes:
        return "size"
    if not compare_digest(_tag(secret, sealed.header, sealed.payload), sealed.tag):
        return "tag"
    # Through numpy, because torch.frombuffer would not keep the buffer alive.
    flat = torch.from_numpy(np.frombuffer(sealed.payload, dtype=np.uint8))
    return flat if contract.form.quantised else flat.view(contract.dtype).view(contract.shape)


def _tag(secret: bytes, header: bytes, payload: memoryview) -> bytes:
    return blake3.blake3(header, key=secret).update(payload).digest()


def _digest(domain: bytes, parts: Sequence[bytes]) -> bytes:
    return blake3.blake3(framed([domain, *parts])).digest()
