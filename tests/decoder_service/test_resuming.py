"""Answers that one attempt began and another goes on with: whatever had been told when it broke, both together are the
answer that was never broken, token by token and byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from blake3 import blake3

from chiasm.chat_template import Turn
from chiasm.errors import ChiasmError, InvalidRequest, ServerError, Unsupported
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.scheduler import Scheduler
from decoder_service.sequence import DecodeSequence
from tests.decoder_service.halves import CLOSE, Halves, Message, halves, sized
from tests.decoder_service.holders import hold
from tests.decoder_service.oracle import Oracle
from tests.fuzz.timelines import FRAMES, frames, oracle
from tests.waiting import until

TOKENS = 16


@dataclass
class Stream:
    """What one sequence of a call was told.

    Attributes:
        first: index of its first token.
        texts, logprobs: of each token.
        seen: units in sight, by the index of the token from which on that was told.
    """

    first: int = 0
    ids: list[int] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    seen: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    end: pb.Finished | None = None

    @property
    def text(self) -> bytes:
        assert self.end is not None
        return b"".join(self.texts) + self.end.text


@dataclass
class Call:
    """What one call was told.

    Attributes:
        order: kinds of messages, as they came.
    """

    streams: defaultdict[int, Stream] = field(default_factory=lambda: defaultdict(Stream))
    order: list[str] = field(default_factory=list)
    admitted: dpb.DecodeAdmitted | None = None
    started: pb.Started | None = None
    usage: pb.Usage | None = None
    error: ChiasmError | None = None

    def note(self, response: dpb.DecodeResponse, attempt: int) -> None:
        which = response.WhichOneof("message")
        assert which is not None
        self.order.append(which)
        told = getattr(response, which)
        if which == "admitted":
            self.admitted = told
        elif which == "started":
            assert self.started is None and told.attempt == attempt
            self.started = told
        elif which in ("tokens", "visible", "finished"):
            assert told.attempt == attempt and self.started is not None
            stream = self.streams[told.sequence]
            if which == "tokens":
                if not stream.ids:
                    stream.first = told.index
                assert told.index == stream.first + len(stream.ids)
                stream.ids += told.ids
                stream.texts.append(told.text)
                stream.logprobs += told.logprobs
            elif which == "visible":
                last = (told.last.slot, told.last.unit)
                stream.seen[told.index] = (told.first, told.count, last, told.visible_until_offset.ToMicroseconds())
            else:
                assert stream.end is None
                stream.end = told
                if told.HasField("usage"):
                    assert self.usage is None
                    self.usage = told.usage


def shown(system: Halves, count: int = FRAMES, **said: Any) -> dpb.DecodeSized:
    """So many frames as units: an odd number, so that where two make one the last is of one."""
    return sized(count, span=system.span, **said)


async def call(system: Halves, opened: dpb.DecodeOpen, *, clips: int = 0, leave_after: int | None = None) -> Call:
    """A call with some media, heard to its end, or until so many tokens were told."""
    told = Call()
    messages: list[Message] = [opened]
    for slot in range(clips):
        messages += [shown(system, slot=slot), *await system.ready(frames(slot)[:FRAMES], slot=slot)]
    async with aclosing(system.decode(*messages, CLOSE)) as responses:
        try:
            async for response in responses:
                told.note(response, opened.attempt)
                if sum(len(stream.ids) for stream in told.streams.values()) == leave_after:
                    break
        except ChiasmError as error:
            told.error = error
    return told


def asked(system: Halves, *, clips: int = 0, seed: int = 0, **sampling: Any) -> dpb.DecodeOpen:
    opened = system.opened(*range(clips), "Read the digits.", max_tokens=sampling.pop("max_tokens", TOKENS))
    opened.seed, opened.prompt_visibility = seed, True
    opened.sampling.MergeFrom(pb.SamplingParams(**sampling))
    return opened


def again(opened: dpb.DecodeOpen, emitted: Mapping[int, Sequence[int]], *, attempt: int = 2) -> dpb.DecodeOpen:
    """The same request, of which so much had been told."""
    resumed = dpb.DecodeOpen()
    resumed.CopyFrom(opened)
    resumed.attempt = attempt
    for number, ids in emitted.items():
        resumed.emitted.add(sequence=number, ids=ids)
    return resumed


def check(whole: Call, part: Call, at: dict[int, int], *, exact: bool = False) -> None:
    """What was told before these indices and what was told then are what is told at once."""
    if part.error is not None:
        raise part.error
    told = [which for which in part.order if which not in ("attached", "missing")]
    assert told[:2] == ["admitted", "started"]
    assert whole.started is not None and part.started is not None and whole.admitted and part.admitted
    for name in ("prompt_digest", "prompt_tokens", "visual_tokens", "room"):
        assert getattr(part.admitted, name) == getattr(whole.admitted, name)
    assert part.started.prompt_digest == whole.started.prompt_digest == whole.admitted.prompt_digest
    part.started.attempt = whole.started.attempt
    assert part.started == whole.started
    assert sorted(part.streams) == sorted(whole.streams)
    for number, stream in whole.streams.items():
        first, rest = at.get(number, 0), part.streams[number]
        assert rest.ids == stream.ids[first:]
        assert rest.texts == stream.texts[first:]
        assert len(rest.logprobs) == len(stream.logprobs[first:])
        for got, expected in zip(rest.logprobs, stream.logprobs[first:], strict=True):
            if exact:
                assert got == expected
            assert [one.token_id for one in got.top] == [one.token_id for one in expected.top]
            assert got.drawn.logprob == pytest.approx(expected.drawn.logprob, abs=1e-5)
        if rest.ids:
            assert rest.first == first
            seen = stream.seen[max(index for index in stream.seen if index <= first)]
            assert rest.seen == {first: seen} | {at: one for at, one in stream.seen.items() if at > first}
        assert rest.end is not None and stream.end is not None
        for name in ("reason", "stop", "text", "tokens"):
            assert getattr(rest.end, name) == getattr(stream.end, name), name
    assert part.usage is not None and whole.usage is not None
    for name in ("prompt_tokens", "visual_tokens", "output_tokens"):
        assert getattr(part.usage, name) == getattr(whole.usage, name), name
    assert part.usage.cached_prompt_tokens <= part.usage.prompt_tokens


async def broken_everywhere(system: Halves, opened: dpb.DecodeOpen, *, clips: int = 0, exact: bool = False) -> Call:
    """The unbroken answer, against which those are held that broke behind each of its tokens."""
    whole = await call(system, opened, clips=clips)
    assert whole.error is None, whole.error
    ids = whole.streams[0].ids
    parts = await asyncio.gather(
        *(call(system, again(opened, {0: ids[:count]}), clips=clips) for count in range(len(ids) + 1))
    )
    for count, part in enumerate(parts):
        check(whole, part, {0: count}, exact=exact)
    return whole


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "to its own end": {"ignore_eos": False, "max_tokens": 40, "temperature": 3.0},
    "sampled": {"temperature": 1.0, "logprobs": 3},
    "truncated": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "logprobs": 0},
    "repetition": {"repetition_penalty": 1.7, "logprobs": 2},
    "presence": {"presence_penalty": 1.5, "temperature": 0.8},
    "frequency": {"frequency_penalty": -1.5, "temperature": 0.8, "logprobs": 1},
    "biased": {"temperature": 1.0, "logit_bias": [pb.LogitBias(token_id=40, bias=3.0)], "banned_token_ids": [41, 42]},
    "late end": {"ignore_eos": False, "min_tokens": 7, "max_tokens": 40, "temperature": 2.0},
    "names": {"skip_special_tokens": False, "temperature": 3.0},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_breaks_behind_any_token_is_the_unbroken_one(judge: Oracle, kind: str) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        options = {"ignore_eos": True} | KINDS[kind]
        whole = await broken_everywhere(system, asked(system, clips=1, seed=1, **options), clips=1)
        assert len(whole.streams[0].ids) > 1


async def test_the_digits_are_read_on_from_any_of_them() -> None:
    async with halves(oracle("digits")) as system:
        whole = await broken_everywhere(system, asked(system, clips=1, max_tokens=30, logprobs=1), clips=1)
        assert whole.streams[0].end is not None and whole.streams[0].end.reason == pb.FINISH_REASON_STOP
        assert len(whole.streams[0].text.split()) == FRAMES


async def test_a_stop_string_is_found_across_the_seam(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        free = await call(system, asked(system, ignore_eos=True, temperature=1.0, seed=3))
        text = free.streams[0].text.decode()
        found = 0
        for at in range(0, len(text) - 5, 6):
            stop = [text[at : at + 5], text[at : at + 4] + "\0"]
            whole = await broken_everywhere(system, asked(system, ignore_eos=True, temperature=1.0, seed=3, stop=stop))
            end = whole.streams[0].end
            assert end is not None and (end.reason == pb.FINISH_REASON_STOP) == bool(end.stop)
            found += end.stop == stop[0]
        assert found
        late = await broken_everywhere(
            system, asked(system, ignore_eos=True, temperature=1.0, seed=3, stop=[text[0]], min_tokens=5)
        )
        assert len(late.streams[0].ids) >= 5


SCHEMA = {
    "type": "object",
    "properties": {"of": {"enum": ["é", "😀😀", None]}, "sure": {"type": "boolean"}},
    "required": ["of", "sure"],
    "additionalProperties": False,
}

GUIDES = {
    "choice": pb.Guide(choice=pb.Choices(choices=["yes", "no", "né 😀", "yes, it is"])),
    "characters": pb.Guide(regex="(é|ü|😀){4,9}\\."),
    "json": pb.Guide(json_schema=json.dumps(SCHEMA)),
    "grammar": pb.Guide(grammar='root ::= "(" root ")" | [0-9]{1,3}'),
}


@pytest.mark.parametrize("kind", GUIDES)
async def test_a_guided_answer_keeps_to_its_guide_across_the_seam(judge: Oracle, kind: str) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        for seed in range(2):
            opened = asked(system, seed=seed, guide=GUIDES[kind], temperature=20.0, max_tokens=40, logprobs=2)
            whole = await broken_everywhere(system, opened)
            assert len(whole.streams[0].ids) > 1
        cut = await broken_everywhere(system, asked(system, guide=GUIDES[kind], temperature=20.0, max_tokens=3))
        assert len(cut.streams[0].ids) <= 3


async def test_each_of_several_answers_goes_on_behind_its_own_tokens(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        opened = asked(
            system, clips=1, n=3, temperature=1.0, ignore_eos=False, max_tokens=24, seed=5, logprobs=1, stop=["a"]
        )
        whole = await call(system, opened, clips=1)
        ids = {number: stream.ids for number, stream in whole.streams.items()}
        all_of = {number: len(one) for number, one in ids.items()}
        broken = [
            {0: 1},
            {0: 2, 1: 1},
            {0: 1, 1: 3, 2: 2},
            {0: all_of[0]},
            {0: all_of[0], 2: 1},
            {0: all_of[0], 1: all_of[1], 2: 0},
            {0: 1, 1: all_of[1]},
            {1: 2},
            all_of,
        ]
        # One after another, and then all beside each other.
        for part, at in [(await call(system, _cut(opened, ids, at), clips=1), at) for at in broken]:
            check(whole, part, at)
        parts = await asyncio.gather(*(call(system, _cut(opened, ids, at), clips=1) for at in broken))
        for part, at in zip(parts, broken, strict=True):
            check(whole, part, at)


def _cut(opened: dpb.DecodeOpen, ids: dict[int, list[int]], at: dict[int, int]) -> dpb.DecodeOpen:
    return again(opened, {number: ids[number][:count] for number, count in at.items()})


async def test_an_answer_may_break_again_and_again(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        opened = asked(system, clips=1, temperature=1.0, ignore_eos=True, frequency_penalty=0.7, logprobs=1)
        whole = await call(system, opened, clips=1)
        ids: list[int] = []
        texts: list[bytes] = []
        attempts = 0
        while len(ids) < TOKENS:
            attempts += 1
            part = await call(system, again(opened, {0: ids}, attempt=attempts), clips=1, leave_after=3)
            assert part.error is None and part.streams[0].first == len(ids)
            ids += part.streams[0].ids
            texts += part.streams[0].texts
        last = await call(system, again(opened, {0: ids}, attempt=attempts), clips=1)
        assert attempts == 6 and ids == whole.streams[0].ids
        assert b"".join(texts) + last.streams[0].text == whole.streams[0].text


async def test_deterministic_decoders_go_on_with_the_same_bits_however_large_their_steps_are(judge: Oracle) -> None:
    clips = 1
    async with halves(judge, dtype=torch.float32, deterministic=True) as system:
        opened = asked(system, clips=clips, temperature=1.0, ignore_eos=True, logprobs=5)
        whole = await call(system, opened, clips=clips)
        ids = whole.streams[0].ids
    for rows, page_size in ((2, 2), (7, 16), (64, 4)):
        async with halves(judge, dtype=torch.float32, deterministic=True, max_rows=rows, page_size=page_size) as system:
            parts = await asyncio.gather(
                *(call(system, again(opened, {0: ids[:count]}), clips=clips) for count in range(0, TOKENS + 1, 3))
            )
            for number, part in enumerate(parts):
                check(whole, part, {0: 3 * number}, exact=True)


async def test_one_that_gives_way_while_it_catches_up_goes_on_all_the_same(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64, max_rows=2, page_size=4) as system:
        opened = asked(system, clips=1, temperature=1.0, ignore_eos=True, logprobs=1, presence_penalty=1.0, n=2)
        whole = await call(system, opened, clips=1)
        ids = {number: stream.ids for number, stream in whole.streams.items()}
        first = await hold(system.decoder, text=1)
        scheduler = system.decoder.scheduler
        for at in ({0: 9}, {0: 12, 1: 4}, {0: TOKENS, 1: 3}):
            before = scheduler.preempted
            resumed = asyncio.create_task(call(system, _cut(opened, ids, at), clips=1))
            for _ in range(4):
                await until(partial(_runs_beside, scheduler, resumed))
                await system.decoder.stepping.make_way(first, partial(next, iter([False, True])))
            check(whole, await resumed, at)
            assert scheduler.preempted > before
        await system.decoder.release(first)


def _runs_beside(scheduler: Scheduler[DecodeSequence], call: asyncio.Task[Call]) -> bool:
    return scheduler.running > 1 or call.done()


async def test_answers_beside_one_that_is_resumed_are_those_that_each_has_alone(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        opened = asked(system, clips=1, temperature=1.0, ignore_eos=True)
        other = asked(system, temperature=1.0, ignore_eos=True, seed=9, max_tokens=40)
        whole, alone = await call(system, opened, clips=1), await call(system, other)
        ids = whole.streams[0].ids
        beside, resumed, wrong, ended = await asyncio.gather(
            call(system, other),
            call(system, again(opened, {0: ids[:7]}), clips=1),
            call(system, again(opened, {0: [*ids, 1]}), clips=1),
            call(system, again(opened, {0: ids}), clips=1),
        )
        check(alone, beside, {})
        check(whole, resumed, {0: 7})
        check(whole, ended, {0: TOKENS})
        assert isinstance(wrong.error, InvalidRequest) and not wrong.streams


async def test_what_is_found_of_an_answer_is_not_computed_again(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64, page_size=4) as system:
        opened = asked(system, clips=1, ignore_eos=True)
        whole = await call(system, opened, clips=1)
        before = system.decoder.scheduler.counts.rows
        part = await call(system, again(opened, {0: whole.streams[0].ids[:12]}), clips=1)
        check(whole, part, {0: 12})
        assert system.decoder.scheduler.counts.rows - before < 12
        assert part.usage is not None and whole.usage is not None
        assert part.usage.cached_prompt_tokens > part.usage.prompt_tokens - 4 >= whole.usage.cached_prompt_tokens


async def test_one_that_had_ended_ends_at_once_before_its_media_are_there(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        opened = asked(system, clips=1, ignore_eos=True, n=2, temperature=1.0)
        whole = await call(system, opened, clips=1)
        ids = {number: stream.ids for number, stream in whole.streams.items()}
        system.decoder.flush()
        rows = system.decoder.scheduler.counts.rows
        part = Call()
        async with aclosing(system.decode(again(opened, ids), shown(system), CLOSE)) as responses:
            async for response in responses:
                part.note(response, 2)
        check(whole, part, {0: TOKENS, 1: TOKENS})
        assert system.decoder.scheduler.counts.rows - rows <= 2 * len("Read the digits.") * 4
        assert "tokens" not in part.order and "visible" not in part.order


async def test_one_fills_the_pool_to_its_last_row(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64, page_size=1) as system:
        opened = asked(system, ignore_eos=True)
        whole = await call(system, opened)
        assert whole.usage is not None
        rows = whole.usage.prompt_tokens + TOKENS
    async with halves(judge, dtype=torch.float64, page_size=1, text_tokens=rows) as system:
        for count in range(TOKENS + 1):
            check(whole, await call(system, again(opened, {0: whole.streams[0].ids[:count]})), {0: count})
        opened.sampling.ClearField("max_tokens")
        check(whole, await call(system, again(opened, {0: whole.streams[0].ids})), {0: TOKENS})


async def test_the_prompt_is_told_by_the_digest_of_its_ids(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        told = await call(system, asked(system, max_tokens=1))
        (piece,) = system.decoder.prompt.turns([Turn("user", ("Read the digits.",))])
        assert isinstance(piece, Sequence)
        expected = blake3(b"".join(token.to_bytes(4, "little") for token in piece)).digest()
        assert told.admitted is not None and told.started is not None
        assert told.admitted.prompt_digest == told.started.prompt_digest == expected
        two = [await call(system, asked(system, clips=count, max_tokens=1), clips=count) for count in (1, 2)]
        assert len({one.started.prompt_digest for one in (told, *two) if one.started is not None}) == 3


async def test_a_medium_that_came_to_fewer_units_is_told_by_its_last_digest(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        opened = asked(system, clips=1, ignore_eos=True, temperature=1.0)
        whole = await call(system, opened, clips=1)

        async def shrinking(resumed: dpb.DecodeOpen) -> Call:
            told = Call()
            ready = await system.ready(frames(0)[:FRAMES])
            more = shown(system, FRAMES + 2, final=False)
            async with aclosing(system.decode(resumed, more, *ready, CLOSE, shown(system, revision=2))) as responses:
                async for response in responses:
                    told.note(response, resumed.attempt)
            return told

        ids = whole.streams[0].ids
        for count in (0, 5, TOKENS):
            part = await shrinking(again(opened, {0: ids[:count]}))
            assert part.started is not None and whole.started is not None
            assert part.started.prompt_digest == whole.started.prompt_digest
            assert part.streams[0].ids == ids[count:]


# -- what cannot be gone on with ---------------------------------------------------------------------------------------


async def _refused(system: Halves, opened: dpb.DecodeOpen) -> ChiasmError:
    told = await call(system, opened)
    assert told.error is not None and not told.streams
    return told.error


async def test_tokens_that_no_answer_could_hold_are_refused_by_their_place(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        opened = asked(system, n=2, temperature=1.0, ignore_eos=True, banned_token_ids=[7])
        pad = min(system.decoder.prompt.banned_ids)
        for emitted, item in (
            ({0: [3, system.decoder.vocabulary]}, "emitted[0].ids[1]"),
            ({0: [3], 1: [2**32 - 1]}, "emitted[1].ids[0]"),
            ({0: [pad]}, "emitted[0].ids[0]"),
            ({0: [3, 7]}, "emitted[0].ids[1]"),
            ({2: [3]}, "emitted[0].sequence"),
            ({0: [3] * (TOKENS + 1)}, "emitted"),
        ):
            error = await _refused(system, again(opened, emitted))
            assert (type(error), error.reason, error.item) == (InvalidRequest, "FIELD_OUT_OF_RANGE", item)
        twice = again(opened, {0: [3]})
        twice.emitted.add(sequence=0, ids=[3])
        assert (await _refused(system, twice)).item == "emitted[1].sequence"


async def test_tokens_behind_the_end_of_an_answer_are_refused(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        stop, other = min(system.decoder.prompt.stop_ids), system.decoder.prompt.text("a")[0]
        free = asked(system)
        error = await _refused(system, again(free, {0: [other, stop, other]}))
        assert (type(error), error.reason, error.item) == (InvalidRequest, "FIELD_OUT_OF_RANGE", "emitted")
        assert error.facts["value"] == 3
        string = asked(system, stop=["aa"])
        assert (await _refused(system, again(string, {0: [other] * 3}))).reason == "FIELD_OUT_OF_RANGE"
        check_end = await call(system, again(string, {0: [other] * 2}))
        assert check_end.streams[0].end is not None and check_end.streams[0].end.stop == "aa"


async def test_what_a_guide_would_not_have_let_come_is_not_resumable(judge: Oracle) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        prompt = system.decoder.prompt
        stop = min(prompt.stop_ids)
        guided = asked(system, guide=pb.Guide(regex="[ab]{2,4}"))
        for ids in (prompt.text("ax"), [*prompt.text("a"), stop], [*prompt.text("ab"), stop, *prompt.text("a")]):
            error = await _refused(system, again(guided, {0: ids}))
            assert (type(error), error.reason, error.code) == (ServerError, "NOT_RESUMABLE", "ABORTED")
        over = await _refused(system, again(guided, {0: prompt.text("ababa")}))
        assert over.reason == "NOT_RESUMABLE"
        ended = await call(system, again(guided, {0: [*prompt.text("ab"), stop]}))
        assert ended.streams[0].end is not None and ended.streams[0].end.reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize("mode", [dpb.SAMPLE_MODE_WHILE_OPEN, dpb.SAMPLE_MODE_ESTIMATE])
async def test_a_timeline_that_grows_is_not_gone_on_with(judge: Oracle, mode: dpb.SampleMode.ValueType) -> None:
    async with halves(judge, dtype=torch.float64) as system:
        opened = again(asked(system), {0: [3]})
        opened.sample = mode
        error = await _refused(system, opened)
        assert isinstance(error, Unsupported) and error.facts == {"field": "emitted"}
