"""One sequence of a call: admitted, attached, computed, told; and so again if it had to give way.

Whoever drives it calls `tell` and `advance` whenever it was woken. It reads no message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.ahead import ended
from decoder_service.attaching import Attaching
from decoder_service.entries import Entries
from decoder_service.model import DecoderModel
from decoder_service.reply import Reply
from decoder_service.sequence import DecodeSequence


class Branch:
    """One sequence.

    Args:
        answer: what its caller is told of it.
        wake: called when there is something to tell or to advance.
        ahead: tokens that may be drawn before the last ones were told.

    Attributes:
        changed: something was laid or announced, so that more may be computed.
    """

    def __init__(
        self,
        model: DecoderModel,
        opened: dpb.DecodeOpen,
        answer: Reply,
        sequence: DecodeSequence,
        entries: Entries,
        *,
        wake: Callable[[], None],
        ahead: int,
    ) -> None:
        self.sequence = sequence
        self.answer = answer
        self.seat = model.seat(
            sequence,
            answer.drawer or answer.gathering,
            wake=wake,
            tenant=opened.fairness_key.encode() or opened.tenant_root,
            priority=opened.priority,
            stops=self.answer.stops,
        )
        self.units = Attaching(model, self.seat, entries)
        self.changed = True
        self._model = model
        self._ahead = ahead
        self._live = opened.sample == dpb.SAMPLE_MODE_WHILE_OPEN
        self._grown = self._live  # it may be larger than when it began to wait
        self._room = 0  # tokens of the answer at most
        self._entered: float | None = None  # when it began to wait, by the monotonic clock
        self._allowed = 0  # tokens that it may still draw, as it was last told
        self._released = False

    def enter(self, room: int) -> None:
        """Lets it wait to be admitted, and then draw so many tokens at most."""
        self._room, self._entered = room, time.monotonic()
        self._model.enter(self.seat)

    @property
    def waits(self) -> bool:
        """For room."""
        return self.seat.need is not None

    @property
    def still(self) -> bool:
        """Nothing is computed of it and nothing waits to be told: it needs something from outside."""
        seat = self.seat
        return seat.admitted and not (seat.rows or seat.fresh or seat.preempted or self._model.scheduler.in_step(seat))

    def tell(self) -> list[dpb.DecodeResponse]:
        """What there is to tell since the last time. Raises what it failed with."""
        seat = self.seat
        if seat.fresh:
            tokens, seat.fresh = seat.fresh, []
            self.answer.tell(tokens)
            self._allowed -= len(tokens)
            if self.answer.finished:
                self._model.scheduler.withdraw(seat)
            elif seat.rows and self._allowed <= self._ahead // 2:
                self._allow()
                self._model.scheduler.allow(seat, self._allowed)
        if seat.error is not None and not self.answer.finished:
            raise seat.error
        return self.answer.responses()

    async def advance(self) -> list[dpb.DecodeResponse]:
        """Lets as much of it be computed as can be. Returns what there is to tell of its units.

        Raises ServerError ENTRY_MISSING for an entry that is not to be had.
        """
        seat = self.seat
        if seat.preempted and not self.answer.finished:
            self.units.lost()
            self._model.enter(seat)
            self._grown = self._live
        if not self._runs:
            return []
        if self._grown:  # while it waited
            await self._model.keep_within(seat, grow=True)
            self._grown = False
        if self._entered is not None:
            self.answer.admit(self._room, queued=time.monotonic() - self._entered)
            self._entered = None
        if not (self.changed or self.still):
            return []
        self.changed = False
        async with self._model.stepping.apart(seat):
            if told := self.tell():  # first of all: what comes next may fail
                self.changed = True
                seat.wake()
                return told
            if self.answer.resumes and self.answer.may_draw and self.sequence.laid_whole:
                await self.answer.resume()
                if told := self.answer.responses():
                    self.changed = True
                    seat.wake()
                    return told
            responses = await self.units.attach()
            if self._runs:
                self._want()
            return responses

    @property
    def _runs(self) -> bool:
        return self.seat.admitted and not self.answer.finished

    def _want(self) -> None:
        """The last row laid waits until it is known to be last."""
        sequence, laid = self.sequence, len(self.sequence.timeline)
        drawing = self.answer.may_draw and sequence.laid_whole and sequence.ready_rows == laid
        rows = min(sequence.ready_rows, laid if drawing else laid - 1) - sequence.computed
        if rows > 0:
            self._allow()
            self._model.want(self.seat, rows, draws=drawing, allowed=self._allowed)

    def _allow(self) -> None:
        self._allowed = min(self.answer.room, self._ahead)

    async def release(self) -> None:
        """Gives back everything it holds, whoever is cancelled meanwhile. May be called twice."""
        self.answer.finished = True
        if not self._released:
            self._released = True
            releasing = asyncio.create_task(self._model.release(self.seat))
            await ended(releasing)
            releasing.result()
