"""One answer, from its media to its last token: the only place where encoders and a decoder are brought together, and
with `router.encoding` the only place that decides to ask again.

One `Encode` per medium, one `Decode` for the timeline. Sizes are shared among the media, go is given once the decoder
has admitted them, entries are forwarded as they become ready, and nothing is told to the client before the decoder
has begun to answer, which it does only when every medium was decoded to its end. It touches messages, never tensors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final

from chiasm.errors import Cancelled, ChiasmError, ConnectionFailed, DeadlineExceeded, ServerError, Unavailable
from chiasm.rpc.times import to_duration, to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router import request as checked
from router.dispatch import Outbox
from router.encoding import LOST, PAUSE, Encoding
from router.fleet import DecoderWorker, Fleet, Served
from router.media import Source
from router.quarantine import Quarantine
from router.spread import Spread
from router.work import WHOLE, Work

_log = logging.getLogger(__name__)

INITIAL_CREDIT: Final = 64 << 20
"""Bytes of entries a medium may have pinned before any is attached; one unit always passes."""

DECODERS: Final = 4
"""Decoders that may be lost over one request before its first token: what ends two by itself is refused before that
(`router.quarantine`). After it nothing is tried again: tokens are out."""

ACCOUNT_SECONDS: Final = 5.0
"""How long a finished answer waits for the encoders' last words. They have nothing else left to do; no answer is lost
because an encoder is at that moment."""

AHEAD: Final = 64
"""Events that wait for a client. Then the decoder waits too."""


class Coordinator(Work):
    """Serves one checked `GenerateRequest`. Arguments are those of `Work`."""

    def __init__(
        self,
        request: rpb.GenerateRequest,
        sources: Sequence[Source],
        fleet: Fleet,
        model: Served,
        *,
        tenant_root: bytes,
        deadline: float | None = None,
        credit: int = INITIAL_CREDIT,
        spread: Spread = WHOLE,
        quarantine: Quarantine | None = None,
    ) -> None:
        items = checked.item_paths(request.prompt, len(request.media))
        super().__init__(
            fleet,
            model,
            request.media,
            sources,
            items,
            tenant_root=tenant_root,
            deadline=deadline,
            credit=credit,
            spread=spread,
            priority=request.priority,
            quarantine=quarantine,
        )
        self._request = request
        self._seed = checked.seed_of(request.sampling)
        self._events: asyncio.Queue[rpb.GenerateResponse | Exception | None] = asyncio.Queue(AHEAD)
        self._told: Outbox[dpb.DecodeRequest] = Outbox()
        self._attempt = 0
        self._losses = 0
        self._admitted = False
        self._began = False
        self._tokens = 0
        self._answered = False

    async def run(self) -> AsyncGenerator[rpb.GenerateResponse, None]:
        """The events of the answer. Closing it cancels every call of the request.

        Raises ChiasmError; DeadlineExceeded names the stage at which the time was up.
        """
        self.start(self._run_decoder)
        try:
            while (event := await self._next()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            await self.end()

    async def _next(self) -> rpb.GenerateResponse | Exception | None:
        try:
            async with asyncio.timeout(self.remaining):
                return await self._events.get()
        except TimeoutError:
            stage = self.stage
            raise DeadlineExceeded(f"the deadline passed while the request was at {stage}", stage=stage) from None

    async def failed(self, error: Exception) -> None:
        if not self._answered:
            await self._events.put(error)
        for medium in self.media:
            medium.accounted.set()  # nobody waits for what will not come

    @property
    def stage(self) -> str:
        """What the request waits for now, as `DeadlineExceeded.stage` names it."""
        early = self.early_stage
        if early is not None:
            return early
        if not self._admitted:
            return "queue"
        unannounced = [medium for medium in self.media if not medium.all_announced]
        if unannounced:
            return "encode" if all(medium.source.whole for medium in unannounced) else "fetch"
        return "decode" if self._began else "prefill"

    # -- the decoder's call ------------------------------------------------------------------------------------------

    async def _run_decoder(self) -> None:
        """Asks a decoder, and another one if the first is lost before its first token."""
        while True:
            first = self.decoder is None
            worker = await self.reach_decoder()
            self._attempt += 1
            self._trial = self.tried(worker, b"answer", *await self._computed())
            if await self._trial.begin():  # whoever was waited for may have ended the worker
                try:
                    await worker.calls.reach()
                except ConnectionFailed:
                    self._trial.end()
                    self.fleet.lost(worker)
                    continue
            self._told = self._timeline_so_far()
            for medium in self.media:
                for ready in [*medium.announced.values()]:
                    self.on_ready(medium, ready)
            if first:
                for medium in self.media:
                    self.start(medium.run)
            try:
                await self._decode(worker)
            except LOST as error:
                self.fleet.lost(worker)
                if error.reason == "DRAINING":  # it has not begun: that costs the request nothing but a moment
                    await asyncio.sleep(PAUSE)
                    continue
                self._losses += 1
                if not isinstance(error, Cancelled) and self._trial.lost():
                    raise self._trial.refused() from error
                if self._tokens or self._losses >= DECODERS:
                    raise Unavailable(
                        "DECODER_LOST",
                        f"the decoder was lost after {self._tokens} tokens",
                        retry_after=1.0,
                        facts={"tokens": self._tokens, "lost": self._losses},
                    ) from error
            else:
                await self._events.put(None)  # only now: the decoder has given back what the timeline held
                return
            finally:
                self._trial.end()

    async def _computed(self) -> list[bytes]:
        """What a decoder is given to compute, as far as it could be at fault."""
        request = self._request
        sampling = pb.SamplingParams()
        sampling.CopyFrom(request.sampling)
        sampling.ClearField("seed")
        media = [
            await medium.source.digest() or asked.handle.encode()
            for medium, asked in zip(self.media, request.media, strict=True)
        ]
        return [part.SerializeToString(deterministic=True) for part in (request.prompt, sampling)] + media

    async def _decode(self, worker: DecoderWorker) -> None:
        with worker.busy():
            calls = worker.calls.decode(self._told.messages(), timeout=self.allowance)
            async with aclosing(calls):
                # A worker that stands still is given up as long as another can take its place.
                async with aclosing(worker.attended(calls)) as early:
                    finished = await self._heard(early, until_token=True)
                if finished or await self._heard(calls):
                    await self._see_off(calls)
                    return
        raise ServerError("STREAM_BROKEN", "the decoder ended its stream before the answer was finished")

    async def _see_off(self, responses: AsyncIterator[dpb.DecodeResponse]) -> None:
        """Lets a decoder end its stream by itself: when it has, it has given back what the timeline held."""
        try:
            async with asyncio.timeout(ACCOUNT_SECONDS):
                async for _ in responses:
                    pass
        except (TimeoutError, ChiasmError):
            pass  # the answer is whole, and the call ends with this request

    async def _heard(self, responses: AsyncIterator[dpb.DecodeResponse], *, until_token: bool = False) -> bool:
        """Follows a decoder. Returns whether the answer is finished."""
        async for response in responses:
            await self._on(response)
            if response.HasField("finished") and response.finished.HasField("usage"):
                return True  # it was the last sequence
            if until_token and self._tokens:
                break
        return False

    def _timeline_so_far(self) -> Outbox[dpb.DecodeRequest]:
        """What a decoder is to be told of the timeline and that is known already, in an order that it takes."""
        told: Outbox[dpb.DecodeRequest] = Outbox()
        told.put(dpb.DecodeRequest(open=self._opened()))
        told.put(dpb.DecodeRequest(close=dpb.DecodeClose()))
        for medium in self.media:
            if medium.sized is not None:
                told.put(self._sized_at(medium))
        return told

    def _opened(self) -> dpb.DecodeOpen:
        request = self._request
        return dpb.DecodeOpen(
            request_id=self.id,
            attempt=self._attempt,
            model=self.model.name,
            fingerprint=self.model.fingerprint,
            tenant_root=self.root,
            prompt=request.prompt,
            slots=[dpb.Slot(slot=m.slot, kind=request.media[m.slot].kind, item=m.item) for m in self.media],
            sampling=request.sampling,
            seed=self._seed,
            sample=dpb.SAMPLE_MODE_WHEN_CLOSED,
            prompt_visibility=request.prompt_visibility,
            priority=request.priority,
        )

    async def _on(self, response: dpb.DecodeResponse) -> None:
        which = response.WhichOneof("message")
        if which == "admitted":
            self._admitted = True
            held: list[set[int]] = [set() for _ in self.media]
            for unit in response.admitted.held:
                held[unit.slot].add(unit.unit)
            for medium, units in zip(self.media, held, strict=True):
                medium.go(units)
        elif which == "attached":
            for unit in response.attached.units:
                self.media[unit.slot].attached(unit.unit)
        elif which == "missing":
            unit = response.missing.unit
            self.media[unit.slot].missing(unit.unit)
        elif which == "started":
            self._began = True
            await self._events.put(rpb.GenerateResponse(started=response.started))
        elif which == "tokens":
            if not self._tokens:
                self._trial.passed()
            self._tokens += len(response.tokens.ids)
            await self._events.put(rpb.GenerateResponse(tokens=response.tokens))
        elif which == "visible":
            await self._events.put(rpb.GenerateResponse(visible=response.visible))
        elif which == "finished":
            last = response.finished.HasField("usage")
            finished = await self._accounted(response.finished) if last else response.finished
            await self._events.put(rpb.GenerateResponse(finished=finished))

    async def _accounted(self, finished: pb.Finished) -> pb.Finished:
        """With what only the encoders know, and may not have said yet: a decoder is quick with a short answer."""
        self._answered = True
        try:
            async with asyncio.timeout(ACCOUNT_SECONDS):
                for medium in self.media:
                    await medium.accounted.wait()
        except TimeoutError:
            _log.warning("unaccounted", extra={"request_id": self._request.request_id})
        finished.usage.media.extend(m.usage for m in self.media if m.usage is not None)
        for name in ("fetch", "decode_media", "encode"):
            spent = sum(to_seconds(getattr(m.times, name)) for m in self.media)
            getattr(finished.times, name).CopyFrom(to_duration(spent))
        return finished

    # -- what the media tell -----------------------------------------------------------------------------------------

    def on_sized(self, encoding: Encoding) -> None:
        self._told.put(self._sized_at(encoding))

    def _sized_at(self, medium: Encoding) -> dpb.DecodeRequest:
        message = sized_at(medium)
        assert medium.sized_by is not None, "somebody has sized it"
        encoder, form = medium.sized_by
        if form != self.form_of(encoder):  # it was asked for another decoder: entries for this one have other keys
            for unit in message.sized.units:
                unit.ClearField("key")
        return message

    def on_ready(self, encoding: Encoding, ready: epb.EncodeReady) -> None:
        if self.takes(ready.entry.form):
            self._told.put(_ready_at(encoding, ready))
        else:  # it was made for a decoder that was lost; this one takes other forms
            encoding.missing(ready.unit)


def sized_at(medium: Encoding, *, final: bool = False) -> dpb.DecodeRequest:
    """Tells a decoder which units a medium becomes; as final if they are, or if nothing will come of them anyway."""
    sized = medium.sized
    assert sized is not None, "a medium is told about when it is sized"
    return dpb.DecodeRequest(
        sized=dpb.DecodeSized(slot=medium.slot, revision=sized.revision, final=sized.final or final, units=sized.units)
    )


def _ready_at(medium: Encoding, ready: epb.EncodeReady) -> dpb.DecodeRequest:
    return dpb.DecodeRequest(ready=dpb.DecodeReady(slot=medium.slot, unit=ready.unit, entry=ready.entry))
