"""Tensors in pieces: what was cut is put together again, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.tensor import Gathered, parts_of
from chiasm.rpc.v1 import common_pb2 as pb


def cut(size: int, *, shape: list[int] | None = None, tensor: int = 0) -> tuple[bytes, list[pb.TensorPart]]:
    """So many bytes of 16-bit numbers, and their pieces."""
    data = bytes(range(251)) * (size // 251) + bytes(size % 251)
    said = pb.TensorDescriptor(name="states", dtype=pb.DTYPE_BFLOAT16, shape=shape or [size // 2], layer=3)
    return data, [*parts_of(said, data, tensor=tensor)]


@pytest.mark.parametrize("size", [0, 2, CHUNK_BYTES - 2, CHUNK_BYTES, CHUNK_BYTES + 2, 3 * CHUNK_BYTES])
def test_what_is_cut_is_put_together_again(size: int) -> None:
    data, parts = cut(size, shape=[2, size // 4] if size % 4 == 0 else None, tensor=1)
    assert len(parts) == max(1, -(-size // CHUNK_BYTES)) and all(len(part.data) <= CHUNK_BYTES for part in parts)
    gathered = Gathered(1)
    for part in parts:
        assert not gathered.whole
        gathered.add(pb.TensorPart.FromString(part.SerializeToString()))
    assert gathered.whole and gathered.data == data
    assert (gathered.descriptor.byte_length, gathered.descriptor.layer) == (size, 3)


Damage = Callable[[list[pb.TensorPart]], object]


def flip(parts: list[pb.TensorPart]) -> None:
    parts[1].data = bytes([parts[1].data[0] ^ 1]) + parts[1].data[1:]


DAMAGES: dict[str, Damage] = {
    "a byte is another": flip,
    "a piece is missing": lambda parts: parts.pop(1),
    "a piece comes twice": lambda parts: parts.insert(1, parts[1]),
    "two change places": lambda parts: parts.reverse(),
    "the last is longer": lambda parts: setattr(parts[-1], "data", parts[-1].data + b"x"),
    "one is empty": lambda parts: parts.insert(1, pb.TensorPart(byte_offset=CHUNK_BYTES)),
    "it goes on behind its end": lambda parts: parts.append(parts[-1]),
    "it is another": lambda parts: setattr(parts[1], "tensor", 1),
    "it is not described": lambda parts: parts[0].ClearField("descriptor"),
    "it is described twice": lambda parts: parts[1].descriptor.CopyFrom(parts[0].descriptor),
    "its shape has other bytes": lambda parts: parts[0].descriptor.shape.append(2),
    "its type is unknown": lambda parts: setattr(parts[0].descriptor, "dtype", pb.DTYPE_UNSPECIFIED),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_what_was_sent_is_told(damage: str) -> None:
    _, parts = cut(2 * CHUNK_BYTES + 6)
    DAMAGES[damage](parts)
    gathered = Gathered()
    with pytest.raises(ValueError, match="tensor"):
        for part in parts:
            gathered.add(part)


def test_what_is_cut_short_is_not_whole() -> None:
    _, parts = cut(2 * CHUNK_BYTES + 6)
    gathered = Gathered()
    for part in parts[:-1]:
        gathered.add(part)
    assert not gathered.whole
