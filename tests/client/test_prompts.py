"""Prompts of a caller's own tokenizer, options of sampling, what a prompt would cost, and what it is as a vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chiasm.client import AsyncClient, Client, Embedding, Estimate, Image, Message, SamplingParams, Video
from chiasm.errors import InvalidRequest, ServerError
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.client import fake
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


async def test_an_embedding_is_a_vector_and_what_it_used() -> None:
    router = ScriptedRouter()
    async with serving(router) as server, AsyncClient(server.target) as client:
        embedding = await client.embed("fake", ["What?", Image(b"\x89PNG")], system="Be brief.", request_id="mine")
        await client.embed("fake", token_ids=[1, 2], normalize=False)
    assert isinstance(embedding, Embedding)
    assert embedding.request_id == "mine"
    assert embedding.vector.dtype == np.float32 and embedding.vector.tolist() == fake.VECTOR.tolist()
    assert embedding.usage.prompt_tokens == 30
    first, second = router.embeds
    assert [turn.role for turn in first.prompt.conversation.turns] == [pb.ROLE_SYSTEM, pb.ROLE_USER]
    assert (first.request_id, first.model, len(first.media), first.normalize) == ("mine", "fake", 1, True)
    assert (first.dtype, second.normalize) == (pb.DTYPE_FLOAT32, False)
    assert list(second.prompt.plain.parts[0].tokens.ids) == [1, 2]


@pytest.mark.parametrize(
    "came",
    [
        fake.embedding()[:1],
        fake.embedding()[1:],
        fake.embedding(b"x" * 12, pb.DTYPE_FLOAT16),
        fake.embedding(b"x" * 23),
        [*fake.embedding()[:1], *fake.embedding()],
    ],
    ids=["no end", "no vector", "another type", "a byte short", "twice"],
)
async def test_a_vector_that_is_not_whole_is_an_error_of_the_server(came: list[rpb.EmbedResponse]) -> None:
    router = ScriptedRouter()
    router.embedding = came
    async with serving(router) as server, AsyncClient(server.target) as client:
        with pytest.raises(ServerError) as caught:
            await client.embed("fake", "What?")
    assert caught.value.reason == "INTERNAL"


async def test_an_embedding_takes_one_prompt_and_no_sampling() -> None:
    async with AsyncClient("localhost:1") as client:
        for options in ({}, {"messages": [Message("user", "a")], "system": "b"}, {"token_ids": [1], "system": "b"}):
            with pytest.raises(TypeError):
                await client.embed("fake", **options)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="normalize"):
            await client.embed("fake", "a", normalize=1)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await client.embed("fake", "a", max_tokens=3)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest) as caught:
            await client.embed("fake", "")
    assert caught.value.reason == "EMPTY_PROMPT"
