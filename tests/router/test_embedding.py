"""Embeddings through the router: media and decoders as for an answer, one vector whatever is lost on the way, and
nothing left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from chiasm.client import AsyncClient, Content, Frames, Image
from chiasm.errors import ChiasmError, DeadlineExceeded, InvalidRequest, Unavailable, Unsupported
from chiasm.rpc.tensor import Gathered
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.embedding import Embedding
from router.fleet import Served
from router.media import Inline
from tests import digits
from tests.asking import Part, Vector, ask, embed, embedding_of, gathered, image, question, running, video
from tests.decoder_service.oracle import Clip, Oracle, Replay
from tests.decoder_service.test_pooled import close
from tests.e2e.test_requests import settled
from tests.faults.stages import Stages
from tests.fuzz.timelines import frames, oracle
from tests.router.scripted import Meddle, MeddledFleet, untouched
from tests.router.test_coordinator import dies_before
from tests.waiting import until

CLIP = digits.shipped_clips()[-1]
TEXT = "Read the digits."


def request_of(*parts: Part, system: str | None = None, **options: Any) -> rpb.EmbedRequest:
    return embedding_of(question(*parts, system=system), **options)


async def through(fleet: MeddledFleet, request: rpb.EmbedRequest, *, deadline: float | None = None) -> Vector:
    sources = [Inline(medium) for medium in request.media]
    work = Embedding(request, sources, fleet, fleet.served, tenant_root=bytes(32), deadline=deadline)
    return await gathered(work.run())


async def test_it_is_the_vector_of_an_undivided_pass_of_both_halves() -> None:
    judge: Oracle = oracle("digits")
    pictures = frames(3)[:3]
    clips = {0: Clip(pictures[:2], [0.0, 1.5]), 1: Clip(pictures[2:], [0.0], pb.MEDIA_KIND_IMAGE)}
    opened = dpb.DecodeOpen()
    turn = opened.prompt.conversation.turns.add(role=pb.ROLE_USER)
    for part in (pb.Part(slot=0), pb.Part(text="and"), pb.Part(slot=1)):
        turn.parts.append(part)
    replay = Replay(judge, opened, clips)
    replay.lay_prompt()
    wanted = judge.states(replay.timeline, clips)[-1].numpy()
    async with AsyncClient.in_process("digits") as client:
        content: Content = [Frames(pictures[:2], timestamps=[0.0, 1.5]), "and", Image(pictures[2])]
        raw = await client.embed("digits", content, normalize=False)
        unit = await client.embed("digits", content)
        told = await client.generate("digits", content, max_tokens=1)
    close(raw.vector, wanted, 1e-5)
    close(unit.vector, wanted / np.linalg.norm(wanted), 1e-5)
    assert unit.vector.dtype == np.float32 and abs(float(np.linalg.norm(unit.vector)) - 1) < 1e-6
    assert (raw.usage.prompt_tokens, raw.usage.visual_tokens) == (told.usage.prompt_tokens, told.usage.visual_tokens)
    assert [medium.frames_used for medium in raw.usage.media] == [2, 1] and raw.usage.output_tokens == 0


async def test_units_are_shared_with_answers_and_what_runs_together_is_itself() -> None:
    requests = [
        request_of(TEXT, video(CLIP.path.read_bytes())),
        request_of(TEXT),
        request_of(image(digits.shipped_images()[0][0].read_bytes()), TEXT),
        request_of(TEXT, system="Be brief."),
    ]
    async with running() as service:
        alone = [await embed(service, one) for one in requests]
        made = service.encoder.counts.encoded_units
        asking = [asyncio.create_task(ask(service, question(TEXT, video(CLIP.path.read_bytes())))) for _ in range(4)]
        company = await asyncio.gather(*(embed(service, one) for one in requests * 4))
        for one, other in zip(company, alone * 4, strict=True):
            np.testing.assert_allclose(one.numbers, other.numbers, rtol=0, atol=1e-5)
        assert {answer.text for answer in await asyncio.gather(*asking)} == {CLIP.answer}
        assert service.encoder.counts.encoded_units == made, "nothing is encoded twice"
        assert len({one.numbers.tobytes() for one in alone}) == len(requests)
        await settled(service)


# -- what is lost ------------------------------------------------------------------------------------------------------


def damaged(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
    assert isinstance(response, dpb.DecodeResponse)
    if number == 1 and response.HasField("states"):
        response.states.data = response.states.data[:-1] + bytes([response.states.data[-1] ^ 1])
    return True


def swallowed(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> Any:
    """The vector of the first call is not told."""
    assert isinstance(response, dpb.DecodeResponse)
    if number == 1 and response.HasField("states"):
        response.ClearField("states")
    return True


@pytest.mark.parametrize(
    "meddle",
    [*map(dies_before, ("admitted", "attached", "started", "states", "finished")), damaged, swallowed],
    ids=["admitted", "attached", "started", "states", "finished", "damaged", "swallowed"],
)
async def test_a_decoder_that_is_lost_or_says_what_cannot_be_is_replaced_and_nobody_sees_it(meddle: Meddle) -> None:
    request = request_of(TEXT, video(CLIP.path.read_bytes()))
    async with running() as service:
        expected = await embed(service, request)
        made = service.encoder.counts.encoded_units
        fleet = MeddledFleet(service, decoder=meddle)
        got = await through(fleet, request)
        np.testing.assert_allclose(got.numbers, expected.numbers, rtol=0, atol=1e-6)
        assert got.finished.usage.prompt_tokens == expected.finished.usage.prompt_tokens
        assert fleet.decoders is not None and fleet.decoders.calls == 2 and len(fleet.lost_workers) == 1
        assert service.encoder.counts.encoded_units <= 2 * made, "of another tenant, once"
        await settled(service)


async def test_an_encoder_that_is_lost_is_replaced() -> None:
    request = request_of(TEXT, video(CLIP.path.read_bytes()))
    async with running() as service:
        expected = await embed(service, request)
        got = await through(MeddledFleet(service, encoder=dies_before("ready")), request)
        np.testing.assert_allclose(got.numbers, expected.numbers, rtol=0, atol=1e-6)
        await settled(service)


async def test_what_ends_two_decoders_is_not_given_to_a_third() -> None:
    async with running() as service:
        fleet = MeddledFleet(service, decoder=dies_before("started", times=9))
        with pytest.raises(InvalidRequest) as caught:
            await through(fleet, request_of(TEXT))
        assert caught.value.reason == "POISON_INPUT" and fleet.decoders is not None and fleet.decoders.calls == 2
        await settled(service)


# -- leaving, and time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["sandbox", "encode", "put", "get", "prefill"])
async def test_who_leaves_at_whatever_stage_leaves_nothing(stage: str) -> None:
    request = request_of(TEXT, video(CLIP.path.read_bytes()))
    async with running() as service:
        stages = Stages(service)
        held = stages.hold(stage)
        asking = asyncio.create_task(embed(service, request))
        try:
            await held.reached()
            asking.cancel()
            await asyncio.sleep(0)
        finally:
            held.go_on()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert service.router.admission.requests == 0
        await settled(service)
        await embed(service, request)
        await settled(service)


@pytest.mark.parametrize(("at", "stage"), [("encode", "encode"), ("prefill", "prefill")])
async def test_a_deadline_names_the_stage_at_which_it_passed(at: str, stage: str) -> None:
    request = request_of(TEXT, video(CLIP.path.read_bytes()))
    async with running() as service:
        stages = Stages(service)
        for seconds in (2.0, 8.0, 30.0):  # a busy machine may need more to come to that stage
            await service.store.flush()
            service.decoder.flush()
            held = stages.hold(at)
            asking = asyncio.create_task(through(MeddledFleet(service), request, deadline=time.monotonic() + seconds))
            await until(lambda: held.held or asking.done(), seconds=60)  # noqa: B023 - awaited here
            reached = held.held
            await asyncio.sleep(0 if asking.done() else seconds)
            held.go_on()
            with pytest.raises(DeadlineExceeded) as caught:
                await asking
            await settled(service)
            if reached:
                break
        assert caught.value.stage == stage


async def test_a_router_that_ends_lets_go_of_it() -> None:
    async with running() as service:
        stages = Stages(service)
        held = stages.hold("prefill")
        asking = asyncio.create_task(embed(service, request_of(TEXT)))
        try:
            await held.reached()
            await service.router.let_go()
        finally:
            held.go_on()
        with pytest.raises(Unavailable) as caught:
            await asking
        assert caught.value.reason == "DRAINING"
        await settled(service)


# -- what is refused, told and counted ---------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], rpb.EmbedRequest], str]] = {
    "a type of integers": (lambda: request_of(TEXT, dtype=pb.DTYPE_INT8), "FEATURE_DISABLED"),
    "a type nobody knows": (lambda: request_of(TEXT, dtype=77), "FEATURE_DISABLED"),
    "an adapter": (lambda: request_of(TEXT, adapter="a"), "FEATURE_DISABLED"),
    "a budget": (lambda: request_of(TEXT, budget=pb.MediaBudget(max_frames=3)), "FEATURE_DISABLED"),
    "no text": (lambda: request_of(""), "EMPTY_PROMPT"),
    "no prompt": (lambda: rpb.EmbedRequest(model="digits"), "FIELD_MISSING"),
    "another model": (lambda: rpb.EmbedRequest(model="digit", prompt=request_of(TEXT).prompt), "MODEL_NOT_FOUND"),
    "too long": (lambda: request_of("1 " * 9000), "CONTEXT_LENGTH_EXCEEDED"),
    "too many ids": (
        lambda: rpb.EmbedRequest(
            model="digits",
            prompt=pb.Prompt(plain=pb.PlainPrompt(parts=[pb.Part(tokens=pb.TokenRun(ids=[5] * 8193))])),
        ),
        "CONTEXT_LENGTH_EXCEEDED",
    ),
    "no picture": (lambda: request_of(TEXT, image(b"nothing")), "MEDIA_UNSUPPORTED"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    make, reason = REFUSED[case]
    async with running() as service:
        with pytest.raises(ChiasmError) as caught:
            await embed(service, make())
        assert caught.value.reason == reason
        await settled(service)


async def test_types_of_16_bits_are_sent_as_they_are() -> None:
    async with running() as service:
        whole = await embed(service, request_of(TEXT))
        vector = Gathered()
        async with aclosing(service.router.embed(request_of(TEXT, dtype=pb.DTYPE_FLOAT16))) as events:
            async for event in events:
                if event.HasField("embedding"):
                    vector.add(event.embedding)
    assert vector.whole
    got = np.frombuffer(vector.data, dtype=np.float16)
    np.testing.assert_allclose(got.astype(np.float32), whole.numbers, rtol=1e-3, atol=1e-5)


async def test_models_say_that_they_embed_and_those_that_do_not_are_not_asked() -> None:
    async with running() as service:
        (model,) = (await service.router.models()).models
        assert [*model.operations] == [rpb.OPERATION_GENERATE, rpb.OPERATION_CONDITION, rpb.OPERATION_EMBED]
        await embed(service, request_of(TEXT))
        samples = [sample for metric in service.router.meter.collect() for sample in metric.samples]
        (counted,) = [
            one.value
            for one in samples
            if one.name == "chiasm_requests_total" and one.labels == {"operation": "embed", "reason": "OK"}
        ]
        assert counted == 1
        fleet = MeddledFleet(service, decoder=untouched)
        served = fleet.served
        older = Served(
            served.name,
            served.fingerprint,
            served.family,
            served.context_limit,
            served.layers,
            embeds=False,
            conditions=False,
        )
        fleet.models = lambda: {served.name: older}  # type: ignore[method-assign]

        async def known() -> dict[str, Served]:
            return {served.name: older}

        fleet.known = known  # type: ignore[method-assign]
        service.router.fleet = fleet
        assert [*(await service.router.models()).models[0].operations] == [rpb.OPERATION_GENERATE]
        with pytest.raises(Unsupported) as caught:
            await embed(service, request_of(TEXT))
        assert caught.value.reason == "OPERATION_UNSUPPORTED"
