"""A caller of `Decode` that says one thing at a time, hands over again what it is asked for, and remembers all that it
was told, so that an undivided pass can be held against it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from tests.decoder_service.halves import Halves, Message, Told, wrapped
from tests.decoder_service.oracle import Clip, Oracle, Replay


class Caller:
    """One call.

    Args:
        clips: the media of its slots, as they are in the end.

    Attributes:
        told: as `Told` has it, what an earlier attempt was told first.
        log: tokens of sequence 0 and laid events, in the order in which they were told.
        attached: units, as they were told to be attached, again and again.
        missing: units it was asked for again, with the cause.
        end_after: tokens of the first answer after which its side of the call ends; None for never.
    """

    def __init__(
        self,
        system: Halves,
        opened: dpb.DecodeOpen,
        clips: dict[int, Clip],
    ) -> None:
        self.opened = opened
        self.clips = clips
        self.told = Told()
        self.log: list[int | pb.Laid] = []
        self.logprobs: defaultdict[int, list[pb.TokenLogprobs | None]] = defaultdict(list)
        self.attached: list[tuple[int, int]] = []
        self.missing: list[tuple[int, int, str]] = []
        self.events: dict[int, dpb.DecodeAppend | dpb.DecodeDrop] = {}
        self.responses = 0
        self.end_after: int | None = None
        self._system = system
        self._outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._ended = False
        for emitted in opened.emitted:
            self.told.sequences[emitted.sequence] += emitted.ids
            self.logprobs[emitted.sequence] += [None] * len(emitted.ids)
            if not emitted.sequence:
                self.told.ids += emitted.ids
                self.log += emitted.ids
        self.send(opened)

    def send(self, *messages: Message) -> None:
        """Says something, unless the call is over."""
        for message in messages:
            if isinstance(message, (dpb.DecodeAppend, dpb.DecodeDrop)):
                self.events[message.event] = message
            self._outbox.put_nowait(message)

    async def hand_over(self, slot: int, unit: int) -> None:
        """Has a unit encoded, or finds it, and announces it."""
        (ready,) = await self._system.ready(self.clips[slot].units[unit], slot=slot)
        ready.unit = unit
        await self.say_ready(ready)

    async def say_ready(self, ready: dpb.DecodeReady) -> None:
        """Announces an entry; what comes after the call's end is nobody's but its own."""
        self.send(ready)
        if self._ended:
            await self.take_back()

    def stream(self) -> AsyncGenerator[dpb.DecodeResponse, None]:
        responses = self._system.servicer.Decode(self._requests(), None)
        assert isinstance(responses, AsyncGenerator)
        return responses

    async def run(self, *, leave_after: int | None = None, with_token: bool = False) -> None:
        """Listens until the call is over, or leaves after so many responses, `with_token` not before one came; returns
        when all is over."""
        try:
            async with aclosing(self.stream()) as responses:
                async for response in responses:
                    await self.note(response)
                    ripe = not with_token or any(self.told.sequences.values())
                    if leave_after is not None and self.responses >= leave_after and ripe:
                        break
        finally:
            self._ended = True
            await self.take_back()

    async def note(self, response: dpb.DecodeResponse) -> None:
        self.responses += 1
        self.told.note(response)
        which = response.WhichOneof("message")
        if which == "tokens":
            tokens = response.tokens
            self.logprobs[tokens.sequence] += tokens.logprobs or [None] * len(tokens.ids)
            if not tokens.sequence:
                self.log += tokens.ids
                if len(self.told.ids) == self.end_after:
                    self._outbox.put_nowait(None)
        elif which == "laid":
            self.log.append(response.laid)
        elif which == "attached":
            self.attached += [(unit.slot, unit.unit) for unit in response.attached.units]
        elif which == "missing":
            slot, unit = response.missing.unit.slot, response.missing.unit.unit
            self.missing.append((slot, unit, response.missing.cause))
            await self.hand_over(slot, unit)

    async def _requests(self) -> AsyncIterator[dpb.DecodeRequest]:
        while (message := await self._outbox.get()) is not None:
            yield wrapped(message)

    async def take_back(self) -> None:
        """The pins of what was never handed over are its own; all others are the decoder's."""
        while not self._outbox.empty():
            message = self._outbox.get_nowait()
            if isinstance(message, dpb.DecodeReady):
                await self._system.store.release(message.entry.key, message.entry.lease.lease_id)

    # -- what it was told ----------------------------------------------------------------------------------------------

    def replay(self, oracle: Oracle, number: int = 0) -> Replay:
        """The timeline of one of its sequences."""
        replay = Replay(oracle, self.opened, self.clips)
        replay.lay_prompt()
        for entry in self.log if not number else self.told.sequences[number]:
            if isinstance(entry, pb.Laid):
                assert entry.at_index == len(replay.timeline), "it was laid where it is said to be"
                replay.lay_event(self.events[entry.event])
            else:
                replay.draw(entry)
        return replay

    def check(self, oracle: Oracle) -> None:
        """All that was told is what an undivided pass says."""
        for number in list(self.told.sequences):
            replay = self.replay(oracle, number)
            replay.check(self.logprobs[number], number=number)

    def check_whole(self, oracle: Oracle) -> None:
        """Every sequence was told to its end, and what was used is counted right."""
        self.check(oracle)
        sampling, told = self.opened.sampling, self.told
        n = sampling.n or 1
        assert sorted(told.ends) == list(range(n)), "every sequence ends"
        stops = set() if sampling.ignore_eos else oracle.writer.stop_ids
        for number, end in told.ends.items():
            ids = told.sequences[number]
            stopped = ids[-1] in stops
            assert not set(ids[:-1]) & stops and (stopped or len(ids) == sampling.max_tokens)
            assert end.reason == (pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH)
            assert end.tokens == len(ids)
        (usage,) = [end.usage for end in told.ends.values() if end.HasField("usage")]
        prompt = Replay(oracle, self.opened, self.clips)
        prompt.lay_prompt()
        got = usage.prompt_tokens, usage.visual_tokens
        assert got == (len(prompt.timeline), prompt.timeline.vision_tokens)
        assert usage.output_tokens == sum(map(len, told.sequences.values()))
        # All of the prompt may be found where an answer is gone on with: a token behind it is drawn from another row.
        assert usage.cached_prompt_tokens <= usage.prompt_tokens - (not self.opened.emitted)
