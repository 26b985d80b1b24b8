"""Sampling options over a `Decode` call: what is refused, and what each does to an answer."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from chiasm.errors import InvalidRequest
from chiasm.rpc.v1 import common_pb2 as pb
from decoder_service.options import Options, read_options
from tests.decoder_service.halves import CLOSE, Halves, Told, halves


def read(**options: Any) -> Options:
    return read_options(pb.SamplingParams(**options), 0, 447)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.5),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.5),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("stop_token_ids", [447]),
        ("banned_token_ids", range(447)),
        ("logit_bias", [pb.LogitBias(token_id=447, bias=1)]),
        ("logit_bias", [pb.LogitBias(token_id=1, bias=math.nan)]),
        ("logit_bias", [pb.LogitBias(token_id=1, bias=math.inf)]),
        ("logit_bias", [pb.LogitBias(token_id=1, bias=1), pb.LogitBias(token_id=1, bias=2)]),
        ("stop", [""]),
        ("stop", ["x" * 257]),
        ("stop", ["é" * 129]),
        ("stop", ["x"] * 17),
    ],
)
def test_b127_to_b133_what_is_out_of_range_is_refused_with_its_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**{field: value})
    error = caught.value
    assert (error.reason, error.item, error.facts["field"]) == ("FIELD_OUT_OF_RANGE", field, field)


def test_fewest_tokens_are_no_more_than_the_most() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 5, must be at most max_tokens"):
        read(min_tokens=5, max_tokens=4)
    read(min_tokens=5)


def test_what_is_not_said_has_the_values_that_the_protocol_gives() -> None:
    options = read_options(pb.SamplingParams(), 7, 447)
    assert options.drawing.plain and options.skip_special_tokens and not options.ignore_eos
    said = pb.SamplingParams(
        temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1, n=1, skip_special_tokens=True
    )
    assert read_options(said, 7, 447).drawing.plain


async def answer(system: Halves, *, max_tokens: int = 12, **options: Any) -> Told:
    opened = system.opened("Q", max_tokens=max_tokens)
    opened.sampling.MergeFrom(pb.SamplingParams(**options))
    return await system.told(opened, CLOSE)


async def test_every_option_of_the_wire_is_served() -> None:
    values: dict[str, object] = {
        "logit_bias": [pb.LogitBias(token_id=1, bias=1)],
        "stop": ["."],
        "stop_token_ids": [1],
        "banned_token_ids": [1],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "guide": pb.Guide(regex="a+"),
    }
    async with halves() as system:
        for field in pb.SamplingParams.DESCRIPTOR.fields:
            option: dict[str, Any] = {field.name: values.get(field.name, 1)}
            assert (await answer(system, **option)).finished is not None


def likely(system: Halves, characters: str) -> list[pb.LogitBias]:
    """Biases with which nothing but the tokens of these characters is drawn."""
    ids = [token for character in characters for token in system.decoder.prompt.text(character)]
    assert len(ids) == len(characters)
    return [pb.LogitBias(token_id=token, bias=1000) for token in ids]


async def test_a_stop_string_ends_the_answer_and_is_no_part_of_it() -> None:
    async with halves() as system:
        digits: dict[str, Any] = {"logit_bias": likely(system, "0123456789"), "temperature": 50.0}
        whole = await answer(system, **digits)
        text = whole.text.decode()
        assert len(text) == len(whole.ids) == 12
        stop = text[3:5]
        told = await answer(system, stop=["never", stop], **digits)
        assert told.text.decode() == text[: text.index(stop)]
        assert told.finished is not None
        assert (told.finished.reason, told.finished.stop) == (pb.FINISH_REASON_STOP, stop)
        assert told.ids == whole.ids[: len(told.ids)] and told.finished.tokens == len(told.ids)
        held = await answer(system, stop=[text[-2:] + "!"], **digits)
        assert held.text == whole.text and held.finished is not None
        assert (held.finished.text.decode(), held.finished.stop) == (text[-2:], "")
        assert held.finished.reason == pb.FINISH_REASON_LENGTH


async def test_an_answer_does_not_end_before_its_fewest_tokens() -> None:
    async with halves() as system:
        plain = await answer(system, max_tokens=40)
        assert plain.finished is not None and plain.finished.reason == pb.FINISH_REASON_STOP
        longer = await answer(system, max_tokens=40, min_tokens=len(plain.ids) + 3)
        assert len(longer.ids) > len(plain.ids) + 3
        assert longer.ids[: len(plain.ids) - 1] == plain.ids[:-1] and plain.ids[-1] not in longer.ids[:-1]
        sevens: dict[str, Any] = {"logit_bias": likely(system, "7"), "stop": ["7"]}
        told = await answer(system, min_tokens=4, **sevens)
        assert (len(told.ids), told.text) == (5, b"7777")
        told = await answer(system, **sevens)
        assert (len(told.ids), told.text) == (1, b"")


async def test_control_tokens_have_a_text_only_where_it_is_asked_for() -> None:
    async with halves() as system:
        hidden = await answer(system)
        shown = await answer(system, skip_special_tokens=False)
    assert shown.ids == hidden.ids
    assert shown.text == hidden.text + b"<|im_end|>"


async def test_log_probabilities_come_with_each_token() -> None:
    async with halves() as system:
        opened = system.opened("Q", max_tokens=6)
        opened.sampling.MergeFrom(pb.SamplingParams(logprobs=3, ignore_eos=True, temperature=1.5))
        told: list[pb.Tokens] = []
        async with aclosing(system.decode(opened, CLOSE)) as responses:
            async for response in responses:
                if response.HasField("tokens"):
                    told.append(response.tokens)
        for tokens in told:
            (place,) = tokens.logprobs
            assert place.drawn.token_id == tokens.ids[0]
            top = {other.token_id: other.logprob for other in place.top}
            assert len(top) == 3 and list(top.values()) == sorted(top.values(), reverse=True)
            assert place.drawn.logprob == top.get(place.drawn.token_id, place.drawn.logprob) <= 0
            assert not top.keys() & system.decoder.prompt.banned_ids
        assert not any(len(tokens.logprobs) for tokens in await tokens_of(system))


async def tokens_of(system: Halves) -> list[pb.Tokens]:
    async with aclosing(system.decode(system.opened("Q", max_tokens=3), CLOSE)) as responses:
        return [response.tokens async for response in responses if response.HasField("tokens")]


async def test_penalties_count_what_was_drawn_and_read() -> None:
    async with halves() as system:
        repeated = await answer(system, max_tokens=30, ignore_eos=True)
        assert len(set(repeated.ids)) < 20
        frequency = await answer(system, max_tokens=30, ignore_eos=True, frequency_penalty=2.0)
        assert len(set(frequency.ids)) > len(set(repeated.ids))
        # Of two tokens that are far likelier than all others, the likelier one is in the prompt.
        (read,), (other,) = system.decoder.prompt.text("Q"), system.decoder.prompt.text("7")
        biased = [pb.LogitBias(token_id=read, bias=1000), pb.LogitBias(token_id=other, bias=500)]
        for penalty, expected in ((1.0, [read] * 3), (10.0, [other, read, read])):
            assert (await answer(system, max_tokens=3, logit_bias=biased, repetition_penalty=penalty)).ids == expected
        presence = await answer(system, max_tokens=3, logit_bias=likely(system, "7"), presence_penalty=2.0)
        assert presence.ids == [other] * 3, "it is subtracted once"


async def test_a_bias_makes_a_token_sure_and_bans_hold_against_it() -> None:
    async with halves() as system:
        pad = min(system.decoder.prompt.banned_ids)
        biased = [pb.LogitBias(token_id=5, bias=1000), pb.LogitBias(token_id=pad, bias=2000)]
        told = await answer(system, max_tokens=3, ignore_eos=True, temperature=1.0, logit_bias=biased)
        assert told.ids == [5, 5, 5]


async def test_few_likely_tokens_are_drawn_where_only_they_are_kept() -> None:
    async with halves() as system:
        greedy = await answer(system, ignore_eos=True)
        options: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
        for option in options:
            assert (await answer(system, ignore_eos=True, temperature=50.0, **option)).ids == greedy.ids
        free = await answer(system, ignore_eos=True, temperature=50.0)
        assert free.ids != greedy.ids


async def test_answers_with_all_kinds_of_options_are_those_that_each_has_alone() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.3},
        {"temperature": 1.3, "top_k": 5, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.7, "frequency_penalty": 0.4},
        {"temperature": 2.0, "min_p": 0.05, "repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "logit_bias": [pb.LogitBias(token_id=7, bias=3)]},
    ]
    async with halves() as system:
        together = await asyncio.gather(*(answer(system, ignore_eos=True, **kind) for kind in kinds))
        assert max(system.decoder.scheduler.counts.batches) == len(kinds)
        for kind, told in zip(kinds, together, strict=True):
            assert (await answer(system, ignore_eos=True, **kind)).ids == told.ids


def test_biases_are_read_as_they_were_sent() -> None:
    sent = pb.SamplingParams(logit_bias=[pb.LogitBias(token_id=9, bias=1.5), pb.LogitBias(token_id=2, bias=-1)])
    ids, values = read_options(sent, 0, 447).drawing.bias
    np.testing.assert_array_equal(ids, [9, 2])
    np.testing.assert_array_equal(values, [1.5, -1])
