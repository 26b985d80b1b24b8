"""States after layers through the router: told as they come, one decoder for another before the first of them, and a
cut decoder beside a whole one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from chiasm.errors import ChiasmError, InvalidRequest, Unavailable, Unsupported
from chiasm.local import LocalService, LocalSettings
from chiasm.rpc.tensor import GatheredAll
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.conditioning import Conditioning
from router.fleet import does
from router.media import Inline
from router.member_fleet import _served, _together
from tests import checkpoints_qwen3_vl, digits
from tests.asking import Part, question, running, video
from tests.e2e.test_requests import settled
from tests.faults.stages import Stages
from tests.router.scripted import Meddle, MeddledFleet
from tests.router.test_coordinator import dies_before

CLIP = digits.shipped_clips()[-1]
TEXT = "Read the digits."


class Told(NamedTuple):
    """What a request was told."""

    arrays: list[npt.NDArray[np.float32]]
    started: pb.Started
    finished: pb.Finished


def request_of(*parts: Part, layers: tuple[int, ...] = (2, 1), **options: Any) -> rpb.ConditionRequest:
    asked = question(*parts)
    return rpb.ConditionRequest(model=asked.model, prompt=asked.prompt, media=asked.media, layers=layers, **options)


async def gathered(events: Any, count: int) -> Told:
    tensors, started, ends = GatheredAll(count), list[pb.Started](), list[pb.Finished]()
    async with aclosing(events):
        async for event in events:
            assert not ends
            which = event.WhichOneof("event")
            if which == "states":
                assert started, "it begins before that"
                tensors.add(event.states)
            elif which == "started":
                started.append(event.started)
            else:
                ends.append(event.finished)
    assert tensors.whole
    (begun,), (finished,) = started, ends
    arrays = [np.frombuffer(one.buffer, np.float32).reshape(one.descriptor.shape) for one in tensors.tensors]
    return Told(arrays, begun, finished)


async def conditioned(service: LocalService, request: rpb.ConditionRequest, **options: Any) -> Told:
    return await gathered(service.router.condition(request, **options), len(request.layers))


async def through(fleet: MeddledFleet, request: rpb.ConditionRequest) -> Told:
    sources = [Inline(medium) for medium in request.media]
    work = Conditioning(request, sources, fleet, fleet.served, tenant_root=bytes(32))
    return await gathered(work.run(), len(request.layers))


async def test_units_are_shared_with_answers_and_a_repeated_prompt_computes_nothing() -> None:
    request = request_of(TEXT, video(CLIP.path.read_bytes()))
    async with running() as service:
        first = await conditioned(service, request)
        made, rows = service.encoder.counts.encoded_units, service.decoder.scheduler.counts.rows
        again = await conditioned(service, request)
        for one, other in zip(first.arrays, again.arrays, strict=True):
            assert one.tobytes() == other.tobytes()
        assert service.encoder.counts.encoded_units == made and service.decoder.scheduler.counts.rows == rows
        usage = again.finished.usage
        assert usage.cached_prompt_tokens == usage.prompt_tokens == again.started.prompt_tokens
        assert [medium.frames_used for medium in usage.media] == [
            medium.frames_used for medium in first.finished.usage.media
        ]
        await settled(service)


def damaged(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
    """The first piece of the first call is not the first."""
    assert isinstance(response, dpb.DecodeResponse)
    if number == 1 and response.HasField("states"):
        response.states.byte_offset = 1
    return True


@pytest.mark.parametrize(
    "meddle",
    [*map(dies_before, ("admitted", "attached", "started", "states")), damaged],
    ids=["admitted", "attached", "started", "states", "damaged"],
)
async def test_a_decoder_that_is_lost_before_its_first_state_is_replaced_and_nobody_sees_it(meddle: Meddle) -> None:
    request = request_of(TEXT, video(CLIP.path.read_bytes()))
    async with running() as service:
        expected = await conditioned(service, request)
        fleet = MeddledFleet(service, decoder=meddle)
        got = await through(fleet, request)
        for one, other in zip(got.arrays, expected.arrays, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(np.abs(other).max()))
        assert fleet.decoders is not None and fleet.decoders.calls == 2 and len(fleet.lost_workers) == 1
        await settled(service)


async def test_one_that_is_lost_after_that_ends_the_request_which_may_be_asked_again() -> None:
    async with running() as service:
        fleet = MeddledFleet(service, decoder=dies_before("finished"))
        with pytest.raises(Unavailable) as caught:
            await through(fleet, request_of(TEXT))
        assert caught.value.reason == "DECODER_LOST" and caught.value.retryable
        assert fleet.decoders is not None and fleet.decoders.calls == 1
        await settled(service)


@pytest.mark.parametrize("stage", ["encode", "prefill"])
async def test_who_leaves_at_whatever_stage_leaves_nothing(stage: str) -> None:
    request = request_of(TEXT, video(CLIP.path.read_bytes()))
    async with running() as service:
        held = Stages(service).hold(stage)
        asking = asyncio.create_task(conditioned(service, request))
        try:
            await held.reached()
            asking.cancel()
            await asyncio.sleep(0)
        finally:
            held.go_on()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await settled(service)
        assert service.router.admission.requests == 0 and not service.decoder.states_room.held


REFUSED: dict[str, tuple[Callable[[], rpb.ConditionRequest], str]] = {
    "no layer": (lambda: request_of(TEXT, layers=()), "FIELD_MISSING"),
    "layer 0": (lambda: request_of(TEXT, layers=(0,)), "FIELD_OUT_OF_RANGE"),
    "a layer behind the last": (lambda: request_of(TEXT, layers=(99,)), "FIELD_OUT_OF_RANGE"),
    "a layer twice": (lambda: request_of(TEXT, layers=(1, 1)), "FIELD_OUT_OF_RANGE"),
    "very many": (lambda: request_of(TEXT, layers=tuple(range(1, 99))), "TOO_MANY_ITEMS"),
    "a type of integers": (lambda: request_of(TEXT, dtype=pb.DTYPE_INT8), "FEATURE_DISABLED"),
    "an adapter": (lambda: request_of(TEXT, adapter="a"), "FEATURE_DISABLED"),
    "a budget": (lambda: request_of(TEXT, budget=pb.MediaBudget(max_frames=3)), "FEATURE_DISABLED"),
    "no text": (lambda: request_of(""), "EMPTY_PROMPT"),
    "another model": (
        lambda: rpb.ConditionRequest(model="x", layers=[1], prompt=request_of(TEXT).prompt),
        "MODEL_NOT_FOUND",
    ),
    "too long": (lambda: request_of("1 " * 9000), "CONTEXT_LENGTH_EXCEEDED"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_is_refused_before_a_decoder_is_asked_for_states(case: str) -> None:
    make, reason = REFUSED[case]
    async with running() as service:
        with pytest.raises(ChiasmError) as caught:
            await conditioned(service, make())
        assert caught.value.reason == reason and not service.decoder.scheduler.counts.rows
        if case == "a layer behind the last":
            assert "99" in str(caught.value) and f"1 to {service.decoder.engine.half.layers_total}" in str(caught.value)
        await settled(service)


async def test_a_model_that_is_cut_is_asked_for_states_alone(tmp_path: Path) -> None:
    folder = checkpoints_qwen3_vl.write(tmp_path / "tiny")
    service = await LocalService.start(str(folder), LocalSettings(condition_layers=2))
    try:
        (model,) = (await service.router.models()).models
        assert ([*model.operations], model.layers) == ([rpb.OPERATION_CONDITION], 2)
        asked = question(TEXT, model=service.name)
        for events in (
            service.router.generate(asked),
            service.router.embed(rpb.EmbedRequest(model=asked.model, prompt=asked.prompt)),
        ):
            with pytest.raises(Unsupported) as caught:
                async with aclosing(events):
                    async for _ in events:
                        raise AssertionError("it says nothing")
            assert caught.value.reason == "OPERATION_UNSUPPORTED"
        request = request_of(TEXT)
        request.model = service.name
        assert len((await conditioned(service, request)).arrays) == 2
        request.layers[:] = [3]
        with pytest.raises(InvalidRequest) as never:
            await conditioned(service, request)
        assert "1 to 2" in never.value.message
    finally:
        await service.close()


def test_of_a_cut_decoder_and_a_whole_one_each_is_given_what_it_serves() -> None:
    modes = [dpb.SAMPLE_MODE_WHEN_CLOSED, dpb.SAMPLE_MODE_NEVER]
    whole = dpb.DecoderModel(name="m", layers=36, modes=modes, poolings=[dpb.POOLING_NONE, dpb.POOLING_LAST])
    cut = dpb.DecoderModel(name="m", layers=20, modes=[dpb.SAMPLE_MODE_NEVER], poolings=[dpb.POOLING_NONE])
    older = dpb.DecoderModel(name="m", layers=36, modes=modes)
    assert [does(one, rpb.OPERATION_GENERATE) for one in (whole, cut, older)] == [True, False, True]
    assert [does(one, rpb.OPERATION_EMBED) for one in (whole, cut, older)] == [True, False, True]
    assert [does(one, rpb.OPERATION_CONDITION, 20) for one in (whole, cut, older)] == [True, True, False]
    assert [does(one, rpb.OPERATION_CONDITION, 21) for one in (whole, cut, older)] == [True, False, False]
    both = _together(_served(cut), _served(older))
    assert (both.layers, both.generates, both.embeds, both.conditions) == (36, True, True, True)
    assert replace(both, layers=20) == replace(_together(_served(older), _served(cut)), layers=20)
