"""`Decode` with callers that break off, repeat themselves or grow beyond what was admitted: a typed end, nothing
left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

import numpy as np
import pytest

from chiasm.chat_template import Piece
from chiasm.errors import ChiasmError, InvalidRequest, Overloaded
from chiasm.local import LocalService, LocalSettings
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.engine import DecoderEngine
from decoder_service.laid import Drop
from decoder_service.sequence import DecodeSequence
from decoder_service.servicer import DecoderServicer
from tests import digits
from tests.asking import Answer, ask, forget, image, question, running, video
from tests.decoder_service.live import LiveTimeline


def opened(service: LocalService, *parts: str | int) -> dpb.DecodeOpen:
    message = dpb.DecodeOpen(
        model="digits",
        fingerprint=service.decoder.identity_digest,
        tenant_root=bytes(32),
        sample=dpb.SAMPLE_MODE_WHEN_CLOSED,
        seed=0,
        attempt=1,
    )
    turn = message.prompt.conversation.turns.add(role=pb.ROLE_USER)
    for part in parts:
        if isinstance(part, str):
            turn.parts.add(text=part)
        else:
            turn.parts.add(slot=part)
            message.slots.add(slot=part, kind=pb.MEDIA_KIND_VIDEO, item=f"slot {part}")
    return message


def sized(count: int, *, slot: int = 0, final: bool = True, side: int = 4) -> dpb.DecodeSized:
    units = [
        pb.Unit(index=i, grid=pb.Grid(t=1, h=side, w=side), tokens=side * side // 4 + 1, frames=[pb.UnitFrame()])
        for i in range(count)
    ]
    for i, unit in enumerate(units):
        unit.frames[0].frame_offset.seconds = i
    return dpb.DecodeSized(slot=slot, revision=1, final=final, units=units)


async def ending(service: LocalService, *messages: object) -> ChiasmError:
    """How a call ends that is sent these messages and then nothing more. It must end by itself."""
    wrapped = [
        dpb.DecodeRequest(
            **{{dpb.DecodeOpen: "open", dpb.DecodeSized: "sized", dpb.DecodeClose: "close"}[type(m)]: m}  # type: ignore[arg-type]
        )
        for m in messages
    ]

    async def sent() -> AsyncIterator[dpb.DecodeRequest]:
        for message in wrapped:
            yield message

    servicer = DecoderServicer(service.decoder, name="digits", family="moss_vl")
    with pytest.raises(ChiasmError) as caught:
        async with asyncio.timeout(20), aclosing(servicer.Decode(sent(), None)) as responses:  # type: ignore[type-var]
            async for _ in responses:
                pass
    return caught.value


async def test_a_caller_that_ends_with_units_outstanding_ends_the_call() -> None:
    async with running() as service:
        error = await ending(service, opened(service, "Read:", 0), dpb.DecodeClose(), sized(2))
    assert isinstance(error, InvalidRequest) and error.reason == "UPLOAD_PROTOCOL"


async def test_a_slot_without_units_and_one_sized_after_it_was_final_are_refused() -> None:
    async with running() as service:
        first = await ending(service, opened(service, "Read:", 0), sized(0))
        second = await ending(service, opened(service, "Read:", 0), sized(2), sized(1))
    assert isinstance(first, InvalidRequest) and (first.reason, first.item) == ("NO_FRAMES", "slot 0")
    assert isinstance(second, InvalidRequest) and second.reason == "UPLOAD_PROTOCOL"


async def test_an_empty_prompt_is_refused() -> None:
    async with running() as service:
        message = opened(service)
        message.prompt.plain.SetInParent()
        error = await ending(service, message, dpb.DecodeClose())
    assert isinstance(error, InvalidRequest) and error.reason == "EMPTY_PROMPT"


async def test_more_units_than_were_admitted_are_refused() -> None:
    async with running(settings=LocalSettings(visual_tokens=64)) as service:
        message = opened(service, "Read:", 0)
        message.sampling.max_tokens = 4
        error = await ending(service, message, sized(2, final=False), dpb.DecodeClose(), sized(9))
    assert "FEATURE_COUNT_MISMATCH" in str(error) or "UPLOAD_PROTOCOL" in str(error)


async def test_text_longer_than_the_context_is_refused_before_any_of_it_is_laid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    laid: list[int] = []
    extend = DecodeSequence.extend

    def watched(self: DecodeSequence, pieces: Iterable[Piece | Drop]) -> int:
        laid.append(1)
        return extend(self, pieces)

    monkeypatch.setattr(DecodeSequence, "extend", watched)
    async with running() as service:
        with pytest.raises(InvalidRequest) as caught:
            await ask(service, question("x" * 200_000, max_tokens=1))
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED" and not laid


async def test_extents_are_taken_and_given_back_in_the_device_thread_only() -> None:
    """A video that ends early is laid again, and what stood behind it moves."""
    seen: set[int] = set()

    class Watched(DecoderEngine):
        def detach_moved(self, sequence: DecodeSequence):  # type: ignore[no-untyped-def]
            seen.add(threading.get_ident())
            return super().detach_moved(sequence)

        def attach(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            seen.add(threading.get_ident())
            return super().attach(*args, **kwargs)

    rng = np.random.default_rng(8)
    pool = digits.held_out_digits()
    cut = digits.without_last_frames(digits.clip([digits.frame(pool[i][0], rng) for i in range(20)]))
    shown = digits.shipped_images()[0][0].read_bytes()
    async with running() as service:
        service.decoder.engine.__class__ = Watched
        answer: Answer = await ask(service, question(video(cut), image(shown), "Read the digits.", max_tokens=2))
    assert len(seen) == 1 and threading.get_ident() not in seen
    assert answer.started is not None and answer.finished is not None
    assert answer.started.prompt_tokens == answer.finished.usage.prompt_tokens
    assert answer.started.frames[-1].at_index < answer.started.prompt_tokens
    assert "truncated" in answer.media[0].flags


async def test_the_prompt_of_a_video_that_ended_early_is_counted_as_it_was_laid() -> None:
    rng = np.random.default_rng(8)
    pool = digits.held_out_digits()
    cut = digits.without_last_frames(digits.clip([digits.frame(pool[i][0], rng) for i in range(20)]))
    request = question(video(cut), "Read the digits.", max_tokens=2)
    request.prompt_visibility = True
    async with running() as service:
        answer = await ask(service, request)
    assert answer.started is not None
    assert len(answer.started.prompt_visible) == answer.started.prompt_tokens


async def test_banning_every_token_is_refused() -> None:
    async with running() as service:
        request = question("Read the digits.")
        request.sampling.banned_token_ids.extend(range(service.decoder.vocabulary))
        with pytest.raises(InvalidRequest) as caught:
            await ask(service, request)
    assert caught.value.reason == "FIELD_OUT_OF_RANGE"


async def live_failure(service: LocalService, *requests: dpb.DecodeRequest) -> ChiasmError:
    """How a live timeline ends that is sent these after its opening."""
    live = LiveTimeline(service)
    await live.open("Say each digit you see.")
    for request in requests:
        live.send(request)
    with pytest.raises(ChiasmError) as caught:
        async with asyncio.timeout(20), aclosing(live.responses):  # type: ignore[type-var]
            async for _ in live.responses:
                pass
    return caught.value


def append(event: int, slot: int, *, named: bool = True) -> dpb.DecodeRequest:
    slots = [dpb.Slot(slot=slot, kind=pb.MEDIA_KIND_FRAME)] if named else []
    return dpb.DecodeRequest(append=dpb.DecodeAppend(event=event, slot=slot, slots=slots))


async def test_live_events_out_of_order_and_slots_named_twice_are_refused() -> None:
    async with running() as service:
        for requests in (
            [append(2, 0), append(1, 1)],
            [append(1, 0), append(2, 0)],
            [append(1, 0, named=False)],
            [dpb.DecodeRequest(drop=dpb.DecodeDrop(event=1, first_visible=1))],
        ):
            error = await live_failure(service, *requests)
            assert isinstance(error, InvalidRequest), error
            assert error.reason in ("UPLOAD_PROTOCOL", "PLACEHOLDER_MISMATCH")


async def test_a_live_timeline_cannot_outgrow_its_context_or_the_pool() -> None:
    async with running(settings=LocalSettings(visual_tokens=64)) as service:
        limit = service.decoder.context_limit
        words = dpb.DecodeRequest(append=dpb.DecodeAppend(event=1))
        words.append.turn.role = pb.ROLE_USER
        words.append.turn.parts.add(text="x" * (limit - 20))
        error = await live_failure(service, words)
        assert isinstance(error, InvalidRequest) and error.reason == "CONTEXT_LENGTH_EXCEEDED"
        large = dpb.DecodeRequest(sized=sized(1, side=16))
        error = await live_failure(service, append(1, 0), large)
        assert isinstance(error, Overloaded) and error.facts == {"needed": 65, "free": 64}


async def test_a_drop_can_only_hide_more() -> None:
    rng = np.random.default_rng(40)
    cells, _ = digits.held_out_digits()[0]
    async with running() as service:
        live = LiveTimeline(service)
        await live.open("Say each digit you see.")
        with pytest.raises(InvalidRequest) as caught:
            async with aclosing(live.responses):  # type: ignore[type-var]
                for i in range(3):
                    await live.show(digits.frame(cells, rng), float(i))
                live.drop(2)
                live.drop(1)
                await live.show(digits.frame(cells, rng), 3.0)
        assert caught.value.reason == "UPLOAD_PROTOCOL"
        await forget(service)
