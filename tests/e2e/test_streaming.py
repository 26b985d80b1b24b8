"""Questions about media that are still being sent: the same answers, sooner begun; and nothing left of those that break
off."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from chiasm.client.transport import Transport
from chiasm.errors import ChiasmError, DeadlineExceeded, InvalidRequest, Unavailable
from chiasm.local import LocalService
from chiasm.models.moss_vl.processing import MossVLProcessor
from chiasm.rpc.times import to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.coordinator import Coordinator
from router.media import Source
from tests import digits
from tests.asking import Answer, ask, forget, note, question, running
from tests.e2e.test_digits import drawn
from tests.e2e.test_requests import settled
from tests.router.scripted import MeddledFleet
from tests.waiting import until

READ = "Read the digits."


class Sender:
    """A list of pictures that is sent when it is told to, and the medium that names it."""

    def __init__(self, transport: Transport, pictures: Sequence[bytes]) -> None:
        self.pictures = pictures
        upload_id = secrets.token_bytes(16)
        self.medium = pb.Media(kind=pb.MEDIA_KIND_VIDEO, handle=upload_id.hex())
        frames = pb.FrameList(frames=[pb.FrameHeader()] * len(pictures), fps=1)
        media = pb.MediaHeader(kind=pb.MEDIA_KIND_VIDEO, frames=frames)
        self._queue: asyncio.Queue[rpb.UploadRequest | None] = asyncio.Queue()
        self._queue.put_nowait(rpb.UploadRequest(header=rpb.UploadHeader(upload_id=upload_id, media=media)))
        self.receiving = asyncio.create_task(transport.upload(self._requests(), timeout=60, metadata=()))
        self.sent = 0

    def send(self, count: int = 1) -> None:
        """The next so many pictures, each in two pieces."""
        for number in range(self.sent, self.sent + count):
            data, last = self.pictures[number], number == len(self.pictures) - 1
            half = len(data) // 2
            for part, ends in ((data[:half], False), (data[half:], True)):
                chunk = pb.MediaChunk(frame=number, data=part, ends_frame=ends, last=last and ends)
                self._queue.put_nowait(rpb.UploadRequest(chunk=chunk))
        self.sent += count

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def rest(self, pause: float) -> None:
        """What is left, one by one."""
        while self.sent < len(self.pictures):
            self.send()
            await asyncio.sleep(pause)
        self.end()
        await self.receiving

    async def _requests(self) -> AsyncIterator[rpb.UploadRequest]:
        while (request := await self._queue.get()) is not None:
            yield request


def numbers(count: int, seed: int) -> tuple[list[bytes], str]:
    """Pictures of so many digits, and what is to be read."""
    frames, shown = drawn(np.random.default_rng(seed), count)
    return [digits.image(frame) for frame in frames], " ".join(map(str, shown))


def inline(pictures: Sequence[bytes]) -> pb.Media:
    frames = [pb.Frame(header=pb.FrameHeader(), data=data) for data in pictures]
    return pb.Media(kind=pb.MEDIA_KIND_VIDEO, frames=pb.FrameSequence(frames=frames, fps=1))


@asynccontextmanager
async def all_ended(service: LocalService) -> AsyncIterator[None]:
    """Nothing that the block started runs behind it, and nothing is held."""
    before = asyncio.all_tasks()
    yield
    await until(lambda: not any(not task.done() for task in asyncio.all_tasks() - before))
    await settled(service)


async def with_deadline(service: LocalService, request: rpb.GenerateRequest, seconds: float) -> Answer:
    got = Answer()
    async with aclosing(service.generate(request, timeout=seconds)) as events:
        async for event in events:
            note(got, event)
    return got


async def test_digits_are_read_right_while_their_frames_come_one_by_one() -> None:
    async with running() as service:
        for seed in range(4):
            pictures, expected = numbers(5 + seed, seed)
            async with all_ended(service):
                sender = Sender(service, pictures)
                asking = asyncio.create_task(ask(service, question(READ, sender.medium)))
                await sender.rest(0.02)
                streamed = await asking
            await service.store.flush()
            service.decoder.flush()
            whole = await ask(service, question(READ, inline(pictures)))
            assert streamed.text == expected
            assert (streamed.ids, streamed.text) == (whole.ids, whole.text)
            assert streamed.media == whole.media


async def test_a_prompt_is_computed_up_to_the_first_frame_that_was_not_sent() -> None:
    pictures, expected = numbers(6, 10)
    async with running() as service, all_ended(service):
        sender = Sender(service, pictures)
        asking = asyncio.create_task(ask(service, question(READ, sender.medium)))
        held = service.decoder.engine.holdings
        for count in range(1, 6):
            sender.send()
            await until(lambda count=count: held.held.visual == 5 * count)  # type: ignore[misc]
            assert service.encoder.counts.encoded_units == count and held.held.pages > 0
        assert not asking.done()
        await sender.rest(0)
        answer = await asking
        assert answer.text == expected
        assert answer.finished is not None and to_seconds(answer.finished.times.fetch) > 0


async def test_a_frame_that_never_comes_ends_the_request_at_its_deadline_with_the_stage() -> None:
    pictures, _ = numbers(4, 11)
    async with running() as service:
        for sent in (0, 2):
            async with all_ended(service):
                sender = Sender(service, pictures)
                sender.send(sent)
                with pytest.raises(DeadlineExceeded) as caught:
                    await with_deadline(service, question(READ, sender.medium), 1.5)
                assert caught.value.stage == "fetch"
                assert service.encoder.counts.encoded_units == sent
                sender.receiving.cancel()
        assert len(service.router.uploads) == 0


async def test_an_upload_that_breaks_off_ends_the_request_that_reads_it() -> None:
    pictures, _ = numbers(4, 12)
    async with running() as service, all_ended(service):
        sender = Sender(service, pictures)
        asking = asyncio.create_task(ask(service, question(READ, sender.medium)))
        sender.send(2)
        await until(lambda: service.encoder.counts.encoded_units == 2)
        sender.end()
        with pytest.raises(InvalidRequest) as caught:
            await asking
        assert (caught.value.reason, caught.value.item) == ("UPLOAD_PROTOCOL", "messages[0].content[1]")
        with pytest.raises(InvalidRequest):
            await sender.receiving


async def test_a_frame_at_fault_ends_the_request_before_the_frames_behind_it_were_sent() -> None:
    pictures, _ = numbers(6, 13)
    pictures[2] = b"no picture"
    async with running() as service, all_ended(service):
        sender = Sender(service, pictures)
        sender.send(3)
        with pytest.raises(InvalidRequest) as caught:
            await ask(service, question(READ, sender.medium))
        assert (caught.value.reason, caught.value.item) == ("MEDIA_UNSUPPORTED", "messages[0].content[1]")
        assert caught.value.facts["index"] == 2
        sender.receiving.cancel()


@pytest.mark.parametrize("sent", [0, 1, 3])
async def test_a_caller_that_leaves_in_the_middle_leaves_nothing_but_the_upload(sent: int) -> None:
    pictures, expected = numbers(4, 14)
    async with running() as service:
        sender = Sender(service, pictures)
        async with all_ended(service):
            asking = asyncio.create_task(ask(service, question(READ, sender.medium)))
            sender.send(sent)
            await until(lambda: service.encoder.counts.encoded_units == sent)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await sender.rest(0)
        assert (await ask(service, question(READ, sender.medium))).text == expected


async def test_two_lists_that_come_share_the_budgets_of_their_request_as_if_both_were_whole() -> None:
    many, _ = numbers(5, 16)
    few = [digits.image(np.repeat(np.repeat(frame, 4, 0), 4, 1)) for frame in drawn(np.random.default_rng(17), 3)[0]]
    async with running() as service:
        processor = service.encoder.processor
        assert isinstance(processor, MossVLProcessor)
        processor.budgets = replace(processor.budgets, video_max_pixels=3 * 128 * 128)
        whole = await ask(service, question(READ, inline(few), inline(many), max_tokens=2))
        alone = await ask(service, question(READ, inline(few), max_tokens=2))
        assert whole.media[0].resized_size != alone.media[0].resized_size, "the budget is shared"
        service.decoder.flush()
        async with all_ended(service):
            senders = [Sender(service, few), Sender(service, many)]
            request = question(READ, *(sender.medium for sender in senders), max_tokens=2)
            asking = asyncio.create_task(ask(service, request))
            await asyncio.gather(senders[0].rest(0.03), senders[1].rest(0.01))
            streamed = await asking
        assert streamed.ids == whole.ids
        for one, other in zip(streamed.media, whole.media, strict=True):
            other.units_cached = one.units_cached = 0
            assert one == other


async def answered(fleet: MeddledFleet, request: rpb.GenerateRequest, sources: Sequence[Source]) -> Answer:
    got = Answer()
    work = Coordinator(request, sources, fleet, fleet.served, tenant_root=bytes(32))
    async with aclosing(work.run()) as events:
        async for event in events:
            note(got, event)
    return got


async def test_an_encoder_lost_while_a_medium_comes_is_replaced_and_encodes_what_was_not_announced() -> None:
    pictures, expected = numbers(6, 18)
    three = asyncio.Event()

    def dies_after_three(number: int, response: epb.EncodeResponse | dpb.DecodeResponse) -> bool:
        assert isinstance(response, epb.EncodeResponse)
        if number == 1 and response.HasField("ready") and response.ready.unit == 2:
            three.set()
        if number == 1 and response.HasField("ready") and response.ready.unit == 3:
            raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")
        return True

    async with running() as service:
        fleet = MeddledFleet(service, encoder=dies_after_three)
        sender = Sender(service, pictures)
        upload = await service.router.uploads.find(service.router.local.root, sender.medium.handle)
        asking = asyncio.create_task(answered(fleet, question(READ, sender.medium), [upload]))
        sender.send(3)
        await three.wait()
        sender.send(1)
        assert fleet.encoders is not None
        await until(lambda: fleet.encoders is not None and len(fleet.encoders.goes) == 2)
        assert [unit.first for unit in fleet.encoders.goes[1].units] == [3, 4, 5]
        await sender.rest(0.01)
        got = await asking
        assert got.text == expected
        assert service.encoder.counts.encoded_units == 6, "each once, although the bytes went twice"
        await forget(service)  # nobody is left who would take back the pin of the unit that nobody was told of
        await settled(service)


async def test_a_stalled_upload_ends_the_request_when_it_is_given_up() -> None:
    pictures, _ = numbers(4, 19)
    async with running() as service:
        uploads = service.router.uploads
        uploads._limits = replace(uploads._limits, stall_seconds=0.3)
        async with all_ended(service):
            sender = Sender(service, pictures)
            sender.send(2)
            error: ChiasmError | None = None
            began = time.monotonic()
            try:
                await with_deadline(service, question(READ, sender.medium), 30)
            except ChiasmError as raised:
                error = raised
            assert isinstance(error, InvalidRequest) and error.reason == "UPLOAD_PROTOCOL"
            assert error.facts["cause"] == "DEADLINE_EXCEEDED" and time.monotonic() - began < 20
            with pytest.raises(DeadlineExceeded) as caught:
                await sender.receiving
            assert caught.value.stage == "upload"
