"""An entry: what one unit became, under a key that says everything it depends on.

The key is a keyed BLAKE3 over tenant, model, processing, form, grid and resized pixels, at full width; no part of it
comes from the client. The tag is a keyed BLAKE3 over header and payload; whoever reads verifies it, and any doubt is
a miss. Nothing here knows where entries are kept.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hmac import compare_digest

import blake3
import numpy as np
import torch
from torch import Tensor

from chiasm.cache.form import Form
from chiasm.cache.framing import framed, u32
from chiasm.cache.sealed import EntryKey, Sealed
from chiasm.errors import ServerError

FORMAT = 1
_MAGIC = b"CHSE"
_HEADER = struct.Struct("<4sHBB32s32s2I5IQ")
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
_TYPE_OF = {code: dtype for dtype, code in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class Identity:
    """What all entries of one encoder have in common. Two encoders whose identity is equal make equal entries.

    Attributes:
        fingerprint: of weights and configuration (`Checkpoint.fingerprint`).
        processor: everything about preprocessing that changes an entry (`Processor.describe`).
    """

    fingerprint: str
    processor: bytes
    form: Form
    dtype: torch.dtype

    def digest(self) -> bytes:
        """32 bytes."""
        return _digest(
            b"chiasm identity",
            [u32(FORMAT), self.fingerprint.encode(), self.processor, u32(self.form), u32(_TYPES[self.dtype])],
        )


def tag_secret(workers: bytes, root: bytes) -> bytes:
    """The secret under which a tenant's entries are tagged: 32 bytes, of the workers' common secret and the tenant's
    root. Who knows only one of the two can forge nothing."""
    derived = blake3.blake3(workers, derive_key_context="chiasm 2026 tags of entries")
    return derived.update(root).digest()


def unit_key(root: bytes, identity: bytes, grid: tuple[int, int], pixels: Sequence[Tensor]) -> EntryKey:
    """The key of a unit: of its frames as they are encoded (uint8 RGB after resizing), its grid and its encoder.

    Args:
        root: `tenant_root`.
        identity: `Identity.digest`.
        pixels: the unit's frames, uint8 (3, height, width) each; their sizes are part of the key.
    """
    digest = blake3.blake3(framed([b"chiasm unit", identity, u32(grid[0]), u32(grid[1])]), key=root)
    for frame in pixels:
        assert frame.dtype == torch.uint8 and frame.dim() == 3, (frame.dtype, frame.shape)
        digest.update(b"".join(u32(side) for side in frame.shape))
        digest.update(frame.contiguous().cpu().numpy().data.cast("B"))
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Contract:
    """What an entry is. An encoder writes it into the header, announces it, and a reader demands it field by field.

    Attributes:
        identity: `Identity.digest` of the encoder.
        grid: patches of the unit.
        shape: (layers, K|V, heads, tokens, dim).
    """

    key: EntryKey
    identity: bytes
    form: Form
    dtype: torch.dtype
    grid: tuple[int, int]
    shape: tuple[int, int, int, int, int]

    @property
    def payload_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pack(self) -> bytes:
        """The header of an entry, `HEADER_BYTES` bytes."""
        return _HEADER.pack(
            _MAGIC,
            FORMAT,
            self.form,
            _TYPES[self.dtype],
            self.key,
            self.identity,
            *self.grid,
            *self.shape,
            self.payload_bytes,
        )

    @classmethod
    def unpack(cls, header: bytes) -> Contract | None:
        """None for anything that is no header of this format, or that contradicts itself."""
        if len(header) != HEADER_BYTES:
            return None
        magic, version, form, code, key, identity, rows, columns, *shape, size = _HEADER.unpack(header)
        if magic != _MAGIC or version != FORMAT or form not in set(Form) or code not in _TYPE_OF:
            return None
        a, b, c, d, e = shape
        contract = cls(key, identity, Form(form), _TYPE_OF[code], (rows, columns), (a, b, c, d, e))
        return contract if contract.payload_bytes == size else None


HEADER_BYTES = _HEADER.size

_PIECE = 1 << 20
"""Bytes that are looked at and digested together, so that they come from memory once."""


def seal(contract: Contract, payload: Tensor, secret: bytes) -> Sealed:
    """Tags an entry for publication.

    Raises ServerError NONFINITE if the payload holds NaN or infinity: such an entry is never published.
    """
    assert tuple(payload.shape) == contract.shape and payload.dtype == contract.dtype, (payload.shape, contract)
    flat = payload.detach().contiguous().cpu().reshape(-1)
    packed = contract.pack()
    digest = blake3.blake3(packed, key=secret)
    for piece in flat.split(_PIECE // flat.itemsize):
        if not _finite(piece):
            raise ServerError("NONFINITE", "the encoder produced a value that is not finite")
        digest.update(piece.view(torch.uint8).numpy().data)
    return Sealed(packed, flat.view(torch.uint8).numpy().data, digest.digest())


def open_entry(sealed: Sealed, contract: Contract, secret: bytes) -> Tensor | str:
    """The payload as a tensor over the stored bytes, or the reason why it is not to be believed, in a word or two.

    The tensor shares the sealed memory and is not to be written.
    """
    found = Contract.unpack(sealed.header)
    if found is None:
        return "header"
    for field in fields(Contract):
        if getattr(found, field.name) != getattr(contract, field.name):
            return field.name
    if sealed.payload.nbytes != contract.payload_bytes:
        return "size"
    if not compare_digest(_tag(secret, sealed.header, sealed.payload), sealed.tag):
        return "tag"
    # Through numpy, because torch.frombuffer would not keep the buffer alive.
    flat = torch.from_numpy(np.frombuffer(sealed.payload, dtype=np.uint8))
    return flat.view(contract.dtype).view(contract.shape)


def _finite(values: Tensor) -> bool:
    """Whether none is NaN or infinite. To ask `torch.isfinite` of each would take ten times as long as the digest.

    Whatever is not finite makes a sum so. The other way round does not hold where large values are summed; then the
    least and the greatest are looked at, which takes twice as long.
    """
    return math.isfinite(values.sum().item()) or all(math.isfinite(end.item()) for end in torch.aminmax(values))


def _tag(secret: bytes, header: bytes, payload: memoryview) -> bytes:
    return blake3.blake3(header, key=secret).update(payload).digest()


def _digest(domain: bytes, parts: Sequence[bytes]) -> bytes:
    return blake3.blake3(framed([domain, *parts])).digest()
