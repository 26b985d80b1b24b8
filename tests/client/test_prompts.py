"""Prompts of a caller's own tokenizer, options of sampling, and what a prompt would cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chiasm.client import AsyncClient, Client, Estimate, Image, Message, SamplingParams, Video
from chiasm.errors import InvalidRequest
from tests.client.fake import FakeTransport
from tests.client.router import ScriptedRouter, serving


def asked(**options: Any) -> Any:
    transport = FakeTransport()
    with Client(transport=transport.opener) as client:
        client.generate("fake", **options)
    return transport.requests[0]


def test_token_ids_are_laid_as_they_are() -> None:
    request = asked(token_ids=[5, 0, 2**32 - 1])
    (part,) = request.prompt.plain.parts
    assert (list(part.tokens.ids), part.tokens.pads_bind_slots) == ([5, 0, 2**32 - 1], False)
    assert not request.media


def test_pads_of_a_callers_tokenizer_stand_for_its_media() -> None:
    request = asked(token_ids=(5, 99, 99, 6), media=[Image(b"a"), Video(b"b", fps=2)])
    (part,) = request.prompt.plain.parts
    assert part.tokens.pads_bind_slots
    assert [(medium.data, medium.sampling.fps) for medium in request.media] == [(b"a", 0), (b"b", 2)]
    assert len(asked(token_ids=[5], media=Image(b"a")).media) == 1


@pytest.mark.parametrize("ids", ["text", 7, [1.0], [True], [[1, 2]], np.array([1, 2]), ["1"], {"input_ids": [1]}])
def test_what_is_no_flat_list_of_ints_is_a_type_error(ids: Any) -> None:
    with pytest.raises(TypeError, match="token_ids"):
        asked(token_ids=ids)


@pytest.mark.parametrize("token", [-1, 2**32, 10**400])
def test_an_id_that_no_vocabulary_has_is_refused_by_its_place(token: int) -> None:
    with pytest.raises(InvalidRequest, match=r"token_ids\[1\]") as caught:
        asked(token_ids=[1, token])
    assert caught.value.reason == "FIELD_OUT_OF_RANGE"


def test_an_empty_prompt_is_refused_and_a_fault_of_a_medium_names_its_place() -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(token_ids=[])
    assert caught.value.reason == "EMPTY_PROMPT"
    with pytest.raises(InvalidRequest) as caught:
        asked(token_ids=[1, 2], media=[Image(b"a"), Image(b"")])
    assert (caught.value.reason, caught.value.item) == ("MEDIA_EMPTY", "media[1]")


@pytest.mark.parametrize(
    "options",
    [
        {"content": "a", "token_ids": [1]},
        {"messages": [Message("user", "a")], "token_ids": [1]},
        {"content": "a", "media": [Image(b"x")]},
        {"token_ids": [1], "media": ["clip.mp4"]},
        {},
    ],
    ids=["content", "messages", "media", "path", "nothing"],
)
def test_the_ways_to_give_a_prompt_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        asked(**options)


def test_options_of_sampling_reach_the_wire() -> None:
    sampling = SamplingParams(stop_token_ids=[3, 4], banned_token_ids=(5,), ignore_eos=True)
    sent = asked(content="a", sampling=sampling).sampling
    assert (list(sent.stop_token_ids), list(sent.banned_token_ids), sent.ignore_eos) == ([3, 4], [5], True)
    plain = asked(content="a").sampling
    assert (len(plain.stop_token_ids), plain.HasField("ignore_eos")) == (0, False)
    hash(sampling)


@pytest.mark.parametrize("options", [{"stop_token_ids": 3}, {"banned_token_ids": ["a"]}, {"ignore_eos": 1}])
def test_sampling_of_another_kind_is_a_type_error(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        SamplingParams(**options)


async def test_an_estimate_says_what_a_prompt_would_cost() -> None:
    router = ScriptedRouter()
    async with serving(router) as server, AsyncClient(server.target) as client:
        estimate = await client.estimate("fake", ["What?", Video(b"clip", max_frames=4)], request_id="mine")
        await client.estimate("fake", token_ids=[1, 2])
    assert isinstance(estimate, Estimate)
    assert (estimate.prompt_tokens, estimate.visual_tokens, estimate.context_limit, estimate.room) == (30, 15, 64, 34)
    assert estimate.fits_with == ""
    (medium,) = estimate.media
    assert (medium.usage.frames_used, medium.entry_bytes) == (3, 1 << 20)
    first, second = router.estimates
    assert (first.request_id, first.model, first.media[0].sampling.max_frames) == ("mine", "fake", 4)
    assert list(second.prompt.plain.parts[0].tokens.ids) == [1, 2]
