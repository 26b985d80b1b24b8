"""The answer of a timeline that samples nothing: the states of all its rows after the layers that were asked for.

A tensor for each layer, in the order in which they were asked for. It knows no step and no store: states come to it as
they were gathered, or found.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from torch import Tensor, uint8

from chiasm.rpc.tensor import parts_of
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.seats import Outcome
from decoder_service.sequence import DecodeSequence
from decoder_service.states import Gathering
from decoder_service.states_asked import TYPES, Layers
from decoder_service.unsampled import Unsampled


class Layered(Unsampled):
    """Of one sequence, all of whose rows are computed here. It begins with its states, and ends once they were sent.

    Attributes:
        layers: ascending.
        states: (layers, rows, width), as they were computed, once they are there.
    """

    def __init__(self, opened: dpb.DecodeOpen, sequence: DecodeSequence, asked: Layers) -> None:
        super().__init__(opened, sequence)
        sequence.apart = True
        self.layers = tuple(sorted(asked.numbers))
        self.gathering = Gathering(self.layers)
        self.states: Tensor | None = None
        self._asked = asked

    def found(self, states: Tensor) -> None:
        """Begins with states that were computed before: nothing is computed of the sequence."""
        self.admit(0, queued=0.0)
        self._came()
        self._begin(len(self._sequence.timeline))
        self._spared = self._prompt_rows
        self.states = states

    def _tell_outcome(self, outcome: Outcome) -> None:
        assert isinstance(outcome, Gathering), "its rows' states are gathered"
        self.states = outcome.whole(len(self._sequence.timeline))

    async def parts(self) -> AsyncGenerator[dpb.DecodeResponse, None]:
        """The states in pieces. One layer at a time is made ready, in a thread: there may be very many numbers."""
        for tensor in range(len(self._asked.numbers)):
            for part in await asyncio.to_thread(self._sent, tensor):
                yield dpb.DecodeResponse(states=part)

    def finish(self) -> None:
        """All of them were sent."""
        self._end(pb.FINISH_REASON_CLOSED)

    def _sent(self, tensor: int) -> list[pb.TensorPart]:
        """Numbers that are too large for the type become infinite."""
        assert self.states is not None, "they are there"
        number, dtype = self._asked.numbers[tensor], self._asked.dtype
        layer = self.states[self.layers.index(number)].to(TYPES[dtype]).contiguous()
        described = pb.TensorDescriptor(name="states", layer=number, dtype=dtype, shape=layer.shape)
        return [*parts_of(described, layer.view(uint8).numpy().tobytes(), tensor=tensor)]
