"""Uploads: kept under handles, read while they come, bounded in bytes and time, gone when anything is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from blake3 import blake3

from chiasm.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded
from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.upload import PIECE_BYTES, Upload
from router.uploads import UploadLimits, Uploads

TENANT = bytes(32)
ID = bytes(range(16))
HANDLE = ID.hex()


def header(upload_id: bytes = ID, **more: object) -> rpb.UploadRequest:
    media = pb.MediaHeader(kind=pb.MEDIA_KIND_VIDEO)
    if "byte_length" in more:
        media.byte_length = more.pop("byte_length")  # type: ignore[assignment]
    return rpb.UploadRequest(header=rpb.UploadHeader(upload_id=upload_id, media=media, **more))  # type: ignore[arg-type]


def piece(data: bytes, *, last: bool = False, frame: int = 0) -> rpb.UploadRequest:
    return rpb.UploadRequest(chunk=pb.MediaChunk(data=data, last=last, frame=frame))


async def sent(*requests: rpb.UploadRequest) -> AsyncIterator[rpb.UploadRequest]:
    for request in requests:
        yield request


class Sender:
    """An upload that goes on when it is told to."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[rpb.UploadRequest | None] = asyncio.Queue()

    def send(self, *requests: rpb.UploadRequest | None) -> None:
        for request in requests:
            self._queue.put_nowait(request)

    async def requests(self) -> AsyncIterator[rpb.UploadRequest]:
        while (request := await self._queue.get()) is not None:
            yield request


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cost(data: bytes) -> int:
    """Bytes that an upload of one piece takes."""
    return len(data) + 2 * PIECE_BYTES + header().header.media.ByteSize()


async def read(upload: Upload) -> bytes:
    return b"".join([chunk.data async for chunk in upload.chunks()])


async def find(uploads: Uploads, tenant: bytes = TENANT) -> Upload:
    return await uploads.find(tenant, HANDLE)


async def test_what_was_sent_is_read_again_and_again() -> None:
    uploads = Uploads(UploadLimits())
    response = await uploads.receive(TENANT, sent(header(), piece(b"ab"), piece(b"cd", last=True)))
    assert (response.handle, response.byte_length, response.digest) == (HANDLE, 4, blake3(b"abcd").digest())
    upload = await find(uploads)
    assert [await read(upload), await read(upload)] == [b"abcd", b"abcd"] and upload.whole


async def test_a_reader_is_fed_while_the_bytes_come() -> None:
    uploads, sender = Uploads(UploadLimits()), Sender()
    receiving = asyncio.create_task(uploads.receive(TENANT, sender.requests()))
    sender.send(header())
    upload = await find(uploads)
    chunks = upload.chunks()
    sender.send(piece(b"first"))
    assert (await anext(chunks)).data == b"first" and not upload.whole
    sender.send(piece(b"last", last=True), None)
    assert (await anext(chunks)).data == b"last"
    await receiving


async def test_a_request_that_overtakes_the_header_waits_for_it() -> None:
    uploads = Uploads(UploadLimits())
    finding = asyncio.create_task(find(uploads))
    await asyncio.sleep(0)
    await uploads.receive(TENANT, sent(header(), piece(b"x", last=True)))
    assert await read(await finding) == b"x"


async def test_unknown_expired_and_another_tenants_handles_are_the_same_not_found() -> None:
    clock = Clock()
    uploads = Uploads(UploadLimits(ttl=10, header_seconds=0.01), clock=clock)
    told = []
    with pytest.raises(NotFound) as caught:
        await find(uploads)
    told.append(str(caught.value))
    await uploads.receive(TENANT, sent(header(), piece(b"x", last=True)))
    with pytest.raises(NotFound) as caught:
        await find(uploads, bytes([1] * 32))
    told.append(str(caught.value))
    clock.now = 11
    with pytest.raises(NotFound) as caught:
        await find(uploads)
    told.append(str(caught.value))
    assert len(set(told)) == 1 and "MEDIA_EXPIRED" in told[0]
    assert len(uploads) == 0


async def test_an_upload_that_is_read_does_not_expire_and_its_time_begins_again() -> None:
    clock = Clock()
    uploads = Uploads(UploadLimits(ttl=10, header_seconds=0.01), clock=clock)
    await uploads.receive(TENANT, sent(header(), piece(b"x", last=True)))
    with uploads.held(await find(uploads)):
        clock.now = 25
        await find(uploads)
    clock.now = 34
    await find(uploads)
    clock.now = 36
    with pytest.raises(NotFound):
        await find(uploads)


async def test_the_time_to_live_that_is_asked_for_is_bounded() -> None:
    clock = Clock()
    uploads = Uploads(UploadLimits(ttl=10, max_ttl=20, header_seconds=0.01), clock=clock)
    asked = header()
    asked.header.ttl.FromSeconds(1_000_000)
    await uploads.receive(TENANT, sent(asked, piece(b"x", last=True)))
    clock.now = 19
    await find(uploads)
    clock.now = 21
    with pytest.raises(NotFound):
        await find(uploads)


@pytest.mark.parametrize(
    ("requests", "cause"),
    [
        ([], "header"),
        ([piece(b"x", last=True)], "header"),
        ([header(), header()], "header"),
        ([header(b"short")], "handle"),
        ([header(), piece(b"x")], "length"),
        ([header()], "length"),
        ([header(), piece(b"x", last=True), piece(b"y", last=True)], "length"),
        ([header(byte_length=3), piece(b"xy", last=True)], "length"),
        ([header(byte_length=3), piece(b"wxyz")], "length"),
        ([header(), piece(bytes(CHUNK_BYTES + 1), last=True)], "chunk"),
        ([header(), piece(b"x", frame=1, last=True)], "frame"),
        ([header(), piece(b""), piece(b"x", last=True)], "chunk"),
        ([header(digest=bytes(32)), piece(b"x", last=True)], "digest"),
    ],
)
async def test_b146_an_upload_that_breaks_its_promises_is_refused_and_its_bytes_are_freed(
    requests: list[rpb.UploadRequest], cause: str
) -> None:
    uploads = Uploads(UploadLimits())
    with pytest.raises(InvalidRequest) as caught:
        await uploads.receive(TENANT, sent(*requests))
    assert (caught.value.reason, caught.value.facts["cause"]) == ("UPLOAD_PROTOCOL", cause)
    assert (len(uploads), uploads.size) == (0, 0)


async def test_a_broken_promise_is_noticed_before_a_reader_takes_it_for_the_whole() -> None:
    uploads, sender = Uploads(UploadLimits()), Sender()
    receiving = asyncio.create_task(uploads.receive(TENANT, sender.requests()))
    sender.send(header(digest=blake3(b"abcd").digest()), piece(b"ab"))
    reading = asyncio.create_task(read(await find(uploads)))
    sender.send(piece(b"XX", last=True), None)
    with pytest.raises(InvalidRequest) as caught:
        await reading
    assert (caught.value.reason, caught.value.facts["cause"]) == ("UPLOAD_PROTOCOL", "digest")
    with pytest.raises(InvalidRequest):
        await receiving


async def test_b147_an_upload_that_stands_still_is_given_up_with_the_stage() -> None:
    uploads, sender = Uploads(UploadLimits(stall_seconds=0.05)), Sender()
    sender.send(header(), piece(b"x"))
    with pytest.raises(DeadlineExceeded) as caught:
        await uploads.receive(TENANT, sender.requests())
    assert caught.value.stage == "upload" and (len(uploads), uploads.size) == (0, 0)


async def test_a_sender_that_leaves_ends_the_requests_that_read() -> None:
    uploads, sender = Uploads(UploadLimits()), Sender()
    receiving = asyncio.create_task(uploads.receive(TENANT, sender.requests()))
    sender.send(header(), piece(b"x"))
    reading = asyncio.create_task(read(await find(uploads)))
    await asyncio.sleep(0.01)
    receiving.cancel()
    with pytest.raises(InvalidRequest) as caught:
        await reading
    assert caught.value.facts["cause"] == "broken" and len(uploads) == 0


@pytest.mark.parametrize(
    "requests",
    [
        lambda: sent(header(byte_length=11), piece(b"x", last=True)),
        lambda: sent(header(), piece(b"12345678"), piece(b"901", last=True)),
    ],
)
async def test_a_medium_larger_than_is_taken_is_refused_with_both_numbers(
    requests: Callable[[], AsyncIterator[rpb.UploadRequest]],
) -> None:
    uploads = Uploads(UploadLimits(max_bytes=10))
    with pytest.raises(InvalidRequest) as caught:
        await uploads.receive(TENANT, requests())
    assert caught.value.reason == "MEDIA_TOO_LARGE" and caught.value.facts == {"bytes": 11, "limit": 10}
    assert uploads.size == 0


async def test_equal_bytes_may_be_sent_again_and_other_bytes_may_not() -> None:
    uploads = Uploads(UploadLimits())
    for _ in range(2):
        await uploads.receive(TENANT, sent(header(), piece(b"same", last=True)))
    assert (len(uploads), uploads.size) == (1, cost(b"same"))
    with pytest.raises(InvalidRequest) as caught:
        await uploads.receive(TENANT, sent(header(), piece(b"other", last=True)))
    assert (caught.value.reason, caught.value.code) == ("UPLOAD_IN_USE", "ALREADY_EXISTS")
    assert await read(await find(uploads)) == b"same"


async def test_room_is_made_by_what_waited_longest_and_never_by_what_is_read() -> None:
    clock = Clock()
    uploads = Uploads(UploadLimits(total_bytes=2 * cost(b"12345"), header_seconds=0.01), clock=clock)
    ids = [bytes([i] * 16) for i in range(4)]
    for number, upload_id in enumerate(ids[:2]):
        clock.now = number
        await uploads.receive(TENANT, sent(header(upload_id), piece(b"12345", last=True)))
    with uploads.held(await uploads.find(TENANT, ids[0].hex())):
        await uploads.receive(TENANT, sent(header(ids[2]), piece(b"12345", last=True)))
        with pytest.raises(NotFound):
            await uploads.find(TENANT, ids[1].hex())
        with uploads.held(await uploads.find(TENANT, ids[2].hex())), pytest.raises(Overloaded) as caught:
            await uploads.receive(TENANT, sent(header(ids[3]), piece(b"1", last=True)))
    assert caught.value.reason == "UPLOADS_FULL" and caught.value.retryable
    assert uploads.size == 2 * cost(b"12345")


async def test_as_many_uploads_are_kept_as_may_be() -> None:
    uploads = Uploads(UploadLimits(max_uploads=1))
    await uploads.receive(TENANT, sent(header(bytes(16)), piece(b"x", last=True)))
    await uploads.receive(TENANT, sent(header(), piece(b"y", last=True)))
    assert len(uploads) == 1
    with uploads.held(await find(uploads)), pytest.raises(Overloaded) as caught:
        await uploads.receive(TENANT, sent(header(bytes(16)), piece(b"x", last=True)))
    assert caught.value.retryable and caught.value.facts["uploads"] == 1


async def test_an_upload_of_more_frames_than_any_list_has_is_refused_at_its_header() -> None:
    uploads, asked = Uploads(UploadLimits()), header()
    asked.header.media.frames.frames.extend(pb.FrameHeader() for _ in range(5000))
    with pytest.raises(InvalidRequest) as caught:
        await uploads.receive(TENANT, sent(asked, piece(b"x", last=True)))
    assert caught.value.reason == "TOO_MANY_ITEMS" and caught.value.facts["got"] == 5000


async def test_what_a_header_says_is_bounded_and_counted() -> None:
    uploads, asked = Uploads(UploadLimits()), header()
    asked.header.media.mime_type = "x" * 300
    with pytest.raises(InvalidRequest) as caught:
        await uploads.receive(TENANT, sent(asked, piece(b"x", last=True)))
    assert caught.value.facts["field"] == "mime_type"
    many = header()
    many.header.media.frames.frames.extend(pb.FrameHeader(raw=pb.RawLayout(channels=3)) for _ in range(4000))
    await uploads.receive(TENANT, sent(many, piece(b"x", frame=3999, last=True)))
    assert uploads.size > many.header.media.ByteSize() > 4000


async def test_small_pieces_count_for_more_than_their_bytes() -> None:
    """Keeping a piece costs more than a byte."""
    uploads = Uploads(UploadLimits(total_bytes=1 << 20))
    with pytest.raises(Overloaded):
        await uploads.receive(TENANT, sent(header(), *[piece(b"x")] * 3000, piece(b"x", last=True)))
    assert uploads.size == 0


async def test_an_upload_that_takes_too_long_is_given_up_although_it_moves() -> None:
    clock = Clock()
    uploads = Uploads(UploadLimits(max_seconds=10), clock=clock)

    async def slow() -> AsyncIterator[rpb.UploadRequest]:
        yield header()
        while True:
            clock.now += 4
            yield piece(b"x")

    with pytest.raises(DeadlineExceeded) as caught:
        await uploads.receive(TENANT, slow())
    assert caught.value.stage == "upload" and (len(uploads), clock.now) == (0, 12)


async def test_a_reader_that_leaves_does_not_end_the_upload_it_read() -> None:
    clock, sender = Clock(), Sender()
    uploads = Uploads(UploadLimits(ttl=10), clock=clock)
    receiving = asyncio.create_task(uploads.receive(TENANT, sender.requests()))
    sender.send(header(), piece(b"sl"))
    with uploads.held(await find(uploads)):
        pass
    clock.now = 60
    sender.send(piece(b"ow", last=True), None)
    await receiving
    assert await read(await find(uploads)) == b"slow"


async def test_a_medium_is_not_forgotten_while_it_is_sent_again() -> None:
    clock, sender = Clock(), Sender()
    uploads = Uploads(UploadLimits(ttl=10), clock=clock)
    await uploads.receive(TENANT, sent(header(), piece(b"same", last=True)))
    again = asyncio.create_task(uploads.receive(TENANT, sender.requests()))
    sender.send(header(), piece(b"sa"))
    await asyncio.sleep(0.01)
    clock.now = 20
    await uploads.receive(TENANT, sent(header(bytes(16)), piece(b"other", last=True)))
    sender.send(piece(b"me", last=True), None)
    assert (await again).handle == HANDLE
    assert await read(await find(uploads)) == b"same"


async def test_a_handle_is_still_there_when_it_is_given_out_although_room_was_wanted_meanwhile() -> None:
    uploads = Uploads(UploadLimits(max_uploads=1))
    sender = Sender()
    receiving = asyncio.create_task(uploads.receive(TENANT, sender.requests()))
    sender.send(header(), piece(b"all of it", last=True))
    first = await find(uploads)
    assert await read(first) == b"all of it"
    with pytest.raises(Overloaded) as refused:
        await uploads.receive(TENANT, sent(header(bytes(16)), piece(b"another", last=True)))
    assert refused.value.reason == "UPLOADS_FULL"
    sender.send(None)
    assert (await receiving).handle == HANDLE
    assert await find(uploads) is first


async def test_equal_bytes_in_other_frames_are_another_medium() -> None:
    uploads = Uploads(UploadLimits())

    def cut(*frames: bytes) -> AsyncIterator[rpb.UploadRequest]:
        opening = header()
        opening.header.media.frames.frames.extend([pb.FrameHeader()] * len(frames))
        pieces = [piece(data, frame=at, last=at == len(frames) - 1) for at, data in enumerate(frames)]
        return sent(opening, *pieces)

    for _ in range(2):
        await uploads.receive(TENANT, cut(b"ab", b"c"))
    with pytest.raises(InvalidRequest) as caught:
        await uploads.receive(TENANT, cut(b"a", b"bc"))
    assert caught.value.reason == "UPLOAD_IN_USE"
