"""Which workers there are, as a protocol. What a worker is reached by, a channel or a call in this process, is not
known here or above.

A fleet only chooses. It never sends a request again: what to do about a worker that was lost is the coordinator's.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from chiasm.errors import Unavailable
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.circuit import Circuit

Form: TypeAlias = pb.EntryForm.ValueType
"""Of entries, as the wire has it. Workers may speak of forms that this router has never heard of."""


class EncoderCalls(Protocol):
    """An encoder as its caller sees it."""

    async def reach(self) -> None:
        """Raises ConnectionFailed if the worker cannot be reached: nothing was then asked of it."""
        ...

    def encode(
        self, requests: AsyncIterator[epb.EncodeRequest], *, timeout: float | None = None
    ) -> AsyncGenerator[epb.EncodeResponse, None]:
        """One `Encode`. Closing the generator cancels the call. `timeout` in seconds bounds the whole of it."""
        ...


class DecoderCalls(Protocol):
    """A decoder as its caller sees it."""

    async def reach(self) -> None:
        """As of an encoder."""
        ...

    def decode(
        self, requests: AsyncIterator[dpb.DecodeRequest], *, timeout: float | None = None
    ) -> AsyncGenerator[dpb.DecodeResponse, None]:
        """One `Decode`. Closing the generator cancels the call. `timeout` in seconds bounds the whole of it."""
        ...


C = TypeVar("C")
R = TypeVar("R")


class Reach(NamedTuple):
    """The stores that a worker's entries pass through.

    Attributes:
        arena: names the memory of its node.
        shared: names the store it shares with other nodes. Empty: none.
    """

    arena: bytes = b""
    shared: bytes = b""

    def meets(self, other: Reach) -> bool:
        """Whether either can read what the other has put."""
        return self.arena == other.arena or (self.shared != b"" and self.shared == other.shared)


_HERE: Final = Reach()

MOST_REFUSED: Final = 5.0
"""Seconds after which a worker that refused a call may be given another, whatever it said."""


class Worker(Generic[C]):
    """One life of a worker process.

    Args:
        replica_id: names this life; a restarted process is another worker.
        calls: what it can be asked.
        reach: of its entries.
        forms: of entries that it makes or takes, for each model that it serves; what it would rather have comes first.
        text_fingerprints: of a decoder, for each model: what shapes tokens beside the entries.

    Attributes:
        running: calls of this router that it works on.
        load: what it said of itself last, running and waiting together, calls of other routers included.
        cost: of those, as it said last: patches at an encoder, tokens at a decoder.
        hints: the media that it makes entries of for this router, and how many calls each has.
        circuit: of the calls that it broke.
        silent: set when it no longer says who it is. A process that stands still keeps its connections.
    """

    def __init__(
        self,
        replica_id: bytes,
        calls: C,
        *,
        reach: Reach = _HERE,
        forms: Mapping[str, Sequence[Form]] | None = None,
        text_fingerprints: Mapping[str, bytes] | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.calls = calls
        self.reach = reach
        self.forms: Mapping[str, Sequence[Form]] = forms or {}
        self.text_fingerprints: Mapping[str, bytes] = text_fingerprints or {}
        self.running = 0
        self.load = 0
        self.cost = 0
        self.hints: Counter[bytes] = Counter()
        self.circuit = Circuit()
        self.silent = asyncio.Event()
        self._full_until = 0.0

    @asynccontextmanager
    async def heard_of(self) -> AsyncIterator[None]:
        """Bounds a block, in which a call to the worker is followed, by being heard of.

        Raises Unavailable WORKER_SILENT when the worker is not: it stands still, and its connection may not.
        """
        clock = asyncio.timeout(None)

        async def give_up() -> None:
            await self.silent.wait()
            clock.reschedule(asyncio.get_running_loop().time())

        try:
            async with clock:
                giving_up = asyncio.create_task(give_up())
                try:
                    yield
                finally:
                    giving_up.cancel()
        except TimeoutError:
            if not clock.expired():
                raise
            raise _stands_still() from None

    @property
    def busyness(self) -> int:
        """What this router knows for sure, or what the worker said, whichever is more."""
        return max(self.running, self.load)

    def hear(self, load: pb.Load) -> None:
        """It has said how busy it is."""
        self.load = load.running + load.waiting
        self.cost = load.queued_cost

    @property
    def full(self) -> bool:
        """It has refused a call and asked not to be given another yet."""
        return self.full_for > 0

    @property
    def full_for(self) -> float:
        """Seconds until it may be given another; 0 for one that is not full."""
        return max(self._full_until - time.monotonic(), 0.0)

    def refused(self, seconds: float) -> None:
        """It has refused a call, for so long. That is no fault: calls that it has go on."""
        self._full_until = time.monotonic() + min(seconds, MOST_REFUSED)

    @contextmanager
    def making(self, hint: bytes) -> Iterator[None]:
        """Notes a medium while the block runs."""
        self.hints[hint] += 1
        try:
            yield
        finally:
            self.hints[hint] -= 1
            if not self.hints[hint]:
                del self.hints[hint]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a call while the block runs, and one that ended well behind it."""
        self.running += 1
        try:
            yield
            self.circuit.passed()
        finally:
            self.running -= 1


def _stands_still() -> Unavailable:
    return Unavailable("WORKER_SILENT", "a worker stands still", retry_after=1.0)


EncoderWorker = Worker[EncoderCalls]
DecoderWorker = Worker[DecoderCalls]


def speaks_as(decoder: DecoderWorker, model: Served) -> bool:
    """Whether a decoder may go on with what was begun as `model` says."""
    return model.text_fingerprint in (b"", decoder.text_fingerprints.get(model.name, b""))


def does(said: dpb.DecoderModel, operation: rpb.Operation.ValueType, after: int = 0) -> bool:
    """Whether a decoder serves that by what it says of itself. One that names no mode draws answers, and one that names
    no pooling makes vectors: earlier releases said no more.

    Args:
        after: the last layer after which states are asked for.
    """
    states = dpb.SAMPLE_MODE_NEVER in said.modes
    if operation == rpb.OPERATION_GENERATE:
        return not said.modes or dpb.SAMPLE_MODE_WHEN_CLOSED in said.modes
    if operation == rpb.OPERATION_EMBED:
        return states and (not said.poolings or dpb.POOLING_LAST in said.poolings)
    if operation == rpb.OPERATION_CONDITION:
        return states and dpb.POOLING_NONE in said.poolings and after <= said.layers
    return True


def common_form(encoder: EncoderWorker, decoder: DecoderWorker, model: str) -> Form | None:
    """The form in which a pair hands over entries of a model: the first of the decoder's that the encoder makes. None
    if there is none."""
    made = encoder.forms.get(model, ())
    return next((form for form in decoder.forms.get(model, ()) if form in made), None)


@dataclass(frozen=True, slots=True)
class Served:
    """A model as its workers describe it.

    Attributes:
        fingerprint: of what shapes entries. Encoders and decoders of equal fingerprint fit.
        context_limit: tokens of prompt and answer together.
        layers: of its decoder.
        ready: whether an encoder and a decoder that fit could take a request now.
        text_fingerprint: of what shapes tokens beside the entries, where an answer has begun and only a decoder of an
            equal one may go on with it. Empty: any may.
        generates, embeds, conditions: whether there are decoders that draw answers, make vectors, tell states after
            layers.
        asked: what a decoder must do to be chosen. Unspecified: nothing.
        after: the last layer after which states are asked for.
    """

    name: str
    fingerprint: bytes
    family: str
    context_limit: int
    layers: int
    ready: bool = True
    text_fingerprint: bytes = b""
    generates: bool = True
    embeds: bool = True
    conditions: bool = True
    asked: rpb.Operation.ValueType = rpb.OPERATION_UNSPECIFIED
    after: int = 0


class Fleet(Protocol):
    """The workers that can take a request."""

    def models(self) -> Mapping[str, Served]:
        """Every model that has been served by a fitting pair, by name."""
        ...

    async def known(self) -> Mapping[str, Served]:
        """As `models`. Waits a while for a first one, if nobody has answered yet.

        Raises Unavailable NOT_READY, with a time to try again.
        """
        ...

    async def decoder(self, model: Served, *, keys: Sequence[bytes] = ()) -> DecoderWorker:
        """A decoder for one timeline, of the model's text fingerprint if it names one, that does what is `asked`.
        Waits a while for one, if there is none at the moment.

        Args:
            keys: what it has in common with others (`choice.affinity_keys`): the one that had those last is preferred.

        Raises Unavailable NO_READY_DECODER, or NO_READY_ENCODER where only that is missing, with a time to try again;
        MODEL_REPLACED, at once, if only others of the name are left and the model names no text fingerprint.
        """
        ...

    def count_encoders(self, model: Served, decoder: DecoderWorker) -> int:
        """How many encoders there are now whose entries `decoder` can read, on its own node if there are any."""
        ...

    async def encoder(self, model: Served, decoder: DecoderWorker, *, hint: bytes, rank: int = 0) -> EncoderWorker:
        """An encoder whose entries `decoder` can read, where they lie and in a form it takes (`common_form`), on its
        own node if there is any. Waits as `decoder` does.

        Args:
            hint: equal ones prefer the same encoder, as long as it has not much more to do than others.
            rank: 0 for the one they prefer, 1 for the next, and so on, around.

        Raises Unavailable NO_READY_ENCODER, with a time to try again.
        """
        ...

    def lost(self, worker: EncoderWorker | DecoderWorker) -> None:
        """A call to that worker broke: it is not chosen again before it has answered."""
        ...
