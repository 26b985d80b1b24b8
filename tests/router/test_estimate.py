"""Estimates: what an answer would use, found without it; told also when it does not fit; and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from chiasm.cache.form import Form
from chiasm.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from chiasm.local import LocalService, LocalSettings
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.estimate import Estimating
from router.media import Inline
from tests import checkpoints_qwen3_vl, digits
from tests.asking import ask, image, question, running, video
from tests.e2e.test_requests import picture, settled
from tests.media import make
from tests.router.scripted import Meddle, MeddledFleet, untouched
from tests.router.test_coordinator import dies_before


def estimate_of(request: rpb.GenerateRequest) -> rpb.EstimateRequest:
    return rpb.EstimateRequest(model=request.model, prompt=request.prompt, media=request.media)


async def estimated(
    service: LocalService, request: rpb.GenerateRequest, *, encoder: Meddle = untouched, decoder: Meddle = untouched
) -> rpb.EstimateResponse:
    fleet = MeddledFleet(service, encoder=encoder, decoder=decoder)
    sources = [Inline(medium) for medium in request.media]
    work = Estimating(estimate_of(request), sources, fleet, fleet.served, tenant_root=bytes(32))
    return await work.run()


async def test_an_estimate_is_what_the_answer_uses() -> None:
    clip, shown = digits.shipped_clips()[-1], digits.shipped_images()[0][0]
    request = question("Read the digits.", video(clip.path.read_bytes(), fps=0.5), image(shown.read_bytes()))
    async with running() as service:
        told = await service.router.estimate(estimate_of(request))
        assert service.encoder.counts.encoded_units == 0 and service.store.stats().entries == 0
        await settled(service)
        answer = await ask(service, request)
    assert answer.finished is not None
    usage = answer.finished.usage
    assert (told.prompt_tokens, told.visual_tokens) == (usage.prompt_tokens, usage.visual_tokens)
    assert told.fits_with == "" and told.room > 0
    for medium, used in zip(told.media, usage.media, strict=True):
        used.ClearField("frames_decoded")
        used.ClearField("units_cached")
        assert medium.usage == used
        assert medium.entry_bytes == used.tokens * service.encoder.bytes_per_token(Form.CROSS_KV)


async def test_text_alone_is_estimated_too() -> None:
    async with running() as service:
        told = await service.router.estimate(estimate_of(question("Hello.")))
        assert told.prompt_tokens > 0 and told.visual_tokens == 0 and not told.media


async def test_a_prompt_that_does_not_fit_has_no_room_and_is_told_what_would() -> None:
    frames, limit = [], 8192
    rng = np.random.default_rng(3)
    for cells, _ in digits.held_out_digits()[:64]:
        frames.append(digits.frame(cells, rng))
    text = "1 " * (limit // 2 - 200)
    request = question(text, video(digits.clip(frames)))
    async with running() as service:
        told = await service.router.estimate(estimate_of(request))
        assert told.room == 0 and told.context_limit == limit
        name, _, most = told.fits_with.partition("=")
        assert name == "max_frames" and 0 < int(most) < len(frames)
        for count, fits in ((int(most), True), (int(most) + 1, False)):
            request.media[0].sampling.max_frames = count
            assert ((await service.router.estimate(estimate_of(request))).room > 0) is fits


async def test_a_medium_at_fault_is_named() -> None:
    async with running() as service:
        with pytest.raises(InvalidRequest) as caught:
            await service.router.estimate(estimate_of(question("?", image(picture(64, 64)), image(picture(1, 300)))))
        assert (caught.value.reason, caught.value.item) == ("ASPECT_RATIO", "messages[0].content[2]")
        assert caught.value.request_id
        await settled(service)


async def test_what_is_wrong_with_the_request_is_found_before_anything_is_asked() -> None:
    async with running() as service:
        request = estimate_of(question("?", pb.Media(kind=pb.MEDIA_KIND_IMAGE)))
        with pytest.raises(InvalidRequest) as caught:
            await service.router.estimate(request)
        assert caught.value.reason == "FIELD_MISSING"
        with pytest.raises(DeadlineExceeded):
            await service.router.estimate(estimate_of(question("?")), timeout=0)


async def test_a_lost_decoder_is_replaced_once_for_an_estimate_too() -> None:
    async with running() as service:
        request = question("?", image(picture(64, 64)))
        whole = await estimated(service, request)
        assert await estimated(service, request, decoder=dies_before("admitted")) == whole
        with pytest.raises(Unavailable):
            await estimated(service, request, decoder=dies_before("admitted", times=9))
        await settled(service)


async def test_a_lost_encoder_is_replaced_for_an_estimate_too() -> None:
    async with running() as service:
        request = question("?", image(picture(64, 64)))
        whole = await estimated(service, request)
        assert await estimated(service, request, encoder=dies_before("probed")) == whole
        with pytest.raises(Unavailable):
            await estimated(service, request, encoder=dies_before("sized", times=9))
        await settled(service)


async def test_another_decoder_is_asked_for_an_estimate_when_one_is_full() -> None:
    def full_at_first(number: int, response: object) -> bool:
        if number == 1:
            raise Overloaded("QUEUE_FULL", "others wait already", retry_after=1.0)
        return True

    async with running() as service:
        told = await estimated(service, question("Hello."), decoder=full_at_first)
        assert told.prompt_tokens > 0
        await settled(service)


@pytest.mark.parametrize("side", [64, 320, 480])
async def test_the_frames_with_which_it_would_fit_are_as_large_as_fewer_frames_are(side: int, tmp_path: Path) -> None:
    """A video's frames share its pixels: of fewer each is larger, and two of them are a unit."""
    folder = checkpoints_qwen3_vl.write(tmp_path / "pairs", text={"max_position_embeddings": 2048})
    clip = make.video([make.flat(side, side, (3 * number,) * 3) for number in range(64)])
    request = question("1 " * (900 if side == 64 else 150), video(clip, fps=25.0), model="pairs")
    async with running(str(folder), LocalSettings(dtype=torch.float32)) as service:
        told = await service.router.estimate(estimate_of(request))
        assert told.room == 0
        name, _, most = told.fits_with.partition("=")
        assert name == "max_frames" and 0 < int(most) < 64
        for count, fits in ((int(most), True), (int(most) + 1, False)):
            request.media[0].sampling.max_frames = count
            assert ((await service.router.estimate(estimate_of(request))).room > 0) is fits
