"""Announcing an entry and reading an announcement: `Entry` messages to contracts and places, and back."""

from __future__ import annotations

import torch

from chiasm.cache.entry import Contract
from chiasm.cache.form import Form
from chiasm.cache.place import Elsewhere, InArena, InMemory, InRedis, Place
from chiasm.cache.quantised import SCHEMES
from chiasm.errors import ServerError
from chiasm.rpc.v1 import common_pb2 as pb

_FORMS = {
    Form.CROSS_KV: pb.ENTRY_FORM_CROSS_KV,
    Form.STATES: pb.ENTRY_FORM_STATES,
    Form.CROSS_KV_INT8: pb.ENTRY_FORM_CROSS_KV_INT8,
    Form.CROSS_KV_FP8: pb.ENTRY_FORM_CROSS_KV_FP8,
}
_TYPES = {
    torch.float32: pb.DTYPE_FLOAT32,
    torch.bfloat16: pb.DTYPE_BFLOAT16,
    torch.float16: pb.DTYPE_FLOAT16,
    torch.float64: pb.DTYPE_FLOAT64,
    torch.int8: pb.DTYPE_INT8,
    torch.float8_e4m3fn: pb.DTYPE_FLOAT8_E4M3FN,
}
_FORM_OF = {code: form for form, code in _FORMS.items()}
_TYPE_OF = {code: dtype for dtype, code in _TYPES.items()}


def dtype_code(dtype: torch.dtype) -> pb.Dtype.ValueType:
    return _TYPES[dtype]


def form_code(form: Form) -> pb.EntryForm.ValueType:
    return _FORMS[form]


def form_of(code: pb.EntryForm.ValueType) -> Form | None:
    """None for a form that this build does not know."""
    return _FORM_OF.get(code)


def announce(contract: Contract, place: Place) -> pb.Entry:
    """All of an entry but for how long it is kept."""
    entry = pb.Entry(
        key=contract.key,
        fingerprint=contract.identity,
        form=_FORMS[contract.form],
        dtype=_TYPES[contract.stored],
        shape=contract.shape,
        byte_length=contract.payload_bytes,
        frame_boundaries=[contract.tokens],
        quantization=_quantization(contract),
        grid=pb.Grid(t=1, h=contract.grid[0], w=contract.grid[1]),
    )
    match place:
        case InMemory():
            entry.memory.SetInParent()
        case InArena(arena_id, byte_offset, generation):
            entry.arena.MergeFrom(pb.ArenaPlace(arena_id=arena_id, byte_offset=byte_offset, generation=generation))
        case InRedis(write_id, chunks):
            entry.redis.MergeFrom(pb.RedisPlace(write_id=write_id, chunk_count=chunks))
        case Elsewhere():
            pass
    return entry


def place_of(entry: pb.Entry) -> Place:
    """Where an announced entry lies. A kind of place that this build does not know is `Elsewhere`, and so a miss."""
    match entry.WhichOneof("place"):
        case "memory":
            return InMemory()
        case "arena":
            return InArena(entry.arena.arena_id, entry.arena.byte_offset, entry.arena.generation)
        case "redis":
            return InRedis(entry.redis.write_id, entry.redis.chunk_count)
        case _:
            return Elsewhere()


def read(entry: pb.Entry) -> Contract:
    """What an announcement promises.

    Raises ServerError ENTRY_CONTRACT for an announcement that is incomplete or contradicts itself.
    """
    if len(entry.key) != 32 or len(entry.fingerprint) != 32 or not entry.HasField("grid"):
        raise _broken("an announcement lacks key, fingerprint or grid")
    form = form_of(entry.form)
    dtype = _TYPE_OF.get(entry.quantization.computed_dtype if form is not None and form.quantised else entry.dtype)
    if form is None or dtype is None or not dtype.is_floating_point or dtype.itemsize == 1:
        raise _broken("an announcement is of a form or type this worker does not know")
    if len(entry.shape) != len(form.axes):
        raise _broken(f"an announcement has {len(entry.shape)} axes, {form.label} has {len(form.axes)}")
    grid = (entry.grid.h, entry.grid.w)
    contract = Contract(entry.key, entry.fingerprint, form, dtype, grid, tuple(entry.shape))
    if contract.payload_bytes != entry.byte_length or list(entry.frame_boundaries) != [contract.tokens]:
        raise _broken(f"an announcement promises {entry.byte_length} bytes, its shape {contract.payload_bytes}")
    if entry.dtype != _TYPES[contract.stored] or entry.quantization != (_quantization(contract) or pb.Quantization()):
        raise _broken(f"an announcement stores its numbers otherwise than {form.label} has them")
    return contract


def _quantization(contract: Contract) -> pb.Quantization | None:
    """How the numbers of an entry of a quantised form are to be read, and how far they are off."""
    if not contract.form.quantised:
        return None
    return pb.Quantization(
        scale_dtype=pb.DTYPE_FLOAT32,
        scale_shape=contract.form.scales(contract.shape),
        max_error=SCHEMES[contract.form].max_error,
        computed_dtype=_TYPES[contract.dtype],
    )


def _broken(message: str) -> ServerError:
    return ServerError("ENTRY_CONTRACT", message)
