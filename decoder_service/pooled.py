"""The answer of a timeline that samples nothing: its states, pooled to one vector.

What was asked for is read here, and what this release does not do is refused by name. It knows no step: a state comes
to it as one was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from chiasm.errors import InvalidRequest, Unsupported
from chiasm.rpc.tensor import parts_of
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.reply import Reply
from decoder_service.seats import Outcome
from decoder_service.sequence import DecodeSequence
from decoder_service.states import State

_TYPES: Final[dict[pb.Dtype.ValueType, torch.dtype]] = {
    pb.DTYPE_FLOAT32: torch.float32,
    pb.DTYPE_BFLOAT16: torch.bfloat16,
    pb.DTYPE_FLOAT16: torch.float16,
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is made of the state of the last row.

    Attributes:
        normalize: it is scaled to length 1.
        dtype: in which it is sent.
    """

    normalize: bool
    dtype: pb.Dtype.ValueType

    def vector(self, state: State) -> npt.NDArray[np.floating]:
        """(width,), of 32 bits at least."""
        numbers = state.numbers
        if not self.normalize:
            return numbers
        # In 64 bits the order of the sum is nothing that 32 bits could tell.
        length = np.sqrt(np.square(numbers, dtype=np.float64).sum())
        return (numbers / (length or 1.0)).astype(numbers.dtype)

    def sent(self, vector: npt.NDArray[np.floating]) -> list[pb.TensorPart]:
        """A vector on the wire. Numbers that are too large for the type become infinite."""
        cast = torch.from_numpy(vector).to(_TYPES[self.dtype])
        data: bytes = cast.view(torch.uint8).numpy().tobytes()
        return [*parts_of(pb.TensorDescriptor(name="embedding", dtype=self.dtype, shape=vector.shape), data)]


def read_pooling(opened: dpb.DecodeOpen, computed: torch.dtype) -> Pooling | None:
    """What is asked of a timeline that samples nothing; None for one that samples.

    Args:
        computed: the type of the model's numbers: they are sent in it where nothing else is said, or in 32 bits where
            it has more.

    Raises InvalidRequest for states of a timeline that is sampled, for a timeline that is not and of which none are
    asked for, and for sampling options beside them; Unsupported for what is not built.
    """
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
    if asked.pooling != dpb.POOLING_LAST:
        raise Unsupported("FEATURE_DISABLED", "the state of every token is not served", facts={"field": "pooling"})
    if asked.layers:
        raise Unsupported("FEATURE_DISABLED", "states after a chosen layer are not served", facts={"field": "layers"})
    dtype = asked.dtype
    if dtype == pb.DTYPE_UNSPECIFIED:
        dtype = next((code for code, one in _TYPES.items() if one == computed), pb.DTYPE_FLOAT32)
    if dtype not in _TYPES:
        raise Unsupported("FEATURE_DISABLED", f"states are not sent as {_name(dtype)}", facts={"field": "dtype"})
    return Pooling(asked.normalize, dtype)


def _name(dtype: pb.Dtype.ValueType) -> str:
    return pb.Dtype.Name(dtype).removeprefix("DTYPE_").lower() if dtype in pb.Dtype.values() else f"dtype {dtype}"


class Pooled(Reply):
    """One vector of one sequence, behind the last row of its prompt."""

    def __init__(self, opened: dpb.DecodeOpen, sequence: DecodeSequence, pooling: Pooling) -> None:
        super().__init__(opened, sequence)
        sequence.coming = 0
        self._pooling = pooling

    @property
    def may_draw(self) -> bool:
        return self._closed and not self.finished

    @property
    def room(self) -> int:
        return 1  # the state

    @property
    def told(self) -> int:
        return 0

    @property
    def resumes(self) -> bool:
        return False  # what was told elsewhere is told anew

    async def resume(self) -> None:
        """Nothing."""

    async def read_guide(self) -> None:
        """There is none."""

    def heard(self) -> None:
        """It listens to nobody."""

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        (state,) = outcomes
        assert isinstance(state, State), "its last row's is taken"
        self._came()
        self._begin(len(self._sequence.timeline))
        self._spared = min(self._sequence.spared, self._prompt_rows)
        for part in self._pooling.sent(self._pooling.vector(state)):
            self._tell(states=part)
        self._end(pb.FINISH_REASON_CLOSED)
