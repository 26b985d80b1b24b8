"""What a prompt would need, without computing any of it, and what a refusal says would make it fit."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.errors import InvalidRequest
from chiasm.models.registry import Model, find
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service import convert
from decoder_service.fitting import Limits, Medium, Needs, PromptParts
from decoder_service.sequence import DecodeSequence
from tests.decoder_service.halves import CLOSE, Halves, Message, halves, sized
from tests.decoder_service.holders import hold

LARGE = 16
"""Patches of a side of a frame that takes 65 visual tokens and 9 positions beside its time."""


async def estimated(system: Halves, opened: dpb.DecodeOpen, *messages: Message) -> dpb.DecodeAdmitted:
    """The estimate for a prompt; the call must end by itself after it."""
    asked = dpb.DecodeOpen()
    asked.CopyFrom(opened)
    asked.sample = dpb.SAMPLE_MODE_ESTIMATE
    before = system.decoder.scheduler.counts.steps
    told = await system.told(asked, *messages)
    assert told.admitted is not None and told.started is None and told.finished is None
    assert system.decoder.scheduler.counts.steps == before, "an estimate computes nothing"
    return told.admitted


async def refusal(system: Halves, opened: dpb.DecodeOpen, *messages: Message) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await system.told(opened, *messages)
    return caught.value


async def admission(system: Halves, opened: dpb.DecodeOpen, *messages: Message) -> dpb.DecodeAdmitted:
    """What a request that is computed is told when it is admitted; it is left then."""
    async with aclosing(system.decode(opened, *messages)) as responses:
        async for response in responses:
            if response.HasField("admitted"):
                return response.admitted
    raise AssertionError("it was not admitted")


@pytest.mark.parametrize("max_tokens", [None, 5])
async def test_an_estimate_says_what_the_request_itself_would_be_told(max_tokens: int | None) -> None:
    async with halves() as system:
        opened = system.opened("See this: ", 0, " and this ", 1, " and read.", max_tokens=max_tokens)
        opened.slots[1].kind = pb.MEDIA_KIND_IMAGE
        messages = (sized(6), sized(1, slot=1))
        estimate = await estimated(system, opened, *messages)
        assert not system.decoder.running and not system.decoder.waiting
        admitted = await admission(system, opened, *messages)
        assert admitted.prompt_digest
        admitted.ClearField("prompt_digest")  # of rows, which an estimate only counts
        assert estimate == admitted
    assert estimate.visual_tokens == 7 * 5 and estimate.prompt_tokens > 7
    assert estimate.room == (max_tokens or estimate.room) and not estimate.fits_with


async def test_an_estimate_takes_no_room_and_waits_for_none() -> None:
    async with halves(text_tokens=64) as system:
        holder = await hold(system.decoder, text=64)
        estimate = await estimated(system, system.opened("Q"))
        assert estimate.room == 64 - estimate.prompt_tokens
        await system.decoder.release(holder)


async def test_what_does_not_fit_is_estimated_with_no_room_and_what_would_make_it_fit() -> None:
    async with halves(visual_tokens=65 * 2000) as system:
        opened = system.opened("Read.", 0)
        estimate = await estimated(system, opened, sized(900, side=LARGE))
        assert estimate.room == 0 and estimate.visual_tokens == 900 * 65
        most = int(estimate.fits_with.removeprefix("max_frames="))
        assert (await estimated(system, opened, sized(most, of=900, side=LARGE))).room > 0
        assert (await estimated(system, opened, sized(most + 1, of=900, side=LARGE))).room == 0


async def test_b118_what_no_pool_can_hold_is_estimated_with_no_room() -> None:
    async with halves(visual_tokens=65 * 10) as system:
        opened = system.opened("Read.", 0)
        estimate = await estimated(system, opened, sized(20, side=LARGE))
        assert (estimate.room, estimate.fits_with) == (0, "max_frames=10")
        assert (await estimated(system, opened, sized(10, side=LARGE))).room > 0
        error = await refusal(system, opened, sized(20, side=LARGE), CLOSE)
    assert error.reason == "NEVER_FITS" and error.facts == {"needed": 1300, "capacity": 650}


async def test_b116_a_refusal_names_every_share_and_the_frames_with_which_it_would_fit() -> None:
    async with halves(visual_tokens=65 * 2000) as system:
        opened = system.opened("Read ", 0, " and ", 1, max_tokens=100)
        opened.slots[1].kind = pb.MEDIA_KIND_IMAGE
        image = sized(1, slot=1, side=LARGE)
        error = await refusal(system, opened, sized(900, side=LARGE), image, CLOSE)
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
        facts = error.facts
        media = [int(share) for share in str(facts["media"]).split(",")]
        assert facts["needed"] == int(facts["text"]) + sum(media) + int(facts["answer"])
        assert (facts["limit"], facts["answer"], facts["visual"]) == (8192, 100, 901 * 65)
        assert media[1] == 9, "an image is its pad alone"
        option, most = str(facts["fits_with"]).split("=")
        assert option == "max_frames"
        fits = await admission(system, opened, sized(int(most), of=900, side=LARGE), image)
        assert fits.room == 100
        assert (await estimated(system, opened, sized(int(most) + 1, of=900, side=LARGE), image)).room == 0


async def test_of_several_videos_the_longest_are_thinned() -> None:
    async with halves(visual_tokens=65 * 2000) as system:
        opened = system.opened(0, 1, 2, max_tokens=10)
        counts = (700, 30, 400)

        def thinned(most: int) -> list[dpb.DecodeSized]:
            return [sized(min(count, most), of=count, slot=slot, side=LARGE) for slot, count in enumerate(counts)]

        error = await refusal(system, opened, *thinned(1000), CLOSE)
        most = int(str(error.facts["fits_with"]).removeprefix("max_frames="))
        assert 30 < most < 400
        assert (await estimated(system, opened, *thinned(most))).room == 10
        assert (await estimated(system, opened, *thinned(most + 1))).room == 0


async def test_b117_an_answer_that_is_too_long_is_refused_with_the_longest_that_fits() -> None:
    async with halves() as system:
        error = await refusal(system, system.opened("Read.", 0, max_tokens=9000), sized(3), CLOSE)
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
        most = int(str(error.facts["fits_with"]).removeprefix("max_tokens="))
        fits = await admission(system, system.opened("Read.", 0, max_tokens=most), sized(3))
        assert fits.room == most
        assert (await estimated(system, system.opened("Read.", 0, max_tokens=most + 1), sized(3))).room == 0


async def test_where_no_single_option_helps_none_is_named() -> None:
    async with halves() as system:
        text = "x" * 8200
        error = await refusal(system, system.opened(text), CLOSE)
        assert (error.facts["fits_with"], error.facts["media"]) == ("", "")
        opened = system.opened(text, 0)
        estimate = await estimated(system, opened, sized(2))
        assert (estimate.room, estimate.fits_with) == (0, "")
        assert estimate.prompt_tokens > 8200
        images = system.opened("x" * 8100, 0, 1, kind=pb.MEDIA_KIND_IMAGE)
        error = await refusal(system, images, sized(1, side=128), sized(1, slot=1, side=128), CLOSE)
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED" and error.facts["fits_with"] == ""


async def test_frames_that_a_caller_wrote_itself_cannot_be_left_out() -> None:
    async with halves(visual_tokens=65 * 2000) as system:
        config = system.model.config
        opened = system.opened(max_tokens=4)
        frame = [1, 2, 3, config.image_token_id]
        ids = [config.vision_start_token_id, *(frame * 900), config.vision_end_token_id]
        opened.prompt.plain.parts.add(tokens=pb.TokenRun(ids=ids, pads_bind_slots=True))
        opened.slots.add(slot=0, kind=pb.MEDIA_KIND_VIDEO)
        estimate = await estimated(system, opened, sized(900, side=LARGE))
    assert (estimate.room, estimate.fits_with) == (0, "")
    assert (estimate.prompt_tokens, estimate.visual_tokens) == (900 * 4 + 2, 900 * 65)


async def test_an_estimate_takes_no_entries_and_waits_for_every_size() -> None:
    async with halves() as system:
        opened = system.opened("Read.", 0, 1)
        opened.sample = dpb.SAMPLE_MODE_ESTIMATE
        error = await refusal(system, opened, dpb.DecodeReady(slot=0, unit=0))
        assert error.reason == "UPLOAD_PROTOCOL"


MODEL = Model(find("digits"))
PROMPT = MODEL.prompt()

grids = st.integers(1, 12).map(lambda half: 2 * half)
media = st.lists(st.tuples(st.integers(1, 12), grids, st.booleans()), max_size=4)


@settings(max_examples=60, deadline=None)
@given(media=media, text=st.text(max_size=20))
def test_what_is_counted_is_what_is_laid(media: list[tuple[int, int, bool]], text: str) -> None:
    prompt = pb.Prompt()
    turn = prompt.conversation.turns.add(role=pb.ROLE_USER)
    turn.parts.add(text=text)
    for slot in range(len(media)):
        turn.parts.add(slot=slot)
    pieces = convert.read_prompt(prompt, PROMPT, 447, {}).pieces
    laid = DecodeSequence(MODEL.processor.unit_layout)
    laid.extend(pieces)
    counted: dict[int, Medium] = {}
    for slot, (count, side, image) in enumerate(media):
        kind = pb.MEDIA_KIND_IMAGE if image else pb.MEDIA_KIND_VIDEO
        slot_sized = convert.sized_slot(
            sized(1 if image else count, side=side), kind, PROMPT, MODEL.processor.unit_layout
        )
        laid.size(slot, slot_sized)
        counted[slot] = Medium(slot_sized, None if image else lambda offsets: PROMPT.medium("video", offsets))
    parts = PromptParts(pieces, counted, MODEL.processor.unit_layout)
    timeline = laid.timeline
    assert parts.needs() == Needs(len(timeline), timeline.counter, timeline.vision_tokens)
    assert parts.needs(most=1).visual == sum((side // 2) ** 2 + 1 for _, side, _ in media)
    exact = Limits(context=parts.needs().context + 1, text=10**6, visual=10**6)
    assert exact.room(parts.needs(), None) == 1 and parts.fits_with(exact, None) == ""
