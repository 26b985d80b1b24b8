"""The life of one `Decode` call: messages in, a timeline computed as far as it can be, tokens out.

One coroutine does it all in turn: take what has come, attach what can be attached, compute what is ready, draw what
may be drawn, wait. So nothing here needs a lock, and leaving it at any point frees everything.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from chiasm.cache import wire
from chiasm.cache.entry import Contract, EntryKey, Form, open_entry, tag_secret
from chiasm.chat_template import Slot
from chiasm.errors import InvalidRequest, ServerError
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import UnitName
from decoder_service import convert
from decoder_service.answer import Answer
from decoder_service.engine import Work
from decoder_service.model import DecoderModel

CHUNK = 512
"""Rows of one step of a prefill."""


class Decoding:
    """One timeline. `run` yields what the caller is told."""

    def __init__(self, model: DecoderModel, opened: dpb.DecodeOpen) -> None:
        self._model = model
        self._open = opened
        self._live = opened.sample == dpb.SAMPLE_MODE_WHILE_OPEN
        self._kinds = {slot.slot: slot.kind for slot in opened.slots}
        self._items = {slot.slot: slot.item for slot in opened.slots}
        self._secret = tag_secret(model.workers_secret, opened.tenant_root)
        self._sequence = model.engine.sequence()
        self._answer = Answer(model, opened, self._sequence)
        self._announced: dict[UnitName, Contract] = {}
        self._pins: dict[UnitName, tuple[EntryKey, bytes]] = {}  # entries and leases that are not given back yet
        self._asked: dict[UnitName, int] = {}  # units asked for again, and how often
        self._laying: dict[int, int] = {}  # events that are not laid yet, and their pieces
        self._closed = False
        self._admitted = False

    async def run(self, requests: AsyncIterator[dpb.DecodeRequest]) -> AsyncGenerator[dpb.DecodeResponse, None]:
        pieces = convert.read_prompt(self._open.prompt, self._model.prompt, self._model.vocabulary)
        convert.check_slots(pieces, self._open.slots)
        self._sequence.extend(pieces)
        inbox: deque[dpb.DecodeRequest | Exception | None] = deque()
        arrived = asyncio.Event()
        reader = asyncio.create_task(_read(requests, inbox, arrived))
        try:
            while True:
                arrived.clear()
                while inbox:
                    for response in self._take(inbox.popleft()):
                        yield response
                for response in self._answer.responses():
                    yield response
                if self._answer.finished:
                    return
                if not self._admitted and self._all_sized():
                    yield await self._admit()
                for response in await self._attach():
                    yield response
                if not (self._admitted and await self._compute()):
                    await arrived.wait()  # nothing to do until something comes
        finally:
            reader.cancel()
            try:
                await self._model.release(self._sequence)
            finally:
                unread = [message.ready.entry for message in inbox if isinstance(message, dpb.DecodeRequest)]
                for key, lease_id in [*self._pins.values(), *((entry.key, entry.lease.lease_id) for entry in unread)]:
                    await self._model.store.release(key, lease_id)

    # -- what comes in ---------------------------------------------------------------------------------------------

    def _take(self, message: dpb.DecodeRequest | Exception | None) -> list[dpb.DecodeResponse]:
        if isinstance(message, Exception):
            raise message
        if message is None:
            if self._closed:
                return []
            raise InvalidRequest("UPLOAD_PROTOCOL", "the caller ended before the timeline was closed")
        which = message.WhichOneof("message")
        if which == "sized":
            return list(self._size(message.sized))
        if which == "ready":
            self._announce(message.ready)
            return []
        if which == "append" and self._live and not self._closed:
            return list(self._append(message.append))
        if which == "drop" and self._live and not self._closed:
            return [self._drop(message.drop)]
        if which == "close" and not self._closed:
            self._closed = True
            self._answer.close()
            return []
        raise InvalidRequest("UPLOAD_PROTOCOL", f"{which or 'an empty message'} is not expected here")

    def _size(self, sized: dpb.DecodeSized) -> Iterator[dpb.DecodeResponse]:
        if sized.slot not in self._kinds:
            raise InvalidRequest("PLACEHOLDER_MISMATCH", f"slot {sized.slot} is not in the prompt")
        try:
            slot = convert.sized_slot(sized, self._kinds[sized.slot], self._model.prompt)
        except InvalidRequest as error:
            raise error.at(self._items[sized.slot]) from None
        self._sequence.size(sized.slot, slot)
        self._model.engine.detach_moved(self._sequence)  # attached anew from what was announced
        yield from self._laid()

    def _announce(self, ready: dpb.DecodeReady) -> None:
        """Remembers what an entry is, after holding it against what was sized and what this model needs."""
        name = UnitName(ready.slot, ready.unit)
        sized = self._sequence.sized(ready.slot)
        if sized is None or ready.unit >= len(sized.grids):
            raise ServerError("FEATURE_COUNT_MISMATCH", f"unit {ready.unit} of slot {ready.slot} was not sized")
        grid = sized.grids[ready.unit]
        contract = wire.read(ready.entry, grid)
        model = self._model
        shape = model.engine.half.entry_shape
        tokens = model.engine.processor.unit_layout(grid).vision_tokens
        needed = Contract(
            contract.key,
            model.identity_digest,
            Form.CROSS_KV,
            model.engine.half.dtype,
            grid,
            (shape.layers, 2, shape.heads, tokens, shape.dim),
        )
        if contract != needed:
            raise ServerError(
                "FEATURE_COUNT_MISMATCH",
                f"an entry of shape {contract.shape} came where {needed.shape} is needed",
                item=self._items.get(ready.slot),
                facts={"got": contract.shape[3], "needed": tokens},
            )
        self._announced[name] = contract
        self._pins[name] = (contract.key, ready.entry.lease.lease_id)

    def _append(self, append: dpb.DecodeAppend) -> Iterator[dpb.DecodeResponse]:
        for slot in append.slots:
            self._kinds[slot.slot], self._items[slot.slot] = slot.kind, slot.item
        if append.HasField("at_index"):
            raise InvalidRequest("FIELD_OUT_OF_RANGE", "at_index is for timelines that are resumed")
        which = append.WhichOneof("content")
        if which == "turn":
            turn = convert.read_turn(append.turn, f"append[{append.event}]")
            text = "".join(part for part in turn.parts if isinstance(part, str))
            if turn.role != "user" or len(turn.parts) != 1 or not text:
                raise InvalidRequest("MESSAGE_ORDER", "a live timeline takes user turns of text")
            piece = self._sequence.extend([self._model.prompt.spliced(text)])
        elif which == "slot" and append.slot in self._kinds:
            piece = self._sequence.extend([Slot(append.slot)])
        else:
            raise InvalidRequest("PLACEHOLDER_MISMATCH", "what is appended names no slot and no turn")
        self._laying[append.event] = piece
        self._answer.heard(self._sequence.timeline)
        yield from self._laid()

    def _drop(self, drop: dpb.DecodeDrop) -> dpb.DecodeResponse:
        timeline = self._sequence.timeline
        try:
            timeline.drop_units(drop.first_visible - timeline.dropped)
        except ValueError as error:
            raise InvalidRequest("FIELD_OUT_OF_RANGE", f"first_visible: {error}") from None
        return dpb.DecodeResponse(laid=pb.Laid(event=drop.event, at_index=len(timeline)))

    def _laid(self) -> Iterator[dpb.DecodeResponse]:
        for event, piece in list(self._laying.items()):
            row = self._sequence.row_of(piece)
            if row is not None:
                del self._laying[event]
                yield dpb.DecodeResponse(laid=pb.Laid(event=event, at_index=row))

    # -- admission, attaching, computing ---------------------------------------------------------------------------

    def _all_sized(self) -> bool:
        return all(self._sequence.sized(slot.slot) is not None for slot in self._open.slots)

    async def _admit(self) -> dpb.DecodeResponse:
        """Waits for room in both pools for all of the prompt and the longest answer; refuses what can never fit."""
        timeline = self._sequence.timeline
        room = self._answer.admit(timeline)
        needed = self._model.context_limit if self._live else len(timeline) + room
        began = time.monotonic()
        await self._model.reserve(self._sequence, text=needed, visual=timeline.vision_tokens)
        self._answer.admitted(queued=time.monotonic() - began)
        self._admitted = True
        admitted = dpb.DecodeAdmitted(
            prompt_tokens=len(timeline),
            visual_tokens=timeline.vision_tokens,
            room=room,
            context_limit=self._model.context_limit,
        )
        return dpb.DecodeResponse(admitted=admitted)

    async def _attach(self) -> list[dpb.DecodeResponse]:
        """Attaches every announced unit that is laid and not attached. A doubtful entry is forgotten and asked for."""
        if not self._admitted:
            return []
        responses = []
        attached = dpb.DecodeAttached()
        for name, contract in list(self._announced.items()):
            if self._sequence.attached(name) or self._sequence.timeline.find(name) is None:
                continue
            sealed = await self._model.store.get(contract.key)
            payload = "absent"
            opened = None if sealed is None else await asyncio.to_thread(open_entry, sealed, contract, self._secret)
            if isinstance(opened, str):
                payload = opened
                await self._model.store.discard(contract.key)
            ref = pb.UnitRef(slot=name.slot, unit=name.unit)
            if opened is None or isinstance(opened, str):
                del self._announced[name]
                self._pins.pop(name, None)
                self._asked[name] = self._asked.get(name, 0) + 1
                if self._asked[name] > 1:
                    raise ServerError("ENTRY_MISSING", f"an entry was {payload} twice", item=self._items.get(name.slot))
                responses.append(dpb.DecodeResponse(missing=dpb.DecodeMissing(unit=ref, cause=payload)))
                continue
            if self._live:
                await self._model.widen(self._sequence, visual=self._sequence.timeline.vision_tokens)
            await self._model.run(self._model.engine.attach, self._sequence, name, opened)
            if name in self._pins:
                await self._model.store.release(*self._pins.pop(name))
            attached.units.append(ref)
        if attached.units:
            responses.append(dpb.DecodeResponse(attached=attached))
        return responses

    async def _compute(self) -> bool:
        """One step, if any row can be computed or token drawn. The last row laid waits until it is known to be last."""
        sequence = self._sequence
        laid = len(sequence.timeline)
        drawing = self._answer.may_draw and sequence.laid_whole and sequence.ready_rows == laid
        ready = min(sequence.ready_rows, laid if drawing else laid - 1)
        rows = min(ready - sequence.computed, CHUNK)
        if rows <= 0:
            return False
        draws = drawing and sequence.computed + rows == laid
        work = Work(sequence, rows, "last" if draws else "none")
        (logits,) = await self._model.run(self._model.engine.step, [work])
        if draws:
            self._answer.draw(logits[-1])
        return True


async def _read(
    requests: AsyncIterator[dpb.DecodeRequest],
    inbox: deque[dpb.DecodeRequest | Exception | None],
    arrived: asyncio.Event,
) -> None:
    """Puts what comes into the inbox: messages, and at the end None or what broke."""
    end: Exception | None = None
    try:
        async for request in requests:
            inbox.append(request)
            arrived.set()
    except Exception as error:
        end = error
    inbox.append(end)
    arrived.set()
