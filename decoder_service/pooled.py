"""The answer of a timeline that samples nothing: the state of its last row as one vector.

It knows no step: a state comes to it as one was taken.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from chiasm.rpc.tensor import parts_of
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.seats import Outcome
from decoder_service.sequence import DecodeSequence
from decoder_service.states import State
from decoder_service.states_asked import TYPES, Pooling
from decoder_service.unsampled import Unsampled


class Pooled(Unsampled):
    """One vector of one sequence, behind the last row of its prompt."""

    def __init__(self, opened: dpb.DecodeOpen, sequence: DecodeSequence, pooling: Pooling) -> None:
        super().__init__(opened, sequence)
        self._pooling = pooling

    def _tell_outcome(self, outcome: Outcome) -> None:
        assert isinstance(outcome, State), "its last row's is taken"
        for part in self._sent(self._vector(outcome)):
            self._tell(states=part)
        self._end(pb.FINISH_REASON_CLOSED)

    def _vector(self, state: State) -> npt.NDArray[np.floating]:
        """(width,), of 32 bits at least."""
        numbers = state.numbers
        if not self._pooling.normalize:
            return numbers
        # In 64 bits the order of the sum is nothing that 32 bits could tell.
        length = np.sqrt(np.square(numbers, dtype=np.float64).sum())
        return (numbers / (length or 1.0)).astype(numbers.dtype)

    def _sent(self, vector: npt.NDArray[np.floating]) -> list[pb.TensorPart]:
        """A vector on the wire. Numbers that are too large for the type become infinite."""
        dtype = self._pooling.dtype
        cast = torch.from_numpy(vector).to(TYPES[dtype])
        data: bytes = cast.view(torch.uint8).numpy().tobytes()
        return [*parts_of(pb.TensorDescriptor(name="embedding", dtype=dtype, shape=vector.shape), data)]
