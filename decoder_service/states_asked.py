"""What is asked of a timeline that samples nothing, read strictly. What this release does not do is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from chiasm.errors import InvalidRequest, Unsupported
from chiasm.models.family import DecoderHalf
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb

TYPES: Final[dict[pb.Dtype.ValueType, torch.dtype]] = {
    pb.DTYPE_FLOAT32: torch.float32,
    pb.DTYPE_BFLOAT16: torch.bfloat16,
    pb.DTYPE_FLOAT16: torch.float16,
}
"""In which states are sent."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """The state of the last row, behind the last norm.

    Attributes:
        normalize: it is scaled to length 1.
        dtype: in which it is sent.
    """

    normalize: bool
    dtype: pb.Dtype.ValueType


@dataclass(frozen=True, slots=True)
class Layers:
    """The states of all rows after some layers, not normed.

    Attributes:
        numbers: of the layers, from 1, each once, in the order in which their states are sent.
        dtype: in which they are sent.
    """

    numbers: tuple[int, ...]
    dtype: pb.Dtype.ValueType

    def bytes_of(self, rows: int, width: int, computed: torch.dtype) -> int:
        """What the states of so many rows take: as they were computed, and as they are sent."""
        return len(self.numbers) * rows * width * (computed.itemsize + TYPES[self.dtype].itemsize)


def read_states(opened: dpb.DecodeOpen, half: DecoderHalf) -> Pooling | Layers | None:
    """What is asked of a timeline that samples nothing; None for one that samples.

    Where no type is said they are sent in the model's own, or in 32 bits where it has more.

    Raises InvalidRequest for states of a timeline that is sampled, for a timeline that is not and of which none are
    asked for, for layers that are not there, and for sampling options beside them; Unsupported for what is not built,
    OPERATION_UNSUPPORTED for what a half that is cut cannot give.
    """
    samples = opened.sample in (dpb.SAMPLE_MODE_WHEN_CLOSED, dpb.SAMPLE_MODE_WHILE_OPEN)
    if not half.headed and samples:
        raise _cut(half, "draws nothing")
    if opened.sample != dpb.SAMPLE_MODE_NEVER:
        if opened.HasField("states"):
            raise InvalidRequest(
                "SAMPLING_CONFLICT", "states are told of a timeline that samples nothing", facts={"field": "states"}
            )
        return None
    asked = opened.states
    if asked.pooling == dpb.POOLING_UNSPECIFIED:
        raise InvalidRequest("FIELD_MISSING", "what is told of the states is missing", facts={"field": "states"})
    if opened.HasField("sampling"):
        raise InvalidRequest(
            "SAMPLING_CONFLICT", "where nothing is sampled there is no sampling", facts={"field": "sampling"}
        )
    dtype = _dtype(asked.dtype, half.dtype)
    if asked.pooling == dpb.POOLING_LAST:
        if asked.layers:
            raise Unsupported(
                "FEATURE_DISABLED", "a vector after a chosen layer is not served", facts={"field": "layers"}
            )
        if not half.headed:
            raise _cut(half, "makes no vectors")
        return Pooling(asked.normalize, dtype)
    if asked.pooling != dpb.POOLING_NONE:
        raise Unsupported("FEATURE_DISABLED", f"pooling {asked.pooling} is not served", facts={"field": "pooling"})
    if asked.normalize:
        raise InvalidRequest("SAMPLING_CONFLICT", "states of tokens are told as they are", facts={"field": "normalize"})
    return Layers(_numbers(asked.layers, half.layers_total), dtype)


def _numbers(asked: object, depth: int) -> tuple[int, ...]:
    numbers: tuple[int, ...] = tuple(asked)  # type: ignore[arg-type]
    if not numbers:
        raise InvalidRequest("FIELD_MISSING", "no layer is named", facts={"field": "layers"})
    for number in numbers:
        if not 1 <= number <= depth:
            raise InvalidRequest.out_of_range("layers", number, f"1 to {depth}")
    if len(set(numbers)) < len(numbers):
        raise InvalidRequest.out_of_range("layers", len(numbers), "each layer once")
    return numbers


def _dtype(asked: pb.Dtype.ValueType, computed: torch.dtype) -> pb.Dtype.ValueType:
    if asked == pb.DTYPE_UNSPECIFIED:
        return next((code for code, one in TYPES.items() if one == computed), pb.DTYPE_FLOAT32)
    if asked not in TYPES:
        known = asked in pb.Dtype.values()
        shown = pb.Dtype.Name(asked).removeprefix("DTYPE_").lower() if known else f"dtype {asked}"
        raise Unsupported("FEATURE_DISABLED", f"states are not sent as {shown}", facts={"field": "dtype"})
    return asked


def _cut(half: DecoderHalf, what: str) -> Unsupported:
    return Unsupported("OPERATION_UNSUPPORTED", f"this decoder is cut after layer {half.layers_total} and {what}")
