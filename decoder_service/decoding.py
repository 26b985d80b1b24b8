"""The life of one `Decode` call: messages in, a timeline computed as far as it can be, tokens out.

One coroutine does it all in turn: take what has come, attach what can be attached, compute what is ready, draw what
may be drawn, wait. So nothing here needs a lock, and leaving it at any point frees everything.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from functools import partial
from typing import TypeAlias

from chiasm.chat_template import Piece, Slot
from chiasm.errors import InvalidRequest
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service import convert
from decoder_service.ahead import ahead, ended
from decoder_service.answer import Answer
from decoder_service.attaching import Attaching
from decoder_service.fitting import Medium, Needs, PromptParts, check_text, context_exceeded
from decoder_service.model import DecoderModel
from decoder_service.sequence import Drop

UNREAD = 64
"""Responses that a caller may leave unread before its sequence waits for it. Between two tokens nobody then waits for a
socket, so those who run together stay together, and a slow reader holds up nobody but itself."""

Inbox: TypeAlias = deque[dpb.DecodeRequest | Exception | None]
"""Messages in the order in which they came, and at the end None or what broke."""


class Decoding:
    """One timeline. `run` yields what the caller is told."""

    def __init__(self, model: DecoderModel, opened: dpb.DecodeOpen) -> None:
        self._model = model
        self._open = opened
        self._live = opened.sample == dpb.SAMPLE_MODE_WHILE_OPEN
        self._estimate = opened.sample == dpb.SAMPLE_MODE_ESTIMATE
        self._kinds = {slot.slot: slot.kind for slot in opened.slots}
        self._items = {slot.slot: slot.item for slot in opened.slots}
        self._sequence = model.sequence(opened.tenant_root)
        self._answer = Answer(model, opened, self._sequence)
        self._entries = Attaching(model, self._sequence, root=opened.tenant_root, item_of=self._items.get)
        self._prompt = convert.ReadPrompt([], {})
        self._laying: dict[int, int] = {}  # events that are not laid yet, and their pieces
        self._event = 0  # the last one that came
        self._closed = False
        self._ended = False  # the caller's side
        self._admitted = False
        self._changed = False  # something came that may have made a unit attachable

    def run(self, requests: AsyncIterator[dpb.DecodeRequest]) -> AsyncGenerator[dpb.DecodeResponse, None]:
        """What the caller is told, in order, ahead of it by at most `UNREAD` responses. Leaving it frees everything.

        Raises InvalidRequest, Overloaded and ServerError, as the reasons of `chiasm.errors` have it.
        """
        return ahead(self._run(requests), items=UNREAD)

    async def _run(self, requests: AsyncIterator[dpb.DecodeRequest]) -> AsyncGenerator[dpb.DecodeResponse, None]:
        await self._read_prompt()
        inbox: Inbox = deque()
        arrived = asyncio.Event()
        reader = asyncio.create_task(_read(requests, inbox, arrived))
        try:
            while True:
                # What was drawn is told before anything that came meanwhile is answered: the timeline has that order.
                for response in self._answer.responses():
                    yield response
                if self._answer.finished:
                    return
                arrived.clear()
                if inbox:
                    for response in await self._take(inbox.popleft()):
                        yield response
                    continue
                if self._estimate and self._all_sized():
                    yield await self._told_estimate()
                    return
                if not self._admitted and self._all_sized():
                    yield await self._admit()
                if self._admitted and self._changed:
                    self._changed = False
                    for response in await self._entries.attach():
                        yield response
                if not (self._admitted and await self._compute()):
                    if self._ended and not inbox:
                        raise InvalidRequest("UPLOAD_PROTOCOL", "the caller ended before every unit was handed over")
                    await arrived.wait()  # nothing to do until something comes
        finally:
            giving_back = asyncio.create_task(self._give_back(reader, inbox))
            await ended(giving_back)
            giving_back.result()

    async def _read_prompt(self) -> None:
        """Compiles the guide, reads and lays the prompt, in threads: it may take seconds, and everybody else's stream
        would stand still."""
        model, prompt = self._model, self._open.prompt
        await self._answer.read_guide()
        size = convert.text_bytes(prompt)
        self._prompt = await model.tokenise(size, convert.read_prompt, prompt, model.prompt, model.vocabulary)
        convert.check_slots(self._prompt.pieces, self._open.slots)
        if not self._estimate:
            check_text(self._prompt.pieces, model.context_limit)
            await asyncio.to_thread(self._sequence.extend, self._prompt.pieces)

    async def _give_back(self, reader: asyncio.Task[None], inbox: Inbox) -> None:
        """Frees everything the timeline holds, the pins of entries that nobody read any more too."""
        reader.cancel()
        try:
            await self._model.release(self._sequence)
        finally:
            await asyncio.wait([reader])
            messages = [message for message in inbox if isinstance(message, dpb.DecodeRequest)]
            await self._entries.close(message.ready.entry for message in messages if message.HasField("ready"))

    # -- what comes in ---------------------------------------------------------------------------------------------

    async def _take(self, message: dpb.DecodeRequest | Exception | None) -> list[dpb.DecodeResponse]:
        if isinstance(message, Exception):
            raise message
        if message is None:
            if not self._closed:
                raise _protocol("the caller ended before the timeline was closed")
            self._ended = True
            return []
        self._changed = True
        which = message.WhichOneof("message")
        if which == "sized":
            await self._size(message.sized)
        elif which == "ready" and not self._estimate:
            self._entries.announce(message.ready)
        elif which == "append" and self._live and not self._closed:
            await self._append(message.append)
        elif which == "drop" and self._live and not self._closed:
            self._lay_event(message.drop.event, Drop(message.drop.first_visible))
        elif which == "close" and not self._closed:
            self._closed = True
            self._answer.close()
        else:
            raise _protocol(f"{which or 'an empty message'} is not expected here")
        return self._laid()

    async def _size(self, sized: dpb.DecodeSized) -> None:
        """Lays a slot, or lays it anew, and takes back whatever no longer fits what is laid."""
        if sized.slot not in self._kinds:
            raise InvalidRequest("PLACEHOLDER_MISMATCH", f"slot {sized.slot} is not in the prompt")
        try:
            written = self._prompt.written.get(sized.slot)
            slot = convert.sized_slot(sized, self._kinds[sized.slot], self._model.prompt, written)
            self._sequence.size(sized.slot, slot)
        except InvalidRequest as error:
            raise error.at(self._items[sized.slot]) from None
        except ValueError as error:
            raise _protocol(str(error)) from None
        await self._entries.resized(sized)
        await self._check_room()

    async def _check_room(self) -> None:
        """Once admitted a timeline stays within what was reserved for it; only a live one may reserve more."""
        timeline, model = self._sequence.timeline, self._model
        if not self._admitted:
            return
        used = max(timeline.counter, len(timeline)) + (1 if self._live else self._answer.room)
        if used > model.context_limit:
            raise context_exceeded(f"the timeline needs {used} positions", needed=used, limit=model.context_limit)
        await model.keep_within(
            self._sequence,
            text=len(timeline) + (0 if self._live else self._answer.room),
            visual=timeline.vision_tokens,
            grow=self._live,
        )

    async def _append(self, append: dpb.DecodeAppend) -> None:
        if append.HasField("at_index"):
            raise _protocol("at_index is for timelines that are resumed")
        for slot in append.slots:
            if slot.slot in self._kinds:
                raise _protocol(f"slot {slot.slot} is named already")
            self._kinds[slot.slot], self._items[slot.slot] = slot.kind, slot.item
        which = append.WhichOneof("content")
        if which == "turn":
            turn = convert.read_turn(append.turn, f"append[{append.event}]")
            text = "".join(part for part in turn.parts if isinstance(part, str))
            if turn.role != "user" or len(turn.parts) != 1 or not text:
                raise InvalidRequest("MESSAGE_ORDER", "a live timeline takes user turns of text")
            ids = await self._model.tokenise(convert.bounded_bytes(text), self._model.prompt.spliced, text)
            check_text([ids], self._model.context_limit)
            self._lay_event(append.event, ids)
        elif which == "slot" and [slot.slot for slot in append.slots] == [append.slot]:
            self._lay_event(append.event, Slot(append.slot))
        else:
            raise InvalidRequest("PLACEHOLDER_MISMATCH", "what is appended names no turn and no slot of its own")
        self._answer.heard()
        await self._check_room()

    def _lay_event(self, event: int, piece: Piece | Drop) -> None:
        if event <= self._event:
            raise _protocol(f"event {event} came after event {self._event}")
        self._event = event
        try:
            self._laying[event] = self._sequence.extend([piece])
        except ValueError as error:
            raise _protocol(str(error)) from None

    def _laid(self) -> list[dpb.DecodeResponse]:
        """Answers to events that have a place by now which cannot move any more."""
        places = {event: self._sequence.row_of(piece) for event, piece in self._laying.items()}
        settled = {event: row for event, row in places.items() if row is not None}
        for event in settled:
            del self._laying[event]
        return [dpb.DecodeResponse(laid=pb.Laid(event=event, at_index=row)) for event, row in settled.items()]

    # -- admission, attaching, computing ---------------------------------------------------------------------------

    def _all_sized(self) -> bool:
        return all(self._sequence.sized(slot.slot) is not None for slot in self._open.slots)

    async def _admit(self) -> dpb.DecodeResponse:
        """Waits for room in both pools for all of the prompt and the longest answer; refuses what can never fit."""
        model, timeline = self._model, self._sequence.timeline
        needs = Needs(len(timeline), timeline.counter, timeline.vision_tokens)
        asked = self._answer.asked
        if needs.context + (asked or 1) > model.context_limit:
            raise await asyncio.to_thread(self._parts().too_long, model.limits, asked)
        # What no pool can ever hold is refused by `reserve`, which knows the numbers.
        room = model.limits.room(needs, asked) or asked or 1
        began = time.monotonic()
        text = model.context_limit if self._live else needs.rows + room
        await model.reserve(self._sequence, text=text, visual=needs.visual)
        self._answer.admit(room, queued=time.monotonic() - began)
        self._admitted = True
        held = [pb.UnitRef(slot=name.slot, unit=name.unit) for name in self._sequence.attached_units()]
        return _admitted(needs, room, model.context_limit, held=held)

    async def _told_estimate(self) -> dpb.DecodeResponse:
        """What the prompt needs, how much room it leaves, and what would make it fit if it leaves none."""
        parts, limits, asked = self._parts(), self._model.limits, self._answer.asked
        needs = await asyncio.to_thread(parts.needs)
        room = limits.room(needs, asked)
        fits_with = "" if room else await asyncio.to_thread(parts.fits_with, limits, asked)
        return _admitted(needs, room, limits.context, fits_with)

    def _parts(self) -> PromptParts:
        """The prompt with its media as they were sized."""
        media = {}
        for slot in self._open.slots:
            sized = self._sequence.sized(slot.slot)
            assert sized is not None, "it is asked once every slot is sized"
            thinned = slot.kind == pb.MEDIA_KIND_VIDEO and slot.slot not in self._prompt.written
            media[slot.slot] = Medium(sized, partial(self._model.prompt.medium, "video") if thinned else None)
        return PromptParts(self._prompt.pieces, media, self._model.engine.processor.unit_layout)

    async def _compute(self) -> bool:
        """Takes part in one step, if any row can be computed or token drawn. The last row laid waits until it is known
        to be last."""
        sequence = self._sequence
        await self._model.share(sequence)
        laid = len(sequence.timeline)
        drawing = self._answer.may_draw and sequence.laid_whole and sequence.ready_rows == laid
        ready = min(sequence.ready_rows, laid if drawing else laid - 1)
        rows = ready - sequence.computed
        if rows <= 0:
            return False
        try:
            token = await self._model.scheduler.step(sequence, rows, self._answer.draw if drawing else None)
        except Exception:
            self._model.forget(sequence)
            raise
        if token is not None:
            self._answer.add(token)
        if self._answer.finished:
            await self._model.share(sequence)  # what the last step computed, for requests to come
        return True


def _admitted(
    needs: Needs, room: int, context_limit: int, fits_with: str = "", held: Iterable[pb.UnitRef] = ()
) -> dpb.DecodeResponse:
    admitted = dpb.DecodeAdmitted(
        prompt_tokens=needs.rows,
        visual_tokens=needs.visual,
        room=room,
        context_limit=context_limit,
        fits_with=fits_with,
        held=held,
    )
    return dpb.DecodeResponse(admitted=admitted)


def _protocol(message: str) -> InvalidRequest:
    return InvalidRequest("UPLOAD_PROTOCOL", message)


async def _read(requests: AsyncIterator[dpb.DecodeRequest], inbox: Inbox, arrived: asyncio.Event) -> None:
    """Puts what comes into the inbox."""
    end: Exception | None = None
    try:
        async for request in requests:
            inbox.append(request)
            arrived.set()
    except Exception as error:
        end = error
    inbox.append(end)
    arrived.set()
