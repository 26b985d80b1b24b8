"""What every request with media does, whatever is asked about them: calls that end with it, one deadline, and its
media at encoders whose entries one decoder can read.

It knows no answer. What becomes of sizes and entries is for the request that stands on it.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

from chiasm.errors import ConnectionFailed, Overloaded, StatusError
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.encoding import PAUSE, Encoding
from router.fleet import DecoderWorker, EncoderWorker, Fleet, Served, common_form
from router.media import Source
from router.quarantine import Quarantine, Trial, name
from router.spread import Spread

SLACK: Final = 1.0
"""Seconds that a worker's deadline lies behind the request's own, which names the stage and must be heard first."""

WHOLE: Final = Spread()


class Work(ABC):
    """One request on its way.

    Args:
        asked: the media as the client described them, by slot.
        sources: where the bytes of each come from.
        items: the path of each in the client's request.
        deadline: by `time.monotonic`; None for none.
        credit: bytes of entries each call may have pinned before any is attached.
        spread: how a medium may be shared out.
        priority: of the request among those of its tenant; higher goes first.
        tenant: for whom it is, by whom workers share themselves out.
        keys: what its timeline has in common with others, as `Fleet.decoder` takes them.
        quarantine: of the router; by default one of its own.
    """

    def __init__(
        self,
        fleet: Fleet,
        model: Served,
        asked: Sequence[pb.Media],
        sources: Sequence[Source],
        items: Sequence[str],
        *,
        tenant_root: bytes,
        deadline: float | None,
        credit: int,
        spread: Spread = WHOLE,
        priority: int = 0,
        tenant: str = "",
        keys: Sequence[bytes] = (),
        quarantine: Quarantine | None = None,
    ) -> None:
        self.fleet = fleet
        self.quarantine = quarantine or Quarantine()
        self.model = model
        self.root = tenant_root
        self.id = secrets.token_bytes(16)
        self.decoder: DecoderWorker | None = None
        self.media = [Encoding(self, slot, items[slot], source) for slot, source in enumerate(sources)]
        self._asked = asked
        self._deadline = deadline
        self._credit = credit
        self._spread = spread
        self._priority = priority
        self.tenant = tenant
        self._keys = keys
        self._refusal: Overloaded | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- time and tasks ----------------------------------------------------------------------------------------------

    @property
    def remaining(self) -> float | None:
        """Seconds to the deadline."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    @property
    def allowance(self) -> float | None:
        """Seconds that a worker is given."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0) + SLACK

    @property
    def early_stage(self) -> str | None:
        """What the request waits for before all its media are known, as `DeadlineExceeded.stage` names it."""
        if self.decoder is None or any(medium.waiting for medium in self.media):
            return "queue"
        unknown = [medium for medium in self.media if medium.probe is None]
        if not unknown:
            return None
        return "decode_media" if all(medium.source.whole for medium in unknown) else "fetch"

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Runs a part of the request. What goes wrong in it ends all of it, through `failed`."""
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        return task

    def halt(self) -> None:
        """Cancels every call that still runs but for the part that this is called from."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def end(self) -> None:
        """Cancels every call that still runs and returns when all of them have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @abstractmethod
    async def failed(self, error: Exception) -> None:
        """A part of the request went wrong."""

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:
            await self.failed(self._with_item(error))

    def _with_item(self, error: Exception) -> Exception:
        """Names the medium at fault as the client knows it: a worker that found a sibling at fault knows its place
        only."""
        if isinstance(error, StatusError) and error.item is not None and error.item.startswith("media["):
            slot = error.item.removeprefix("media[").removesuffix("]")
            if slot.isdecimal() and int(slot) < len(self.media):
                error.item = self.media[int(slot)].item
        return error

    # -- workers -----------------------------------------------------------------------------------------------------

    async def reach_decoder(self) -> DecoderWorker:
        """A decoder that can be reached now. From here on encoders are chosen for it."""
        while True:
            worker = await self.fleet.decoder(self.model, keys=self._keys)
            if await self._waits_for(worker):
                continue
            try:
                await worker.calls.reach()
            except ConnectionFailed:
                self.fleet.lost(worker)
            else:
                self.decoder = worker
                return worker

    @property
    def spread(self) -> Spread:
        """How a medium may be shared out among the encoders there are."""
        assert self.decoder is not None, "encoders are chosen for a decoder"
        there = self.fleet.count_encoders(self.model, self.decoder)
        return replace(self._spread, encoders=min(there, self._spread.encoders))

    def takes(self, form: pb.EntryForm.ValueType) -> bool:
        """Whether the decoder attaches entries of a form, as far as it has told."""
        told = None if self.decoder is None else self.decoder.forms.get(self.model.name)
        return told is None or form in told

    def form_of(self, worker: EncoderWorker, encoding: Encoding) -> pb.EntryForm.ValueType:
        """In which an encoder is asked for entries of a medium now: as before, where that can be, because a unit is one
        entry to a decoder; another decoder may rather have another form, and takes this one too."""
        assert self.decoder is not None, "encoders are asked for a decoder"
        if encoding.sized_by is not None:
            before = encoding.sized_by[1]
            if before in worker.forms.get(self.model.name, ()) and self.takes(before):
                return before
        form = common_form(worker, self.decoder, self.model.name)
        return pb.ENTRY_FORM_UNSPECIFIED if form is None else form

    async def encoder(self, encoding: Encoding, rank: int) -> EncoderWorker:
        hint = await encoding.source.hint()
        encoding.waiting = True
        try:
            while True:
                assert self.decoder is not None, "encoders are chosen for a decoder"
                worker = await self.fleet.encoder(self.model, self.decoder, hint=hint, rank=rank)
                if await self._waits_for(worker):
                    continue
                try:
                    await worker.calls.reach()
                except ConnectionFailed:
                    self.fleet.lost(worker)
                else:
                    return worker
        finally:
            encoding.waiting = False

    def lost(self, worker: EncoderWorker) -> None:
        self.fleet.lost(worker)

    def turned_away(self, worker: EncoderWorker | DecoderWorker, refusal: Overloaded) -> bool:
        """A worker refused a call before it began. Returns whether another may be asked: a request asks one other, so
        that refusals cost a busy fleet little; one that is patient asks until its time is up."""
        worker.refused(max(refusal.retry_after or 0.0, PAUSE))
        first, self._refusal = self._refusal is None, refusal
        return first or (self.patient and refusal.retryable)

    @property
    def patient(self) -> bool:
        """Whether it waits for workers that are full, and does not pass their refusals on."""
        return False

    async def _waits_for(self, worker: EncoderWorker | DecoderWorker) -> bool:
        """Whether it has waited because all that is left to ask is full. Raises the refusal that the request was given
        if it is not patient."""
        if self._refusal is None or not worker.full:
            return False
        if not self.patient:
            raise self._refusal
        await asyncio.sleep(worker.full_for * random.uniform(1.0, 1.5))  # those who wait do not come back together
        return True

    async def trial(self, encoding: Encoding, worker: EncoderWorker) -> Trial:
        source = encoding.source
        digest = await source.digest()
        # What still comes is known by its beginning, and only to others that still come.
        said = (b"medium", digest) if digest is not None else (b"begun", await source.hint())
        return self.tried(worker, *said, item=encoding.item)

    async def still_there(self, worker: EncoderWorker | DecoderWorker) -> bool:
        """Whether a worker that was chosen a while ago can be reached; it is lost if not."""
        try:
            await worker.calls.reach()
        except ConnectionFailed:
            self.fleet.lost(worker)
            return False
        return True

    def tried(self, worker: EncoderWorker | DecoderWorker, *said: bytes, item: str | None = None) -> Trial:
        """The trial on a worker of what `said` names. Raises InvalidRequest POISON_INPUT for what ends workers."""
        subject = name(self.root, *said)
        self.quarantine.check(subject, item)
        return self.quarantine.trial(subject, worker.calls, item)

    # -- media -------------------------------------------------------------------------------------------------------

    async def open(self, encoding: Encoding, attempt: int, worker: EncoderWorker) -> epb.EncodeOpen:
        assert self.decoder is not None, "encoders are asked for a decoder"
        source = encoding.source
        media, digest = pb.MediaHeader(), await source.digest()
        media.CopyFrom(source.header)
        if digest is not None:
            media.byte_length = source.size
        return epb.EncodeOpen(
            request_id=self.id,
            attempt=attempt,
            slot=encoding.slot,
            item=encoding.item,
            model=self.model.name,
            fingerprint=self.model.fingerprint,
            tenant_root=self.root,
            media=media,
            sampling=self._asked[encoding.slot].sampling,
            file_digest=digest,
            initial_credit=self._credit,
            priority=self._priority,
            fairness_key=self.tenant,
            reader_arena_id=self.decoder.reach.arena,
            form=self.form_of(worker, encoding),
        )

    def on_probed(self, encoding: Encoding) -> None:
        if all(medium.probe is not None for medium in self.media):
            siblings = [
                epb.Sibling(slot=m.slot, probe=m.probe, sampling=self._asked[m.slot].sampling) for m in self.media
            ]
            for medium in self.media:
                medium.siblings(epb.EncodeSiblings(siblings=siblings))

    @abstractmethod
    def on_sized(self, encoding: Encoding) -> None:
        """The units that a medium becomes have their sizes."""

    @abstractmethod
    def on_ready(self, encoding: Encoding, ready: epb.EncodeReady) -> None:
        """Entries of a medium can be read."""
