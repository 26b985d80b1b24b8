"""The life of one `Decode` call: messages in, a timeline computed as far as it can be, tokens or states out.

One coroutine does it all in turn: tell what was drawn, take what has come, let be computed what is ready, wait. What it
changes it changes while nothing is computed of it (`Stepping.apart`). So nothing here needs a lock, and leaving it at
any point frees everything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TypeAlias

from chiasm.errors import InvalidRequest, Unsupported
from chiasm.models.family import MediumFacts
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import unit_name
from decoder_service import convert
from decoder_service.ahead import Bell, ahead, ended
from decoder_service.answer import Answer
from decoder_service.branch import Branch
from decoder_service.emitted import goes_on, read_emitted
from decoder_service.entries import Entries
from decoder_service.fitting import Medium, Needs, PromptParts, check_text, context_exceeded, least
from decoder_service.growth import Growth, broken_order
from decoder_service.kept_states import Flight, Wanted
from decoder_service.layered import Layered
from decoder_service.model import DecoderModel
from decoder_service.options import read_options
from decoder_service.pooled import Pooled
from decoder_service.prefix import prompt_digest
from decoder_service.reply import Reply
from decoder_service.sequence import DecodeSequence
from decoder_service.states_asked import Layers, read_states

UNREAD = 64
"""Tokens and responses that a caller may leave unread before its sequence waits for it. Between two tokens nobody then
waits for a socket, so those who run together stay together, and a slow reader holds up nobody but itself."""

Inbox: TypeAlias = deque[dpb.DecodeRequest | Exception | None]
"""Messages in the order in which they came, and at the end None or what broke."""


class Decoding:
    """One timeline. `run` yields what the caller is told."""

    def __init__(self, model: DecoderModel, opened: dpb.DecodeOpen) -> None:
        self._model = model
        self._unread: pb.Prompt | None = opened.prompt
        self._open = convert.beside_prompt(opened)
        self._options = read_options(opened.sampling, opened.seed, model.vocabulary)
        self._live = opened.sample == dpb.SAMPLE_MODE_WHILE_OPEN
        if self._live and self._options.n > 1:
            raise Unsupported("FEATURE_DISABLED", "n is not served while a timeline grows", facts={"field": "n"})
        self._root = opened.tenant_root
        self._estimate = opened.sample == dpb.SAMPLE_MODE_ESTIMATE
        self._emitted = read_emitted(opened, self._options, model)
        self._states = read_states(opened, model.engine.half)
        # Tokens of the answer, as far as it is said: those of a timeline that samples nothing are none.
        self._asked = self._options.max_tokens if self._states is None else 0
        self._flight: Flight | None = None  # others wait for its states
        self._held = AsyncExitStack()  # room for them
        self._kinds = {slot.slot: slot.kind for slot in opened.slots}
        self._items = {slot.slot: slot.item for slot in opened.slots}
        self._facts: dict[int, Callable[[int], MediumFacts]] = {}  # of slots whose own size was told
        self._inbox: Inbox = deque()
        self._arrived = Bell()
        self._entries = Entries(model, root=opened.tenant_root, item_of=self._items.get)
        self._sequence = model.sequence(opened.tenant_root)
        self._branches = [self._branch(self._sequence)]
        self._prompt = convert.ReadPrompt([], {})
        self._growth = Growth(model, self._sequence, self._kinds, self._items)
        self._entered = False  # it was laid, and waits for room or has it
        self._room = 0  # tokens that each sequence may draw then
        self._closed = False
        self._ended = False  # the caller's side
        self._admitted = False

    def _branch(self, sequence: DecodeSequence, number: int = 0) -> Branch:
        model, opened = self._model, self._open
        answer: Reply
        if self._states is None:
            emitted = self._emitted.get(number, ())
            answer = Answer(model, opened, self._options, sequence, number=number, emitted=emitted)
        elif isinstance(self._states, Layers):
            answer = Layered(opened, sequence, self._states)
        else:
            answer = Pooled(opened, sequence, self._states)
        return Branch(model, opened, answer, sequence, self._entries, wake=self._arrived.ring, ahead=UNREAD // 2)

    def run(self, requests: AsyncIterator[dpb.DecodeRequest]) -> AsyncGenerator[dpb.DecodeResponse, None]:
        """What the caller is told, in order, ahead of it by at most `UNREAD` responses. Leaving it frees everything.

        Raises InvalidRequest, Overloaded and ServerError, as the reasons of `chiasm.errors` have it.
        """
        return ahead(self._run(requests), items=UNREAD // 2)

    async def _run(self, requests: AsyncIterator[dpb.DecodeRequest]) -> AsyncGenerator[dpb.DecodeResponse, None]:
        reader: asyncio.Task[None] | None = None
        try:
            if not self._live:
                # Mostly it is closed by the time its prompt is read, and its last row need not wait for another step.
                reader = asyncio.create_task(_read(requests, self._inbox, self._arrived))
            await self._read_prompt()
            reader = reader or asyncio.create_task(_read(requests, self._inbox, self._arrived))
            while True:
                self._arrived.hush()  # before anything is looked at: what comes while a caller reads is not missed
                # What was drawn is told before anything that came meanwhile is answered: the timeline has that order.
                for response in self._tell():
                    yield response
                if self._finished:
                    return
                if isinstance(layered := self._first.answer, Layered) and layered.states is not None:
                    async with aclosing(self._send(layered)) as sent:
                        async for response in sent:
                            yield response
                    return
                if self._inbox:
                    async with self._model.stepping.apart(self._first.seat):
                        told = self._tell()
                    for response in told:
                        yield response
                    for response in await self._take_all():
                        yield response
                    continue
                if self._estimate and self._all_sized():
                    yield await self._told_estimate()
                    return
                if not self._entered and self._all_sized() and (self._closed or not self._wants_all):
                    if await self._find():
                        yield self._told_admitted()
                        continue
                    await self._enter()
                if not self._admitted and self._first.seat.admitted:
                    self._admitted = True
                    yield self._told_admitted()
                if len(self._branches) < self._options.n and self._first.answer.begun:
                    await self._fork()
                await self._release_finished()
                for branch in self._branches:
                    for response in self._accounted(await branch.advance()):
                        yield response
                if self._ended and not self._inbox and self._stuck():
                    raise broken_order("the caller ended before every unit was handed over")
                await self._arrived.wait()  # nothing to do until something comes
        finally:
            if self._flight is not None:
                self._flight.land(None)  # unless they were computed
            giving_back = asyncio.create_task(self._give_back(reader))
            await ended(giving_back)
            giving_back.result()

    @property
    def _first(self) -> Branch:
        """The sequence that the caller's messages are about."""
        return self._branches[0]

    @property
    def _finished(self) -> bool:
        """All sequences have ended, those that have not begun yet too."""
        return len(self._branches) >= self._options.n and all(one.answer.finished for one in self._branches)

    def _tell(self) -> list[dpb.DecodeResponse]:
        """What was drawn, and at the very end what was used."""
        return [response for branch in self._branches for response in self._accounted(branch.tell())]

    def _accounted(self, responses: list[dpb.DecodeResponse]) -> list[dpb.DecodeResponse]:
        """With what the call has used beside the last end of all."""
        for response in responses:
            if response.HasField("finished") and self._finished:
                response.finished.usage.CopyFrom(self._first.answer.used())
                response.finished.usage.output_tokens = sum(one.answer.told for one in self._branches)
                response.finished.times.CopyFrom(self._first.answer.times())
        return responses

    async def _fork(self) -> None:
        """Begins the other sequences, once there is a first token: the pages of their prompt are there."""
        async with self._model.stepping.apart(self._first.seat):
            if self._first.seat.admitted:  # else it holds nothing, and what it had was shared when it lost it
                self._model.share(self._sequence)
        self._first.changed = True
        for number in range(1, self._options.n):
            branch = self._branch(self._sequence.fork(), number)
            self._branches.append(branch)
            await branch.answer.read_guide()
            branch.units.lost()
            branch.answer.close()
            branch.enter(self._room)

    async def _release_finished(self) -> None:
        """Who has ended holds nothing that others wait for, its own siblings among them."""
        if len(self._branches) >= self._options.n:
            for branch in self._branches:
                if branch.answer.finished:
                    await branch.release()

    async def _read_prompt(self) -> None:
        """Compiles the guide, reads and lays the prompt, in threads: it may take seconds, and everybody else's stream
        would stand still."""
        model, prompt = self._model, self._unread
        assert prompt is not None, "it is read once"
        self._unread = None
        await self._first.answer.read_guide()
        size = convert.text_bytes(prompt)
        kinds = dict(self._kinds)
        self._prompt = await model.tokenise(size, convert.read_prompt, prompt, model.prompt, model.vocabulary, kinds)
        convert.check_slots(self._prompt.pieces, self._open.slots)
        if not self._estimate:
            check_text(self._prompt.pieces, model.context_limit, answer=min(least(self._asked), 1))
            await asyncio.to_thread(self._sequence.extend, self._prompt.pieces)

    async def _give_back(self, reader: asyncio.Task[None] | None) -> None:
        """Frees everything the timeline holds, the pins of entries that nobody read any more too."""
        if reader is not None:
            reader.cancel()
        try:
            await self._held.aclose()
            # Whatever becomes of one, the others give back what they hold.
            released = await asyncio.gather(*(branch.release() for branch in self._branches), return_exceptions=True)
            for outcome in released:
                if outcome is not None:
                    raise outcome
        finally:
            if reader is not None:
                await asyncio.wait([reader])
            messages = [message for message in self._inbox if isinstance(message, dpb.DecodeRequest)]
            await self._entries.close(message.ready.entry for message in messages if message.HasField("ready"))

    # -- states of all rows ------------------------------------------------------------------------------------------

    @property
    def _wants_all(self) -> bool:
        """The states of all rows are asked for: which those are is known once it is closed."""
        return isinstance(self._states, Layers)

    async def _find(self) -> bool:
        """Waits for room for the states that are asked for, and looks whether they are known: from before, or by
        another call that computes them now. They are looked up where all that is laid is known beforehand; entries of
        media that nobody has seen yet are not."""
        layered, asked, model = self._first.answer, self._states, self._model
        if not (isinstance(layered, Layered) and isinstance(asked, Layers)):
            return False
        rows, half = self._needs().rows, model.engine.half
        await self._held.enter_async_context(model.states_room.hold(asked.bytes_of(rows, half.width, half.dtype)))
        wanted = self._wanted(layered)
        if wanted is None:
            return False
        found = await model.states.find(wanted)
        if isinstance(found, Flight):
            self._flight = found
            return False
        layered.found(found)
        return True

    def _wanted(self, layered: Layered) -> Wanted | None:
        """What its states are known by. None while not all of it is known."""
        digest = self._sequence.digest()
        if digest is None:
            return None
        return Wanted(self._root, digest, len(self._sequence.timeline), layered.layers)

    async def _send(self, layered: Layered) -> AsyncGenerator[dpb.DecodeResponse, None]:
        """The states, and the end. Nothing is held in the pools meanwhile: a caller may be slow."""
        assert layered.states is not None, "they are there"
        if self._flight is not None:
            self._flight.land(layered.states)
        computed = self._entered
        await self._first.release()
        async with aclosing(layered.parts()) as parts:
            async for part in parts:
                yield part
        if computed and (wanted := self._wanted(layered)) is not None:
            await self._model.states.keep(wanted, layered.states)
        layered.finish()
        for response in self._tell():
            yield response

    def _stuck(self) -> bool:
        """Nothing goes on without the caller."""
        if not self._entered and not self._all_sized():
            return True
        if self._first.answer.begun and len(self._branches) < self._options.n:
            return False  # the others begin now
        return not any(branch.waits or not (branch.still or branch.answer.finished) for branch in self._branches)

    # -- what comes in ---------------------------------------------------------------------------------------------

    async def _take_all(self) -> list[dpb.DecodeResponse]:
        """What has come, taken while nothing is computed of the timeline."""
        responses: list[dpb.DecodeResponse] = []
        if not self._inbox:
            return responses
        async with self._model.stepping.apart(self._first.seat):
            while self._inbox and not self._finished:
                responses += await self._take(self._inbox.popleft())
        return responses

    async def _take(self, message: dpb.DecodeRequest | Exception | None) -> list[dpb.DecodeResponse]:
        if isinstance(message, Exception):
            raise message
        if message is None:
            if not self._closed:
                raise broken_order("the caller ended before the timeline was closed")
            self._ended = True
            return []
        self._first.changed = True
        which = message.WhichOneof("message")
        if which == "sized":
            await self._size(message.sized)
        elif which == "ready" and not self._estimate:
            name = self._entries.announce(message.ready, self._sequence)
            for branch in self._branches:
                branch.units.announced(name)
                branch.changed = True
        elif which == "append" and self._live and not self._closed:
            await self._growth.append(message.append)
            self._first.answer.heard()
            await self._check_room()
        elif which == "drop" and self._live and not self._closed:
            self._growth.drop(message.drop)
        elif which == "close" and not self._closed:
            self._closed = True
            self._first.answer.close()
        else:
            raise broken_order(f"{which or 'an empty message'} is not expected here")
        return self._growth.laid()

    async def _size(self, sized: dpb.DecodeSized) -> None:
        """Lays a slot, or lays it anew, and takes back whatever no longer fits what is laid."""
        if sized.slot not in self._kinds:
            raise InvalidRequest("PLACEHOLDER_MISMATCH", f"slot {sized.slot} is not in the prompt")
        try:
            written = self._prompt.written.get(sized.slot)
            unit_layout = self._model.engine.processor.unit_layout
            slot = convert.sized_slot(sized, self._kinds[sized.slot], self._model.prompt, unit_layout, written)
            self._sequence.size(sized.slot, slot)
            if facts := convert.facts_of(sized, self._kinds[sized.slot]):
                self._facts[sized.slot] = facts
        except InvalidRequest as error:
            raise error.at(self._items[sized.slot]) from None
        except ValueError as error:
            raise broken_order(str(error)) from None
        self._first.units.unfit(await self._entries.resized(sized.slot, slot.grids))
        for number, unit in enumerate(sized.units):
            if unit.HasField("key"):
                self._entries.know(self._sequence, unit_name(sized.slot, number), unit.key)
        await self._first.units.moved()
        await self._check_room()

    async def _check_room(self) -> None:
        """Once admitted a timeline stays within what it was promised; only a live one may be promised more. One that
        still waits for room waits for as much as it takes by now."""
        timeline, model = self._sequence.timeline, self._model
        if not self._entered:
            return
        used = max(timeline.counter, len(timeline)) + (1 if self._live else self._room)
        if used > model.context_limit:
            raise context_exceeded(f"the timeline needs {used} positions", needed=used, limit=model.context_limit)
        await model.keep_within(self._first.seat, grow=self._live)

    # -- admission, attaching, computing ---------------------------------------------------------------------------

    def _all_sized(self) -> bool:
        return all(self._sequence.sized(slot.slot) is not None for slot in self._open.slots)

    async def _enter(self) -> None:
        """Lets the timeline wait for room in both pools; refuses what can never fit, with the longest answer."""
        model, needs = self._model, self._needs()
        asked = self._asked
        if needs.context + least(asked) > model.context_limit:
            raise await asyncio.to_thread(self._parts().too_long, model.limits, asked)
        # What no pool can ever hold is refused by the model, which knows the numbers.
        self._room = model.limits.room(needs, asked) or least(asked)
        for number, ids in self._emitted.items():
            if len(ids) > self._room:
                raise goes_on(number, len(ids), self._room, "for which there is room")
        model.check_fits(text=needs.rows + (1 if self._live else self._room), visual=needs.visual)
        self._entered = True
        self._first.enter(self._room)

    def _needs(self) -> Needs:
        timeline = self._sequence.timeline
        return Needs(len(timeline), timeline.counter, timeline.vision_tokens)

    def _told_admitted(self) -> dpb.DecodeResponse:
        layered = self._first.answer
        if isinstance(layered, Layered) and layered.states is not None:
            names = self._sequence.known_units()  # nobody needs any of them
        else:
            names = self._sequence.attached_units()
        self._entries.excuse(names)
        held = [pb.UnitRef(slot=name.slot, unit=name.unit) for name in names]
        needs = self._needs()
        digest = prompt_digest(self._sequence.timeline, needs.rows)
        return _admitted(needs, self._room, self._model.context_limit, held=held, digest=digest)

    async def _told_estimate(self) -> dpb.DecodeResponse:
        """What the prompt needs, how much room it leaves, and what would make it fit if it leaves none."""
        parts, limits, asked = self._parts(), self._model.limits, self._asked
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
            framed = partial(self._model.prompt.medium, "video") if thinned else None
            media[slot.slot] = Medium(sized, framed, self._facts.get(slot.slot))
        processor = self._model.engine.processor
        return PromptParts(self._prompt.pieces, media, processor.unit_layout, processor.size)


def _admitted(
    needs: Needs,
    room: int,
    context_limit: int,
    fits_with: str = "",
    held: Iterable[pb.UnitRef] = (),
    digest: bytes = b"",
) -> dpb.DecodeResponse:
    admitted = dpb.DecodeAdmitted(
        prompt_tokens=needs.rows,
        visual_tokens=needs.visual,
        room=room,
        context_limit=context_limit,
        fits_with=fits_with,
        held=held,
        prompt_digest=digest,
    )
    return dpb.DecodeResponse(admitted=admitted)


async def _read(requests: AsyncIterator[dpb.DecodeRequest], inbox: Inbox, arrived: Bell) -> None:
    """Puts what comes into the inbox."""
    end: Exception | None = None
    try:
        async for request in requests:
            inbox.append(request)
            arrived.ring()
            del request  # this frame would keep it until the next one comes
    except Exception as error:
        end = error
    inbox.append(end)
    arrived.ring()
