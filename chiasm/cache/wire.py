"""Announcing an entry and reading an announcement: `Entry` messages to contracts and places, and back."""

from __future__ import annotations

import torch

from chiasm.cache.entry import Contract
from chiasm.cache.form import Form
from chiasm.cache.place import Elsewhere, InArena, InMemory, InRedis, Place
from chiasm.errors import ServerError
from chiasm.rpc.v1 import common_pb2 as pb

_FORMS = {Form.CROSS_KV: pb.ENTRY_FORM_CROSS_KV}
_TYPES = {
    torch.float32: pb.DTYPE_FLOAT32,
    torch.bfloat16: pb.DTYPE_BFLOAT16,
    torch.float16: pb.DTYPE_FLOAT16,
    torch.float64: pb.DTYPE_FLOAT64,
}
_FORM_OF = {code: form for form, code in _FORMS.items()}
_TYPE_OF = {code: dtype for dtype, code in _TYPES.items()}


def dtype_code(dtype: torch.dtype) -> pb.Dtype.ValueType:
    return _TYPES[dtype]


def form_code(form: Form) -> pb.EntryForm.ValueType:
    return _FORMS[form]


def announce(contract: Contract, place: Place) -> pb.Entry:
    """All of an entry but for how long it is kept."""
    tokens = contract.shape[3]
    entry = pb.Entry(
        key=contract.key,
        fingerprint=contract.identity,
        form=_FORMS[contract.form],
        dtype=_TYPES[contract.dtype],
        shape=contract.shape,
        byte_length=contract.payload_bytes,
        frame_boundaries=[tokens],
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


def read(entry: pb.Entry, grid: tuple[int, int]) -> Contract:
    """What an announcement promises, for a unit that was sized with that grid.

    Raises ServerError ENTRY_CONTRACT for an announcement that is incomplete or contradicts itself.
    """
    if len(entry.key) != 32 or len(entry.fingerprint) != 32 or len(entry.shape) != 5:
        raise _broken("an announcement lacks key, fingerprint or shape")
    if entry.form not in _FORM_OF or entry.dtype not in _TYPE_OF:
        raise _broken("an announcement is of a form or type this worker does not know")
    a, b, c, d, e = entry.shape
    contract = Contract(
        entry.key, entry.fingerprint, _FORM_OF[entry.form], _TYPE_OF[entry.dtype], grid, (a, b, c, d, e)
    )
    if contract.payload_bytes != entry.byte_length or list(entry.frame_boundaries) != [d]:
        raise _broken(f"an announcement promises {entry.byte_length} bytes, its shape {contract.payload_bytes}")
    return contract


def _broken(message: str) -> ServerError:
    return ServerError("ENTRY_CONTRACT", message)
