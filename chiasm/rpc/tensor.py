"""Tensors on the wire: cut into pieces behind a descriptor, and put together again, with everything checked that was
said of them. It knows bytes, and not what the numbers are for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from blake3 import blake3

from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.v1 import common_pb2 as pb

NUMBER_BYTES: Final[dict[int, int]] = {pb.DTYPE_FLOAT32: 4, pb.DTYPE_BFLOAT16: 2, pb.DTYPE_FLOAT16: 2}
"""Of one number, of each type in which tensors are sent."""


def parts_of(descriptor: pb.TensorDescriptor, data: bytes, *, tensor: int = 0) -> Iterator[pb.TensorPart]:
    """The pieces of a tensor, one at least.

    Args:
        descriptor: but for its `byte_length`, which is that of `data`.
        tensor: its number among those of a call.
    """
    described = pb.TensorDescriptor()
    described.CopyFrom(descriptor)
    described.byte_length = len(data)
    for at in range(0, max(len(data), 1), CHUNK_BYTES):
        piece = data[at : at + CHUNK_BYTES]
        yield pb.TensorPart(
            tensor=tensor,
            descriptor=None if at else described,
            byte_offset=at,
            data=piece,
            digest=blake3(data).digest() if at + len(piece) == len(data) else b"",
        )


class Gathered:
    """One tensor as its pieces come.

    Args:
        tensor: its number among those of a call.
        keep: its bytes are kept; else they are only looked at as they pass.

    Attributes:
        descriptor: what was said of it; empty before the first piece.
        size: bytes that have come.
        whole: all of it is here, and is what was said.
    """

    def __init__(self, tensor: int = 0, *, keep: bool = True) -> None:
        self.descriptor = pb.TensorDescriptor()
        self.size = 0
        self.whole = False
        self._tensor = tensor
        self._keep = keep
        self._hash = blake3()
        self.buffer = bytearray()

    @property
    def data(self) -> bytes:
        """Its bytes so far."""
        return bytes(self.buffer)

    def add(self, part: pb.TensorPart) -> None:
        """Takes the next piece. Raises ValueError for one that cannot come next, and for a tensor that is not what was
        said of it."""
        first = not self.size
        if self.whole or part.tensor != self._tensor or part.byte_offset != self.size:
            raise ValueError(
                f"byte {self.size} of tensor {self._tensor} was due, and {part.byte_offset} of {part.tensor} came"
            )
        if first != part.HasField("descriptor"):
            raise ValueError("a descriptor comes with the first piece of a tensor, and with no other")
        if first:
            self._describe(part.descriptor)
        if self._keep:
            self.buffer += part.data
        self._hash.update(part.data)
        self.size += len(part.data)
        if self.size > self.descriptor.byte_length or not (part.data or first):
            raise ValueError(f"a tensor of {self.descriptor.byte_length} bytes does not go on with {len(part.data)}")
        if self.size == self.descriptor.byte_length:
            if part.digest != self._hash.digest():
                raise ValueError("the bytes of a tensor are not those that were sent")
            self.whole = True

    def _describe(self, descriptor: pb.TensorDescriptor) -> None:
        number = NUMBER_BYTES.get(descriptor.dtype)
        if number is None or math.prod(descriptor.shape) * number != descriptor.byte_length:
            raise ValueError(
                f"a tensor of shape {[*descriptor.shape]} and dtype {descriptor.dtype} has not "
                f"{descriptor.byte_length} bytes"
            )
        self.descriptor.CopyFrom(descriptor)


class GatheredAll:
    """So many tensors, one after the other, as their pieces come.

    Args:
        keep: as `Gathered` has it.

    Attributes:
        tensors: those that have begun.
    """

    def __init__(self, count: int, *, keep: bool = True) -> None:
        self.tensors: list[Gathered] = []
        self._count = count
        self._keep = keep

    @property
    def whole(self) -> bool:
        """All of all of them is here."""
        return len(self.tensors) == self._count and (not self.tensors or self.tensors[-1].whole)

    def add(self, part: pb.TensorPart) -> None:
        """Takes the next piece. Raises ValueError as `Gathered.add` does, and for more tensors than were to come."""
        if not self.tensors or self.tensors[-1].whole:
            if len(self.tensors) == self._count:
                raise ValueError(f"{self._count} tensors were due, and more came")
            self.tensors.append(Gathered(len(self.tensors), keep=self._keep))
        self.tensors[-1].add(part)
