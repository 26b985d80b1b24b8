"""A fleet whose workers are real and whose calls are meddled with on their way: cut off, changed, refused."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

from chiasm.errors import Unavailable
from chiasm.local import LocalService
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.computing import INITIAL_CREDIT
from router.coordinator import Coordinator
from router.fleet import DecoderCalls, DecoderWorker, EncoderCalls, EncoderWorker, Served, Worker
from router.media import Inline
from router.spread import Spread
from router.work import WHOLE
from tests.asking import Answer, note

Meddle = Callable[[int, "epb.EncodeResponse | dpb.DecodeResponse"], "bool | Awaitable[None]"]
"""Told the number of the call, from 1, and a response. Changes it, ends the call by False, holds it up, or raises."""


def untouched(number: int, response: object) -> bool:
    return True


async def _goes_on(meddle: Meddle, number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
    meddled = meddle(number, response)
    if isinstance(meddled, bool):
        return meddled
    await meddled
    return True


class MeddledEncoder:
    """`EncoderCalls` through `meddle`.

    Attributes:
        dies_at_the_end: every call breaks when all was said and all is attached.
        chunks: pieces of media that were sent, by all calls.
    """

    def __init__(self, calls: EncoderCalls, meddle: Meddle) -> None:
        self.dies_at_the_end = False
        self._calls = calls
        self._meddle = meddle
        self.calls = 0
        self.opened: list[epb.EncodeOpen] = []
        self.goes: list[epb.EncodeGo] = []
        self.chunks = 0

    async def reach(self) -> None:
        """It is here."""

    async def encode(
        self,
        requests: AsyncIterator[epb.EncodeRequest],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncGenerator[epb.EncodeResponse, None]:
        self.calls += 1
        number = self.calls
        async with aclosing(self._calls.encode(self._noted(requests))) as responses:
            async for response in responses:
                if not await _goes_on(self._meddle, number, response):
                    return
                yield response
        if self.dies_at_the_end:
            raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")

    async def _noted(self, requests: AsyncIterator[epb.EncodeRequest]) -> AsyncIterator[epb.EncodeRequest]:
        async for request in requests:
            if request.HasField("open"):
                self.opened.append(request.open)
            self.chunks += request.HasField("chunk")
            if request.HasField("go"):
                self.goes.append(request.go)
            yield request


class MeddledDecoder:
    """`DecoderCalls` through `meddle`."""

    def __init__(self, calls: DecoderCalls, meddle: Meddle) -> None:
        self._calls = calls
        self._meddle = meddle
        self.calls = 0

    async def reach(self) -> None:
        """It is here."""

    async def decode(
        self,
        requests: AsyncIterator[dpb.DecodeRequest],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncGenerator[dpb.DecodeResponse, None]:
        self.calls += 1
        number = self.calls
        async with aclosing(self._calls.decode(requests)) as responses:
            async for response in responses:
                if not await _goes_on(self._meddle, number, response):
                    return
                yield response


class MeddledFleet:
    """`Fleet` of a service's two workers, each through a meddler.

    Args:
        others: meddlers of further encoders, by rank from 1; all of them are the service's one.

    Attributes:
        lost_workers: in the order in which they were lost.
        given: every worker in the order in which they were asked for, each a life of its own.
    """

    def __init__(
        self,
        service: LocalService,
        *,
        encoder: Meddle = untouched,
        decoder: Meddle = untouched,
        others: Sequence[Meddle] = (),
    ) -> None:
        self.inner = service.router.fleet
        self.served: Served = self.inner.models()[service.name]
        self._meddle_encoder = encoder
        self._meddle_decoder = decoder
        self._meddle_others = others
        self.encoders: MeddledEncoder | None = None
        self.others: dict[int, MeddledEncoder] = {}
        self.decoders: MeddledDecoder | None = None
        self.lost_workers: list[object] = []
        self.given: list[EncoderWorker | DecoderWorker] = []

    def models(self) -> Mapping[str, Served]:
        return self.inner.models()

    async def known(self) -> Mapping[str, Served]:
        return await self.inner.known()

    async def decoder(self, model: Served, *, keys: Sequence[bytes] = ()) -> DecoderWorker:
        worker = await self.inner.decoder(model, keys=keys)
        self.decoders = self.decoders or MeddledDecoder(worker.calls, self._meddle_decoder)
        given = Worker[DecoderCalls](worker.replica_id, self.decoders, forms=worker.forms)
        self.given.append(given)
        return given

    def count_encoders(self, model: Served, decoder: DecoderWorker) -> int:
        return 1 + len(self._meddle_others)

    async def encoder(self, model: Served, decoder: DecoderWorker, *, hint: bytes, rank: int = 0) -> EncoderWorker:
        worker = await self.inner.encoder(model, decoder, hint=hint)
        if rank:
            calls = self.others.setdefault(rank, MeddledEncoder(worker.calls, self._meddle_others[rank - 1]))
        else:
            calls = self.encoders = self.encoders or MeddledEncoder(worker.calls, self._meddle_encoder)
        given = Worker[EncoderCalls](worker.replica_id, calls, forms=worker.forms)
        self.given.append(given)
        return given

    def lost(self, worker: EncoderWorker | DecoderWorker) -> None:
        self.lost_workers.append(worker)


async def answer(
    fleet: MeddledFleet,
    request: rpb.GenerateRequest,
    *,
    deadline: float | None = None,
    credit: int = INITIAL_CREDIT,
    spread: Spread = WHOLE,
) -> Answer:
    """The whole answer, whichever attempt it came from."""
    got = Answer()
    sources = [Inline(medium) for medium in request.media]
    work = Coordinator(
        request,
        sources,
        fleet,
        fleet.served,
        tenant_root=bytes(32),
        deadline=deadline,
        credit=credit,
        spread=spread,
    )
    async with aclosing(work.run()) as events:
        async for event in events:
            note(got, event)
    return got
