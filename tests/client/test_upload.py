"""Media that are sent by themselves: in pieces, never twice, beside the request or before it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from blake3 import blake3
from PIL import Image as Pillow

from chiasm.client import AsyncClient, Client, Frames, Handle, Image, Message, Video
from chiasm.client.convert import INLINE_BYTES, UPLOAD_TTL
from chiasm.client.upload import Upload
from chiasm.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded, ServerError, StatusError
from chiasm.rpc.limits import CHUNK_BYTES, MEDIA_BYTES
from chiasm.rpc.server import Server
from chiasm.rpc.times import to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.client.fake import TEXT, FakeTransport, answer
from tests.client.router import READ, WAIT, ScriptedRouter, serving

ID = "0123456789abcdef" * 2


@pytest.fixture
async def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
async def server(router: ScriptedRouter) -> AsyncIterator[Server]:
    async with serving(router) as running:
        yield running


def noise(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def chunks(messages: list[rpb.UploadRequest]) -> list[pb.MediaChunk]:
    assert {message.WhichOneof("message") for message in messages[1:]} == {"chunk"}
    return [message.chunk for message in messages[1:]]


# -- one medium --------------------------------------------------------------------------------------------------------


async def test_a_file_is_sent_in_pieces_and_named_by_its_handle(
    router: ScriptedRouter, server: Server, tmp_path: Path
) -> None:
    data = noise(2 * CHUNK_BYTES + 5)
    path = tmp_path / "clip.mp4"
    path.write_bytes(data)
    async with AsyncClient(server.target) as client:
        handle = await client.upload(Video(path), ttl=90)
        await client.generate("fake", ["What?", handle, Video(handle, fps=2, max_frames=8)])
    (messages,) = router.uploads
    header = messages[0].header
    assert (len(header.upload_id), header.media.kind, header.media.byte_length) == (16, pb.MEDIA_KIND_VIDEO, len(data))
    assert not header.HasField("digest"), "it would cost a second reading"
    assert to_seconds(header.ttl) == 90
    assert [len(chunk.data) for chunk in chunks(messages)] == [CHUNK_BYTES, CHUNK_BYTES, 5]
    assert [chunk.last for chunk in chunks(messages)] == [False, False, True]
    assert b"".join(chunk.data for chunk in chunks(messages)) == data
    assert (handle.id, handle.kind, handle.byte_length) == (header.upload_id.hex(), "video", len(data))
    assert (handle.listed, handle.expires_at) == (False, datetime.fromtimestamp(1_900_000_000, UTC))
    plain, chosen = router.requests[0].media
    assert (plain.kind, plain.handle, plain.HasField("sampling")) == (pb.MEDIA_KIND_VIDEO, handle.id, False)
    assert (chosen.handle, chosen.sampling.fps, chosen.sampling.max_frames) == (handle.id, 2, 8)
    assert router.uploads == [messages], "a handle is never sent again"


async def test_the_digest_of_bytes_in_memory_is_told_before_them(router: ScriptedRouter, server: Server) -> None:
    data = noise(1000)
    async with AsyncClient(server.target) as client:
        handle = await client.upload(Image(data))
    (messages,) = router.uploads
    assert messages[0].header.digest == blake3(data).digest()
    assert (handle.kind, not messages[0].header.HasField("ttl")) == ("image", True)


async def test_frames_are_sent_one_after_the_other_described_beforehand(router: ScriptedRouter, server: Server) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (700, 600, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.new("RGB", (9, 6)).save(file, format="PNG")
    async with AsyncClient(server.target) as client:
        handle = await client.upload(Frames([raw, file.getvalue(), raw[::-1]], timestamps=[0, 0.5, 2]))
    (messages,) = router.uploads
    header = messages[0].header.media
    assert (header.kind, header.HasField("byte_length")) == (pb.MEDIA_KIND_VIDEO, False)
    assert [to_seconds(frame.frame_offset) for frame in header.frames.frames] == [0, 0.5, 2]
    layouts = [frame.raw if frame.HasField("raw") else None for frame in header.frames.frames]
    assert [layout and (layout.size.height, layout.size.width, layout.channels) for layout in layouts] == [
        (700, 600, 3),
        None,
        (700, 600, 3),
    ]
    sent = chunks(messages)
    assert [chunk.frame for chunk in sent] == [0, 0, 1, 2, 2]
    assert [chunk.last for chunk in sent] == [False, False, False, False, True]
    assert b"".join(chunk.data for chunk in sent if chunk.frame == 2) == raw[::-1].tobytes()
    assert handle.listed
    with pytest.raises(InvalidRequest) as caught:
        Video(handle, fps=2)
    assert caught.value.reason == "SAMPLING_CONFLICT"


async def test_an_array_is_sent_as_pixels(router: ScriptedRouter, server: Server) -> None:
    async with AsyncClient(server.target) as client:
        handle = await client.upload(Image(np.zeros((4, 5), np.uint8)))
    header = router.uploads[0][0].header.media
    (frame,) = header.frames.frames
    assert (header.kind, frame.raw.size.height, frame.raw.size.width, frame.raw.channels) == (
        pb.MEDIA_KIND_IMAGE,
        4,
        5,
        1,
    )
    assert (handle.kind, handle.listed) == ("image", False)


async def test_the_synchronous_client_uploads_too(router: ScriptedRouter, server: Server) -> None:
    def ask() -> str:
        with Client(server.target) as client:
            return client.generate("fake", ["What?", client.upload(Video(b"clip"))]).text

    assert await asyncio.to_thread(ask) == TEXT
    assert router.requests[0].media[0].handle == router.uploads[0][0].header.upload_id.hex()


@pytest.mark.parametrize(
    ("medium", "reason"),
    [(Video(b""), "MEDIA_EMPTY"), (Video(b"x", fps=2), "SAMPLING_CONFLICT")],
    ids=["empty", "options"],
)
async def test_what_cannot_be_uploaded_is_refused_before_anything_is_sent(
    router: ScriptedRouter, server: Server, medium: Any, reason: str
) -> None:
    async with AsyncClient(server.target) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.upload(medium)
    assert caught.value.reason == reason
    assert not router.uploads


@pytest.mark.parametrize("medium", ["clip.mp4", Handle(ID, "video"), Video(Handle(ID, "video"))], ids=repr)
async def test_what_is_no_medium_is_a_type_error(medium: Any) -> None:
    async with AsyncClient(transport=FakeTransport().opener) as client:
        with pytest.raises(TypeError):
            await client.upload(medium)


async def test_a_file_that_is_not_there_is_an_os_error(router: ScriptedRouter, server: Server, tmp_path: Path) -> None:
    async with AsyncClient(server.target) as client:
        with pytest.raises(FileNotFoundError):
            await client.upload(Video(tmp_path / "missing.mp4"))
    assert not router.uploads


async def test_a_file_that_shrinks_while_it_is_sent_ends_the_upload(
    router: ScriptedRouter, server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(noise(3 * CHUNK_BYTES))
    messages = Upload(Video(path)).requests()
    await anext(messages)
    await anext(messages)
    path.write_bytes(noise(CHUNK_BYTES))
    with pytest.raises(InvalidRequest) as caught:
        async for _ in messages:
            pass
    assert (caught.value.reason, caught.value.facts["promised"]) == ("UPLOAD_PROTOCOL", 3 * CHUNK_BYTES)


async def test_a_refused_upload_is_told_as_what_it_is(router: ScriptedRouter, server: Server) -> None:
    router.refused = Overloaded("UPLOADS_FULL", "too many uploads are kept", retry_after=5)
    async with AsyncClient(server.target) as client:
        for _ in range(20):  # gRPC's own status comes in its place now and then, where nothing keeps it from that
            with pytest.raises(Overloaded) as caught:
                await client.upload(Video(noise(8 * CHUNK_BYTES)))
            assert (caught.value.reason, caught.value.retry_after) == ("UPLOADS_FULL", 5)
    assert {len(messages) for messages in router.uploads} == {1}


async def test_bytes_that_changed_on_the_way_are_noticed() -> None:
    sent = Upload(Video(b"clip"))
    async for _ in sent.requests():
        pass
    sent.check(rpb.UploadResponse(handle=sent.handle, digest=blake3(b"clip").digest()))
    with pytest.raises(ServerError) as caught:
        sent.check(rpb.UploadResponse(handle=sent.handle, digest=blake3(b"clap").digest()))
    assert caught.value.reason == "DATA_LOSS"


# -- media of one request ----------------------------------------------------------------------------------------------


async def test_large_media_are_sent_beside_the_request(router: ScriptedRouter, server: Server, tmp_path: Path) -> None:
    small, large = noise(1000), noise(INLINE_BYTES)
    path = tmp_path / "clip.mp4"
    path.write_bytes(large)
    router.scripts = [[READ, *answer()]]
    async with AsyncClient(server.target) as client:
        await client.generate("fake", [Image(small), Video(path, fps=3), "?"], request_id="mine")
    first, second = router.requests[0].media
    assert (first.data, second.WhichOneof("source")) == (small, "handle")
    (messages,) = router.uploads
    assert messages[0].header.upload_id.hex() == second.handle
    assert second.sampling.fps == 3
    assert to_seconds(messages[0].header.ttl) == UPLOAD_TTL
    assert router.beside[0]["x-request-id"] == "mine"


async def test_many_media_share_the_room_inside_a_request(router: ScriptedRouter, server: Server) -> None:
    size = INLINE_BYTES // 4
    router.scripts = [[READ, *answer()]]
    async with AsyncClient(server.target) as client:
        await client.generate("fake", [*(Image(noise(size)) for _ in range(6)), "?"])
    (request,) = router.requests
    assert [medium.WhichOneof("source") for medium in request.media] == ["data"] * 4 + ["handle"] * 2
    assert request.ByteSize() < INLINE_BYTES + 10_000
    assert len(router.uploads) == 2


async def test_in_process_and_elsewhere_everything_is_inside() -> None:
    transport = FakeTransport()
    async with AsyncClient(transport=transport.opener) as client:
        await client.generate("fake", [Video(noise(INLINE_BYTES + 1)), "?"])
    assert transport.requests[0].media[0].WhichOneof("source") == "data"


async def test_media_beyond_any_message_are_uploaded_not_refused(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "long.mp4"
    with path.open("wb") as file:
        file.truncate(MEDIA_BYTES + 1)
    async with AsyncClient(server.target) as client:
        stream = client.stream("fake", [Video(path), "?"])
        outgoing = stream._outgoing()
    assert outgoing.request.media[0].handle == outgoing.uploads[0].handle


async def test_an_upload_that_is_refused_is_told_in_place_of_the_request_it_broke(
    router: ScriptedRouter, server: Server
) -> None:
    router.refused = InvalidRequest("MEDIA_TOO_LARGE", "the medium is too large")
    broken = InvalidRequest("UPLOAD_PROTOCOL", "the upload of this medium broke off")
    router.scripts = [[broken], [0.1, broken], [WAIT]]
    async with AsyncClient(server.target) as client:
        for _ in range(3):
            with pytest.raises(InvalidRequest) as caught:
                await client.generate("fake", ["?", Video(noise(INLINE_BYTES + 1))])
            assert (caught.value.reason, caught.value.item) == ("MEDIA_TOO_LARGE", "messages[0].content[1]")
        await asyncio.wait_for(router.left.wait(), 20)


async def test_a_file_that_cannot_be_read_ends_the_request(
    router: ScriptedRouter, server: Server, tmp_path: Path
) -> None:
    router.scripts = [[WAIT]]
    path = tmp_path / "clip.mp4"
    path.write_bytes(noise(INLINE_BYTES + 1))
    async with AsyncClient(server.target) as client:
        stream = client.stream("fake", ["?", Video(path)])
        outgoing = stream._outgoing()
        path.unlink()
        stream._outgoing = lambda: outgoing
        with pytest.raises(FileNotFoundError):
            await anext(stream)


async def test_a_request_that_is_refused_ends_its_uploads(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[NotFound("MODEL_NOT_FOUND", "there is no such model")]]
    async with AsyncClient(server.target) as client:
        with pytest.raises(NotFound):
            await client.generate("nothing", ["?", Video(noise(INLINE_BYTES + 1))])
    async with asyncio.timeout(20):
        await server.stop(10)  # nothing runs any more, or this would take its time


async def test_leaving_the_stream_ends_its_uploads(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[WAIT]]
    async with AsyncClient(server.target) as client:
        async with client.stream("fake", ["?", Video(noise(INLINE_BYTES + 1))]):
            await asyncio.wait_for(router.came.wait(), 20)
        await asyncio.wait_for(router.left.wait(), 20)


async def test_the_deadline_of_a_request_ends_its_uploads(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[WAIT]]
    async with AsyncClient(server.target) as client:
        with pytest.raises(DeadlineExceeded, match="timeout"):
            await client.generate("fake", ["?", Video(noise(INLINE_BYTES + 1))], timeout=0.5)
        await asyncio.wait_for(router.left.wait(), 20)
        broken = NotFound("MODEL_NOT_FOUND", "there is no such model")
        router.scripts = [[broken]]
        with pytest.raises(NotFound) as caught:
            await client.generate("fake", ["?", Video(noise(INLINE_BYTES + 1))])
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)


# -- handles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["", "abc", ID.upper(), ID + "0", "../" + ID])
def test_a_handle_is_32_hexadecimal_digits(id: str) -> None:  # noqa: A002 - its name
    with pytest.raises(InvalidRequest):
        Handle(id, "video")


def test_a_handle_of_one_kind_is_not_taken_for_the_other() -> None:
    for make, handle in ((Image, Handle(ID, "video")), (Video, Handle(ID, "image"))):
        with pytest.raises(InvalidRequest) as caught:
            make(handle)
        assert caught.value.reason == "FIELD_OUT_OF_RANGE"
    with pytest.raises(TypeError, match="frame"):
        Frames([Image(Handle(ID, "image"))], fps=1)
    assert Message("user", Handle(ID, "image")).content == (Handle(ID, "image"),)


async def test_an_expired_handle_is_told_with_its_place(router: ScriptedRouter, server: Server) -> None:
    router.scripts = [[NotFound("MEDIA_EXPIRED", "no medium is kept under this handle", item="messages[0].content[1]")]]
    async with AsyncClient(server.target) as client:
        with pytest.raises(StatusError) as caught:
            await client.generate("fake", ["?", Handle(ID, "image")])
    assert (caught.value.reason, caught.value.item) == ("MEDIA_EXPIRED", "messages[0].content[1]")
