"""Media that are encoded while they come: units before the last bytes, and the same in the end as if all had been there
at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from chiasm.errors import ChiasmError, Fact, InvalidRequest
from chiasm.local import LocalService
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, Limits, MediaSource
from chiasm.rpc.medium import medium_digest
from chiasm.rpc.turns import Turns
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service.announcing import AHEAD
from encoder_service.inbox import Inbox
from encoder_service.material import Material
from encoder_service.quarantine import Quarantine
from encoder_service.servicer import EncoderServicer
from tests import digits
from tests.asking import running
from tests.encoder_service.test_calls import Call, failure
from tests.media import make
from tests.waiting import gone, until

ITEM = "messages[0].content[0]"
SIZE = (64, 96)
"""Height and width of every good frame here."""


def frame_list(*headers: pb.FrameHeader) -> pb.FrameList:
    return pb.FrameList(frames=headers, fps=1)


def encoded(count: int) -> pb.FrameList:
    return frame_list(*[pb.FrameHeader()] * count)


def piece(frame: int, data: bytes, *, ends: bool = True, last: bool = False) -> pb.MediaChunk:
    return pb.MediaChunk(frame=frame, data=data, ends_frame=ends, last=last)


def scenes(count: int, first: int = 0) -> list[bytes]:
    """So many different pictures."""
    return [make.save(make.scene(*SIZE, shift)) for shift in range(first, first + count)]


@dataclass
class Told:
    """What a call was told."""

    keys: dict[int, bytes] = field(default_factory=dict)
    sized: list[epb.EncodeSized] = field(default_factory=list)
    probe: pb.Probe | None = None
    usage: pb.MediaUsage | None = None
    error: ChiasmError | None = None


class Listener:
    """Reads a call's responses and answers as a router does: siblings, go, and credit for what was told."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.told = Told()
        self.task = asyncio.create_task(self._listen())

    async def units(self, count: int) -> None:
        await until(lambda: len(self.told.keys) >= count or self.task.done())
        assert len(self.told.keys) == count

    async def end(self) -> Told:
        await asyncio.wait_for(self.task, 60)
        return self.told

    async def _listen(self) -> None:
        call, told = self.call, self.told
        async for response in call.responses:
            which = response.WhichOneof("message")
            if which == "probed":
                told.probe = response.probed.probe
                call.send(siblings=epb.EncodeSiblings(siblings=[epb.Sibling(slot=0, probe=told.probe)]))
            elif which == "sized":
                if not told.sized:
                    call.send(go=epb.EncodeGo())
                told.sized.append(response.sized)
            elif which == "ready":
                entry = response.ready.entry
                told.keys[response.ready.unit] = entry.key
                await call.service.store.release(entry.key, entry.lease.lease_id)
                call.send(credit=epb.EncodeCredit(bytes=entry.byte_length))
            elif which == "failed":
                told.error = failure(response)
            elif which == "end":
                told.usage = response.end.usage
                call.end()


async def test_each_unit_is_announced_before_the_next_frame_was_sent() -> None:
    pictures = scenes(5)
    async with running() as service:
        call = Call(service, frames=encoded(5))
        listening = Listener(call)
        for number, data in enumerate(pictures):
            call.send(chunk=piece(number, data, last=number == 4))
            await listening.units(number + 1)
        told = await listening.end()
        assert told.probe is not None and told.usage is not None
        assert (told.probe.frames_in_file, told.probe.duration.seconds) == (5, 5), "count and times are the header's"
        assert [sized.final for sized in told.sized] == [False, True]
        assert [len(sized.units) for sized in told.sized] == [5, 5]
        assert (told.usage.units, told.usage.format, told.usage.frames_decoded) == (5, "PNG", 5)


class Counting(Sandbox):
    """Counts the frames that it gave out."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    async def decode(
        self, source: MediaSource, indices: Sequence[int], *, item: str | None = None
    ) -> AsyncGenerator[Frame | Decoded, None]:
        async for event in super().decode(source, indices, item=item):
            self.given += isinstance(event, Frame)
            yield event


async def test_the_first_unit_of_a_file_is_announced_before_its_last_frame_is_decoded() -> None:
    clip = make.video([make.scene(64, 64, 5 * shift) for shift in range(40)], time_base=Fraction(1))
    sandbox = Counting()
    async with running() as service, sandbox:
        servicer = EncoderServicer(service.encoder, sandbox, name="digits", family="moss_vl", limits=Limits())
        call = Call(service, servicer=servicer)
        await call.sized(clip)
        call.send(go=epb.EncodeGo())
        assert (await call.next()).ready.unit == 0
        assert 1 <= sandbox.given <= AHEAD + 3
        await call.responses.aclose()
        await until(lambda: not service.encoder.in_flight)


# -- the same however it comes -----------------------------------------------------------------------------------------

Fault = tuple[str, dict[str, Fact]]
"""Reason, and the facts beside the number of the frame."""


@dataclass(frozen=True)
class Case:
    """One frame: its header, its bytes, and what is to become of it."""

    header: pb.FrameHeader
    data: bytes
    found: str = ""
    flags: tuple[str, ...] = ()
    fault: Fault | None = None


def raw_header(height: int, width: int) -> pb.FrameHeader:
    return pb.FrameHeader(raw=pb.RawLayout(size=pb.Size(height=height, width=width), channels=3))


def good(rng: np.random.Generator) -> Case:
    shown = make.scene(*SIZE, int(rng.integers(256)))
    turned = make.scene(SIZE[1], SIZE[0], int(rng.integers(256)))
    cases = [
        Case(pb.FrameHeader(), make.save(shown), "PNG"),
        Case(pb.FrameHeader(), make.save(shown, "JPEG"), "JPEG"),
        Case(pb.FrameHeader(), make.save(turned, "JPEG", exif=make.exif(6)), "JPEG", ("orientation_applied",)),
        Case(raw_header(*SIZE), shown.tobytes(), "raw"),
    ]
    return cases[rng.integers(len(cases))]


def faulty(rng: np.random.Generator) -> Case:
    whole = make.save(make.scene(*SIZE), "JPEG")
    size: dict[str, Fact] = {"height": 60, "width": 40, "first_height": SIZE[0], "first_width": SIZE[1]}
    encoded_ = pb.FrameHeader()
    cases = [
        Case(encoded_, b"", fault=("MEDIA_EMPTY", {})),
        Case(encoded_, b"text", fault=("MEDIA_UNSUPPORTED", {"found": "unknown"})),
        Case(encoded_, whole[: len(whole) // 2], fault=("MEDIA_DECODE_FAILED", {"found": "JPEG"})),
        Case(encoded_, make.save(make.scene(60, 40)), fault=("FRAME_LAYOUT", size)),
        Case(raw_header(60, 40), bytes(60 * 40 * 3), fault=("FRAME_LAYOUT", size)),
        Case(raw_header(*SIZE), bytes(100), fault=("FRAME_LAYOUT", {"expected": SIZE[0] * SIZE[1] * 3, "got": 100})),
        Case(
            encoded_,
            make.bomb_png(13_300, 13_300),
            fault=("MEDIA_TOO_LARGE", {"pixels": 13_300**2, "limit": Limits().max_pixels}),
        ),
    ]
    return cases[rng.integers(len(cases))]


def cut(cases: Sequence[Case], rng: np.random.Generator) -> list[pb.MediaChunk]:
    """Pieces anywhere, some of which say that they end a frame, some of which leave that to the next."""
    chunks = []
    for number, case in enumerate(cases):
        cuts = sorted(rng.integers(0, len(case.data) + 1, rng.integers(4)).tolist())
        bounds = list(dict.fromkeys([0, *cuts, len(case.data)]))
        pieces = [case.data[a:b] for a, b in pairwise(bounds)] or [b""]
        says = rng.random() < 0.7
        for i, data in enumerate(pieces):
            if data or rng.random() < 0.5:  # an empty frame may be passed over
                chunks.append(piece(number, data, ends=says and i == len(pieces) - 1))
    if chunks and rng.random() < 0.5:
        chunks[-1].last = True
    else:
        chunks.append(piece(len(cases) - 1, b"", ends=False, last=True))
    return chunks


async def streamed(service: LocalService, cases: Sequence[Case], rng: np.random.Generator | None) -> Told:
    """What a call is told whose pieces come one by one; all at once and whole without `rng`."""
    call = Call(service, frames=frame_list(*[case.header for case in cases]))
    if rng is None:
        for number, case in enumerate(cases):
            call.send(chunk=piece(number, case.data, ends=False, last=number == len(cases) - 1))
        return await Listener(call).end()
    listening = Listener(call)
    for chunk in cut(cases, rng):
        if rng.random() < 0.3:
            await asyncio.sleep(float(rng.random()) * 0.01)
        call.send(chunk=chunk)
    return await listening.end()


@pytest.mark.parametrize("seed", range(3))
async def test_cuts_and_pauses_change_neither_units_nor_usage_nor_errors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    async with running() as service:
        for _ in range(20):
            cases = [good(rng) for _ in range(rng.integers(1, 7))]
            for _ in range(rng.integers(0, 3)):
                at, fault = int(rng.integers(0, len(cases) + 1)), faulty(rng)
                if at > 0 or "first_height" not in (fault.fault or ("", {}))[1]:  # the first has the size it has
                    cases.insert(at, fault)
            at_once, told = await streamed(service, cases, None), await streamed(service, cases, rng)
            first = next((i for i, case in enumerate(cases) if case.fault is not None), None)
            for one in (at_once, told):
                if first is None:
                    assert one.error is None and one.usage is not None
                    assert one.usage.format == ",".join(sorted({case.found for case in cases}))
                    assert one.usage.flags == sorted({flag for case in cases for flag in case.flags})
                    assert sorted(one.keys) == list(range(len(cases)))
                else:
                    reason, facts = cases[first].fault or ("", {})
                    error = one.error
                    assert isinstance(error, InvalidRequest), [case.fault for case in cases]
                    assert (error.reason, error.item) == (reason, ITEM)
                    assert error.facts == {**facts, "index": first}
            both = at_once.keys.keys() & told.keys.keys()
            assert {unit: at_once.keys[unit] for unit in both} == {unit: told.keys[unit] for unit in both}
            if at_once.usage is not None and told.usage is not None:
                assert len(both) == len(cases)
                for usage in (at_once.usage, told.usage):
                    usage.ClearField("units_cached")
                assert at_once.usage == told.usage and at_once.sized == told.sized


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (pb.FrameList(frames=[pb.FrameHeader()] * 2), "FIELD_MISSING"),
        (pb.FrameList(frames=[pb.FrameHeader()] * 2, fps=-1), "FIELD_OUT_OF_RANGE"),
        (pb.FrameList(frames=[pb.FrameHeader()] * 20_000, fps=1), "TOO_MANY_ITEMS"),
        (pb.FrameList(frames=[pb.FrameHeader()] * 4000, fps=0.01), "MEDIA_TOO_LARGE"),
    ],
)
async def test_what_a_header_shows_is_refused_before_any_byte_came(frames: pb.FrameList, reason: str) -> None:
    async with running() as service:
        call = Call(service, frames=frames)
        try:
            error = failure(await call.next())
        except InvalidRequest as raised:
            error = raised
        assert isinstance(error, InvalidRequest) and error.reason == reason
        assert service.sandbox.pids == frozenset()
        await call.responses.aclose()


async def test_the_digest_of_a_list_is_that_of_all_its_bytes_although_they_were_let_go() -> None:
    pictures = [*scenes(3), make.scene(*SIZE).tobytes()]
    opened = epb.EncodeOpen(tenant_root=bytes(32), media=pb.MediaHeader(kind=pb.MEDIA_KIND_VIDEO))
    opened.media.frames.CopyFrom(frame_list(*[pb.FrameHeader()] * 3, raw_header(*SIZE)))

    async def requests() -> AsyncIterator[epb.EncodeRequest]:
        yield epb.EncodeRequest(open=opened)
        for number, data in enumerate(pictures):
            yield epb.EncodeRequest(chunk=piece(number, data, last=number == 3))

    async with Sandbox() as sandbox:
        inbox = Inbox(requests(), max_bytes=1 << 20)
        material = Material.of(await inbox.start(), inbox, sandbox, Quarantine())
        frames = [event async for event in material.decode(range(4)) if isinstance(event, Frame)]
        assert len(frames) == 4 and inbox.held == 0
        assert material.digest == medium_digest(opened.media, pictures)
        await inbox.close()


async def test_a_list_whose_first_frame_was_never_asked_for_waits_aside_for_it_too() -> None:
    """As one that is remembered, and of which some entries are gone."""
    opened = epb.EncodeOpen(tenant_root=bytes(32), media=pb.MediaHeader(kind=pb.MEDIA_KIND_VIDEO))
    opened.media.frames.CopyFrom(encoded(2))
    come = asyncio.Event()
    turns = Turns(max_waiting=2, max_running=1)

    async def requests() -> AsyncIterator[epb.EncodeRequest]:
        yield epb.EncodeRequest(open=opened)
        await come.wait()
        for number, data in enumerate(scenes(2)):
            yield epb.EncodeRequest(chunk=piece(number, data, last=number == 1))

    async with Sandbox() as sandbox:
        inbox = Inbox(requests(), max_bytes=1 << 20)
        material = Material.of(await inbox.start(), inbox, sandbox, Quarantine())
        with turns.enter() as turn:
            await turn.begin()

            async def decoded() -> int:
                return len([event async for event in material.decode([0, 1], turn.aside)])

            decoding = asyncio.create_task(decoded())
            await until(lambda: turns.running == 0)
            come.set()
            assert await decoding == 3 and turns.running == 1
        await inbox.close()


# -- what is held meanwhile --------------------------------------------------------------------------------------------


async def test_nothing_is_held_of_a_caller_that_leaves_in_the_middle() -> None:
    async with running() as service:
        before = asyncio.all_tasks()
        call = Call(service, frames=encoded(4))
        listening = Listener(call)
        for number, data in enumerate(scenes(3)):
            call.send(chunk=piece(number, data))
        await listening.units(3)
        call.end()
        told = await listening.end()
        assert isinstance(told.error, InvalidRequest) and told.error.reason == "UPLOAD_PROTOCOL"
        await until(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})


async def test_a_list_that_waits_for_its_sender_keeps_nobody_else_from_running() -> None:
    """One medium runs at a time, and one process opens media."""
    async with running() as service:
        turns = Turns(max_waiting=8, max_running=1)
        servicer = EncoderServicer(
            service.encoder, service.sandbox, name="digits", family="moss_vl", limits=Limits(), turns=turns
        )
        slow = Listener(Call(service, servicer=servicer, frames=encoded(2)))
        first, second = scenes(2)
        slow.call.send(chunk=piece(0, first))
        await slow.units(1)
        await until(lambda: turns.running == 0)
        quick = Listener(Call(service, servicer=servicer))
        quick.call.send(chunk=piece(0, digits.shipped_clips()[0].path.read_bytes(), last=True))
        assert (await quick.end()).usage is not None
        slow.call.send(chunk=piece(1, second, last=True))
        assert (await slow.end()).usage is not None
        assert (turns.running, turns.waiting) == (0, 0)


async def test_b17_a_picture_that_kills_its_processes_is_not_opened_again_in_any_list() -> None:
    poison = make.slow_jpeg(scans=2000)
    good_one = make.save(make.scene(1024, 1024))

    async def told(service: LocalService, servicer: EncoderServicer, pictures: Sequence[bytes]) -> Told:
        listening = Listener(Call(service, servicer=servicer, frames=encoded(len(pictures)), credit=1 << 30))
        for number, data in enumerate(pictures):
            for at in range(0, len(data), 1 << 20):
                ends = at + (1 << 20) >= len(data)
                chunk = piece(number, data[at : at + (1 << 20)], ends=ends, last=ends and number == len(pictures) - 1)
                listening.call.send(chunk=chunk)
        return await listening.end()

    async with running() as service:
        servicer = EncoderServicer(service.encoder, service.sandbox, name="digits", family="moss_vl", limits=Limits())
        listening = Listener(Call(service, servicer=servicer, frames=encoded(3), credit=1 << 30))
        listening.call.send(chunk=piece(0, good_one))
        await listening.units(1)
        for at in range(0, len(poison), 1 << 20):
            listening.call.send(chunk=piece(1, poison[at : at + (1 << 20)], ends=at + (1 << 20) >= len(poison)))
        while not listening.task.done():
            for pid in service.sandbox.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSEGV)
                await gone(pid)
            await asyncio.sleep(0.005)
        error = (await listening.end()).error
        assert isinstance(error, InvalidRequest)
        assert (error.reason, error.facts["index"]) == ("POISON_INPUT", 1), "its last frame was never sent"
        assert service.sandbox.pids == frozenset()
        other = await told(service, servicer, [poison, good_one])
        assert isinstance(other.error, InvalidRequest) and other.error.reason == "POISON_INPUT"
        assert service.sandbox.pids == frozenset(), "nothing was started for it"
        assert (await told(service, servicer, [good_one, good_one])).usage is not None
