"""Guided answers over `Decode` calls: whatever the model would say, what is told is of the language."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing
from typing import Any

import pytest

from chiasm.client import AsyncClient, SamplingParams
from chiasm.errors import ChiasmError, InvalidRequest, ServerError, Unsupported
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.guide import Guide
from tests.decoder_service.halves import CLOSE, Halves, Told, halves

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "digits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
        "sure": {"type": "boolean"},
        "of": {"enum": ["é", "😀", None]},
    },
    "required": ["name", "digits", "of"],
    "additionalProperties": False,
}


def valid(text: str) -> bool:
    """Against SCHEMA, by hand."""
    value = json.loads(text)
    return (
        set(value) - {"sure"} == {"name", "digits", "of"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and len(value["digits"]) <= 4
        and all(type(digit) is int and 0 <= digit <= 9 for digit in value["digits"])
        and isinstance(value.get("sure", True), bool)
        and value["of"] in ("é", "😀", None)
    )


async def answer(system: Halves, *, seed: int = 0, max_tokens: int = 400, **options: Any) -> Told:
    opened = system.opened("Q", max_tokens=max_tokens)
    opened.seed = seed
    opened.sampling.MergeFrom(pb.SamplingParams(**options))
    return await system.told(opened, CLOSE)


def choices(*strings: str) -> pb.Guide:
    return pb.Guide(choice=pb.Choices(choices=strings))


def ended(told: Told) -> bool:
    return told.finished is not None and told.finished.reason == pb.FINISH_REASON_STOP


async def refusal(system: Halves, **options: Any) -> ChiasmError:
    with pytest.raises(ChiasmError) as caught:
        await answer(system, **options)
    return caught.value


async def test_json_is_valid_whatever_is_drawn() -> None:
    guide = pb.Guide(json_schema=json.dumps(SCHEMA))
    async with halves() as system:
        told = await asyncio.gather(*(answer(system, seed=seed, guide=guide, temperature=1.0) for seed in range(24)))
        assert max(system.decoder.scheduler.counts.batches) > 1
        told.append(await answer(system, guide=guide))
        told.append(await answer(system, guide=guide, temperature=100.0, top_p=0.9, repetition_penalty=1.5))
    assert all(ended(one) and valid(one.text.decode()) for one in told)
    assert len({one.text for one in told}) > 10


async def test_a_choice_is_one_of_its_strings_and_all_of_them_come() -> None:
    strings = ("yes", "no", "né 😀", "yes, it is")
    async with halves() as system:
        told = [await answer(system, seed=seed, guide=choices(*strings), temperature=30.0) for seed in range(40)]
    assert {one.text.decode() for one in told} == set(strings)
    assert all(ended(one) for one in told)
    stop_ids = system.decoder.prompt.stop_ids
    for one in told:
        # Only where it may go on does it take the model's own end to say that it does not.
        assert (one.ids[-1] in stop_ids) == (one.text == b"yes")


@pytest.mark.parametrize("regex", [r"[0-9]{3}-[a-c]+x", r"(é|ü|😀){2,5}\.", r"\d{4}-\d{2}-\d{2}T?"])
async def test_an_expression_matches_the_whole_answer(regex: str) -> None:
    async with halves() as system:
        for seed in range(8):
            told = await answer(system, seed=seed, guide=pb.Guide(regex=regex), temperature=2.0)
            assert ended(told) and re.fullmatch(regex, told.text.decode())


async def test_a_grammar_bounds_the_answer() -> None:
    grammar = 'root ::= sum\nsum ::= term (("+" | "-") term){0,3}\nterm ::= [0-9]{1,2} | "(" [0-9] "*" [0-9] ")"'
    async with halves() as system:
        for seed in range(8):
            told = await answer(system, seed=seed, guide=pb.Guide(grammar=grammar), temperature=2.0)
            assert ended(told)
            assert re.fullmatch(r"(\d\d?|\(\d\*\d\))([+-](\d\d?|\(\d\*\d\))){0,3}", told.text.decode())


async def test_guided_and_free_answers_of_one_batch_are_those_that_each_has_alone() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.3, "ignore_eos": True, "logprobs": 2},
        {"guide": pb.Guide(json_schema=json.dumps(SCHEMA)), "temperature": 1.0},
        {"ignore_eos": True, "frequency_penalty": 0.5},
        {"guide": pb.Guide(regex="[a-z ]{5,40}"), "temperature": 1.0, "top_k": 4, "presence_penalty": 0.5},
    ]
    async with halves() as system:
        together = await asyncio.gather(*(answer(system, max_tokens=30, **kind) for kind in kinds))
        assert max(system.decoder.scheduler.counts.batches) == len(kinds)
        for kind, told in zip(kinds, together, strict=True):
            assert (await answer(system, max_tokens=30, **kind)).ids == told.ids


async def test_log_probabilities_are_those_of_the_tokens_that_the_guide_allows() -> None:
    async with halves() as system:
        opened = system.opened("Q", max_tokens=6)
        opened.sampling.MergeFrom(pb.SamplingParams(logprobs=20, temperature=1.0, guide=choices("7", "9")))
        async with aclosing(system.decode(opened, CLOSE)) as responses:
            (tokens,) = [response.tokens async for response in responses if response.HasField("tokens")]
        (place,) = tokens.logprobs
        digits = {token for digit in "79" for token in system.decoder.prompt.text(digit)}
        assert {other.token_id for other in place.top} == digits and place.drawn.token_id in digits
        assert sum(2.718281828459045**other.logprob for other in place.top) == pytest.approx(1)


async def test_a_guide_goes_with_the_other_ways_to_end() -> None:
    letters = pb.Guide(regex="[ab]{1,6}")
    async with halves() as system:
        bias = [pb.LogitBias(token_id=token, bias=1000) for token in system.decoder.prompt.stop_ids]
        short = await answer(system, guide=letters, logit_bias=bias)
        assert len(short.text) == 1 and ended(short) and len(short.ids) == 2
        least = await answer(system, guide=letters, logit_bias=bias, min_tokens=4)
        assert len(least.text) == 4 and ended(least)
        beyond = await answer(system, guide=letters, logit_bias=bias, min_tokens=100)
        assert len(beyond.text) == 6 and ended(beyond) and len(beyond.ids) == 6, "there is no more to say"
        onward = await answer(system, guide=letters, logit_bias=bias, ignore_eos=True)
        assert len(onward.text) == 6 and ended(onward)
        cut = await answer(system, guide=pb.Guide(regex="a+"), max_tokens=5, ignore_eos=True)
        assert cut.text == b"aaaaa" and cut.finished is not None
        assert cut.finished.reason == pb.FINISH_REASON_LENGTH
        stopped = await answer(system, guide=pb.Guide(regex="abcdef"), stop=["cd"])
        assert stopped.text == b"ab" and stopped.finished is not None and stopped.finished.stop == "cd"
        (c,) = system.decoder.prompt.text("c")
        by_token = await answer(system, guide=pb.Guide(regex="abcdef"), stop_token_ids=[c])
        assert by_token.text == b"abc" and ended(by_token)
        (x,) = system.decoder.prompt.text("x")
        bias = [pb.LogitBias(token_id=x, bias=1000)]
        never = await answer(
            system, guide=pb.Guide(regex="(ab){1,3}"), stop_token_ids=[x], logit_bias=bias, ignore_eos=True
        )
        assert never.text == b"ababab", "a token with a text is no end where the guide does not allow that text"
        spoken = system.decoder.prompt.stop_ids | {system.decoder.prompt.silence_id}
        other = sorted(token for token in spoken if token not in system.decoder.prompt.stop_ids and token is not None)
        own = [pb.LogitBias(token_id=token, bias=1000) for token in other]
        told = await answer(system, guide=letters, logit_bias=own, stop_token_ids=other, ignore_eos=True)
        assert len(told.text) == 1 and told.ids[-1] in other, "a control token that ends this answer is an end like any"


async def test_what_bans_leave_nothing_of_fails_and_disturbs_nobody() -> None:
    async with halves() as system:
        (seven,) = system.decoder.prompt.text("7")
        free = await answer(system, max_tokens=12, ignore_eos=True)
        told, error = await asyncio.gather(
            answer(system, max_tokens=12, ignore_eos=True),
            refusal(system, guide=choices("7"), banned_token_ids=[seven]),
        )
        assert told.ids == free.ids
        assert isinstance(error, ServerError) and error.reason == "NONFINITE"


async def test_a_guide_that_becomes_too_much_fails_its_own_answer_alone() -> None:
    async with halves() as system:
        free = await answer(system, max_tokens=12, ignore_eos=True)
        # Behind as many words as are looked at beforehand.
        late = pb.Guide(regex="[0-9]{20}(a{1000}){1000}")
        told, error = await asyncio.gather(
            answer(system, max_tokens=12, ignore_eos=True),
            refusal(system, max_tokens=60, guide=late),
        )
        assert told.ids == free.ids
        assert (type(error), error.reason, error.item) == (InvalidRequest, "SCHEMA_INVALID", "regex")


@pytest.mark.parametrize(
    ("guide", "reason", "field"),
    [
        (pb.Guide(), "FIELD_MISSING", "guide"),
        (pb.Guide(json_schema='{"type": "strng"}'), "SCHEMA_INVALID", "json_schema"),
        (pb.Guide(json_schema="false"), "SCHEMA_INVALID", "json_schema"),
        (pb.Guide(regex="(a{1000}){1000}"), "SCHEMA_INVALID", "regex"),
        (pb.Guide(regex="a" * 65_537), "FIELD_OUT_OF_RANGE", "regex"),
        (pb.Guide(json_schema='{"items":' * 3000 + "{}" + "}" * 3000), "SCHEMA_INVALID", "json_schema"),
        (pb.Guide(grammar="root := 3"), "SCHEMA_INVALID", "grammar"),
        (choices(), "FIELD_OUT_OF_RANGE", "choice"),
        (choices("a", ""), "FIELD_OUT_OF_RANGE", "choice"),
        (choices(*["a"] * 1025), "FIELD_OUT_OF_RANGE", "choice"),
        (choices("a" * 40_000, "b" * 40_000), "FIELD_OUT_OF_RANGE", "choice"),
    ],
)
async def test_b134_what_cannot_be_followed_is_refused_before_anything_is_told(
    guide: pb.Guide, reason: str, field: str
) -> None:
    async with halves() as system:
        opened = system.opened("Q")
        opened.sampling.guide.CopyFrom(guide)
        told = Told()
        with pytest.raises(InvalidRequest) as caught:
            async with aclosing(system.decode(opened, CLOSE)) as responses:
                async for response in responses:
                    told.note(response)
        assert told.admitted is None
        assert (caught.value.reason, caught.value.item) == (reason, field)


async def test_a_timeline_that_grows_while_it_answers_takes_no_guide() -> None:
    async with halves() as system:
        opened = system.opened("Q")
        opened.sample = dpb.SAMPLE_MODE_WHILE_OPEN
        opened.sampling.guide.regex = "a"
        with pytest.raises(Unsupported) as caught:
            await system.told(opened, CLOSE)
        assert caught.value.reason == "FEATURE_DISABLED" and caught.value.facts == {"field": "guide"}


async def test_a_free_answer_asks_no_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("nobody asked for a guide")

    monkeypatch.setattr(Guide, "fill", never)
    async with halves() as system:
        assert ended(await answer(system, max_tokens=40))


async def test_a_client_asks_for_each_kind_of_guide() -> None:
    async with AsyncClient.in_process("digits") as client:

        async def text(**options: Any) -> str:
            sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=300, **options)
            told = await client.generate("digits", "Read the digits.", sampling=sampling)
            assert told.finish_reason == "stop"
            return told.text

        assert valid(await text(json_schema=SCHEMA))
        assert re.fullmatch("[a-c]{3}", await text(regex="[a-c]{3}"))
        assert await text(choice=["ünë", "deux"]) in {"ünë", "deux"}
        assert re.fullmatch(r"\(*\d\)*", await text(grammar='root ::= "(" root ")" | [0-9]'))
        with pytest.raises(InvalidRequest) as caught:
            await text(regex="(")
        assert (caught.value.reason, caught.value.item) == ("SCHEMA_INVALID", "regex")
