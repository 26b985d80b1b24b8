"""A request whose timeline a decoder computes, whatever is asked about it: the only place where encoders and a decoder
are brought together, and with `router.encoding` the only place that decides to ask again.

One `Encode` per medium, one `Decode` for the timeline. Sizes are shared among the media, go is given once the decoder
has admitted them, and entries are forwarded as they become ready. A decoder that is lost is replaced: the next one is
told the timeline as it is known, in an attempt of its own (`router.attempt`). The request never changes. It touches
messages, never tensors.

What a decoder answers, and what of it the client is told, is for those who stand on it: tokens (`router.coordinator`),
a vector (`router.embedding`), or states (`router.conditioning`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

from chiasm.errors import Cancelled, ChiasmError, DeadlineExceeded, Overloaded, StatusError, Unavailable
from chiasm.rpc.times import to_duration, to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router import request as checked
from router.answer import OutOfStep
from router.attempt import LAST_WORDS, Attempt
from router.choice import affinity_keys
from router.encoding import LOST, PAUSE, Encoding
from router.fleet import DecoderWorker, Fleet, Served
from router.laying import ready_at, sized_at
from router.media import Source
from router.quarantine import Quarantine, Trial
from router.spread import Spread
from router.window import PATIENCE, Window
from router.work import WHOLE, Work

_log = logging.getLogger(__name__)

INITIAL_CREDIT: Final = 64 << 20
"""Bytes of entries a medium may have pinned before any is attached; one unit always passes."""

DECODERS: Final = 4
"""Decoders that may be lost over one request without having drawn a token of it: what ends two by itself is refused
before that (`router.quarantine`)."""

ATTEMPTS: Final = 8
"""Decoders that may be lost over one request in all. Its client may go on with it, later or elsewhere."""

E = TypeVar("E", bound=Message)


class Computing(Work, Generic[E]):
    """One request, whose client is told events E. Arguments are those of `Work`, and

    Args:
        patience: seconds that a client is given to read.
        priority: of the request among those of its tenant; higher goes first.
    """

    _trial: Trial

    def __init__(
        self,
        request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest,
        sources: Sequence[Source],
        fleet: Fleet,
        model: Served,
        *,
        tenant_root: bytes,
        deadline: float | None = None,
        credit: int = INITIAL_CREDIT,
        spread: Spread = WHOLE,
        patience: float = PATIENCE,
        priority: int = 0,
        tenant: str = "",
        quarantine: Quarantine | None = None,
    ) -> None:
        super().__init__(
            fleet,
            model,
            request.media,
            sources,
            checked.item_paths(request.prompt, len(request.media)),
            tenant_root=tenant_root,
            deadline=deadline,
            credit=credit,
            spread=spread,
            priority=priority,
            tenant=tenant,
            keys=affinity_keys(request, tenant_root),
            quarantine=quarantine,
        )
        self._label = request.request_id
        self._window: Window[E] = Window(patience=patience)
        self._attempt: Attempt | None = None
        self._number = 0  # of the last attempt
        self._losses = 0
        self._barren = 0  # of those: without a token
        self._answered = False
        self._stale = 0

    # -- what is asked, and what is told -----------------------------------------------------------------------------

    @abstractmethod
    def _opened(self) -> dpb.DecodeOpen:
        """How the next attempt begins, but for what is the same whatever is asked."""

    @abstractmethod
    async def _computed(self) -> list[bytes]:
        """What a decoder is given to compute, as far as that could be what ends it."""

    @abstractmethod
    async def _on(self, response: dpb.DecodeResponse) -> bool:
        """Takes a response of the running attempt, and gives those about the timeline to `_on_timeline`. Returns
        whether the answer is complete. Raises OutOfStep for what cannot come now."""

    @abstractmethod
    async def _tell_end(self) -> None:
        """Tells the client what is left of a complete answer."""

    @property
    def begun(self) -> bool:
        """Its client was told that the answer begins."""
        return False

    @property
    def tokens(self) -> int:
        """How many its client has."""
        return 0

    @property
    def seams(self) -> dict[str, int]:
        """What happened to the stream that its client did not see, by name: `stale` (messages that were not told)."""
        return {"stale": self._stale} if self._stale else {}

    async def run(self) -> AsyncGenerator[E, None]:
        """The events of the answer. Closing it cancels every call of the request.

        Raises ChiasmError; DeadlineExceeded names the stage at which the time was up.
        """
        self.start(self._run_decoders)
        if self.remaining is not None:
            self.start(self._watch_clock)
        try:
            while (event := await self._window.get()) is not None:
                yield event
        finally:
            await self.end()

    async def _watch_clock(self) -> None:
        """One clock for the whole request: one for each event costs more than the event."""
        await asyncio.sleep(max(self.remaining or 0.0, 0.0))
        stage = self.stage
        error = DeadlineExceeded(f"the deadline passed while the request was at {stage}", stage=stage)
        self._window.end(error, at_once=True)

    async def failed(self, error: Exception) -> None:
        unread = getattr(error, "reason", "") == "SLOW_CONSUMER"
        if unread or not self._answered:
            self._window.end(error, at_once=unread)
            self.halt()  # a client that does not read may not come back for its error
        for medium in self.media:
            medium.accounted.set()  # nobody waits for what will not come

    @property
    def stage(self) -> str:
        """What the request waits for now, as `DeadlineExceeded.stage` names it."""
        early = self.early_stage
        if early is not None:
            return early
        attempt = self._attempt
        if attempt is None or attempt.over or not attempt.admitted:
            return "queue"
        unannounced = [medium for medium in self.media if not medium.all_announced]
        if unannounced:
            return "encode" if all(medium.source.whole for medium in unannounced) else "fetch"
        return "decode" if attempt.began else "prefill"

    # -- decoders, one after the other -------------------------------------------------------------------------------

    async def _run_decoders(self) -> None:
        """Asks a decoder, and another one whenever one is lost."""
        started = False
        while True:
            worker = await self._choose_decoder()
            self._trial = self.tried(worker, *await self._computed())
            if await self._trial.begin() and not await self.still_there(worker):
                self._trial.end()  # whoever was waited for has ended it
                continue
            attempt = self._begin(worker)
            if not started:
                started = True
                for medium in self.media:
                    self.start(medium.run)
            try:
                await attempt.run(self._on, self._tell_end, timeout=self.allowance)
            except Overloaded as error:
                if attempt.admitted or not self.turned_away(worker, error):
                    raise
            except (*LOST, OutOfStep) as error:
                self.fleet.lost(worker)
                if getattr(error, "reason", "") == "DRAINING" and not attempt.heard:
                    await asyncio.sleep(PAUSE)  # it has not begun: that costs the request nothing but a moment
                    continue
                if not isinstance(error, Cancelled) and self._trial.lost():
                    raise self._trial.refused() from error
                self._count_loss(attempt, error)
            except StatusError as error:
                if error.reason == "NOT_RESUMABLE":
                    error.code = "ABORTED"
                raise
            else:
                self._window.end()  # only now: the decoder has given back what the timeline held
                return
            finally:
                self._trial.end()
                attempt.over = True
                self._stale += attempt.stale

    async def _choose_decoder(self) -> DecoderWorker:
        """One that can be reached."""
        return await self.reach_decoder()

    def _begin(self, worker: DecoderWorker) -> Attempt:
        """A new attempt, which is told all that is known of the timeline, in an order that a decoder takes."""
        self._number += 1
        attempt = self._attempt = Attempt(self._number, worker)
        open_ = self._opened()
        open_.request_id, open_.tenant_root, open_.attempt = self.id, self.root, attempt.number
        open_.model, open_.fingerprint, open_.fairness_key = self.model.name, self.model.fingerprint, self.tenant
        attempt.told.put(dpb.DecodeRequest(open=open_))
        attempt.told.put(dpb.DecodeRequest(close=dpb.DecodeClose()))
        for medium in self.media:
            if medium.sized is not None:
                attempt.told.put(self._sized_at(medium))
        for medium in self.media:
            for ready in [*medium.announced.values()]:
                self.on_ready(medium, ready)
        return attempt

    def _count_loss(self, attempt: Attempt, error: Exception) -> None:
        """Raises Unavailable DECODER_LOST if that was one too many. What the client has stays good."""
        self._losses += 1
        self._barren += not attempt.tokens
        told = self.tokens
        _log.warning(
            "decoder lost",
            extra={
                "request": self.id.hex(),
                "attempt": attempt.number,
                "tokens": told,
                "reason": error.reason if isinstance(error, ChiasmError) else "OUT_OF_STEP",
            },
        )
        if self._barren >= DECODERS or self._losses >= ATTEMPTS:
            raise Unavailable(
                "DECODER_LOST",
                f"{self._losses} decoders were lost over this request, the last one after {told} tokens",
                retry_after=1.0,
                facts={"tokens": told, "lost": self._losses},
            ) from error

    # -- what a decoder tells ----------------------------------------------------------------------------------------

    def _on_timeline(self, response: dpb.DecodeResponse) -> None:
        """Takes what a decoder tells of the timeline: that it has room, which units it has, and which it lacks."""
        attempt, which = self._attempt, response.WhichOneof("message")
        assert attempt is not None, "a decoder answers an attempt"
        if which == "admitted":
            attempt.admitted = True
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

    async def _accounted(self, finished: pb.Finished) -> pb.Finished:
        """With what only the encoders know, and may not have said yet: a decoder is quick with a short answer. No
        answer is lost because an encoder is at that moment."""
        self._answered = True
        try:
            async with asyncio.timeout(LAST_WORDS):
                for medium in self.media:
                    await medium.accounted.wait()
        except TimeoutError:
            _log.warning("unaccounted", extra={"request_id": self._label})
        finished.usage.media.extend(m.usage for m in self.media if m.usage is not None)
        for name in ("fetch", "decode_media", "encode"):
            spent = sum(to_seconds(getattr(m.times, name)) for m in self.media)
            getattr(finished.times, name).CopyFrom(to_duration(spent))
        return finished

    # -- what the media tell -----------------------------------------------------------------------------------------

    def on_sized(self, encoding: Encoding) -> None:
        if self._attempt is not None:
            self._attempt.told.put(self._sized_at(encoding))

    def _sized_at(self, medium: Encoding) -> dpb.DecodeRequest:
        message = sized_at(medium)
        assert medium.sized_by is not None, "somebody has sized it"
        encoder, form = medium.sized_by
        if form != self.form_of(
            encoder, medium
        ):  # it was asked for another decoder: entries for this one have other keys
            for unit in message.sized.units:
                unit.ClearField("key")
        return message

    def on_ready(self, encoding: Encoding, ready: epb.EncodeReady) -> None:
        assert self._attempt is not None, "entries are asked for by a decoder"
        if self.takes(ready.entry.form):
            self._attempt.told.put(ready_at(encoding, ready))
        else:  # it was made for a decoder that was lost; this one takes other forms
            encoding.missing(ready.unit)
