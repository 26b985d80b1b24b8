"""What a caller sends, held until it is taken and no longer, and no more of it than is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from chiasm.errors import InvalidRequest
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service.inbox import Inbox

KIB = 1 << 10


class Sender:
    """Requests that are written as they are read, one after the other."""

    def __init__(self, *messages: epb.EncodeRequest, frames: int) -> None:
        header = pb.MediaHeader(frames=pb.FrameList(frames=[pb.FrameHeader()] * frames) if frames else None)
        self.messages = [epb.EncodeRequest(open=epb.EncodeOpen(media=header)), *messages]
        self.written = 0
        self.more = asyncio.Event()

    async def requests(self) -> AsyncIterator[epb.EncodeRequest]:
        for message in self.messages:
            self.written += 1
            yield message
        await self.more.wait()


def piece(frame: int, data: bytes, *, ends: bool = False, last: bool = False) -> epb.EncodeRequest:
    return epb.EncodeRequest(chunk=pb.MediaChunk(frame=frame, data=data, ends_frame=ends, last=last))


async def opened(sender: Sender, *, held_bytes: int = 1 << 20, max_bytes: int = 1 << 20) -> Inbox:
    inbox = Inbox(sender.requests(), max_bytes=max_bytes, held_bytes=held_bytes)
    await inbox.start()
    return inbox


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def broken(*messages: epb.EncodeRequest, frames: int) -> InvalidRequest:
    """How a call ends that sends these."""
    inbox = await opened(Sender(*messages, frames=frames))
    with pytest.raises(InvalidRequest) as caught:
        await inbox.go()
    await inbox.close()
    assert caught.value.reason == "UPLOAD_PROTOCOL"
    return caught.value


async def test_a_frame_is_there_with_its_last_piece_and_gone_when_it_is_taken() -> None:
    inbox = await opened(Sender(piece(0, b"ab"), piece(0, b"cd", ends=True), piece(1, b"x"), frames=2))
    assert await asyncio.wait_for(inbox.frame(), 5) == b"abcd"
    await settle()
    assert (inbox.held, inbox.frame_there) == (1, False)
    await inbox.close()
    assert inbox.held == 0


async def test_a_frame_that_does_not_say_where_it_ends_does_so_where_the_next_begins() -> None:
    inbox = await opened(Sender(piece(0, b"a"), piece(2, b"c"), piece(2, b"d", last=True), frames=4))
    assert [await inbox.frame() for _ in range(4)] == [b"a", b"", b"cd", b""]
    await inbox.close()


async def test_a_slow_encoder_slows_its_sender() -> None:
    sender = Sender(*(piece(i, bytes(KIB), ends=True, last=i == 99) for i in range(100)), frames=100)
    inbox = await opened(sender, held_bytes=4 * KIB)
    await settle()
    assert inbox.held == 5 * KIB and sender.written == 6
    for taken in range(1, 20):
        assert len(await inbox.frame()) == KIB
        await settle()
        assert inbox.held <= 5 * KIB and sender.written == 6 + taken
    await inbox.close()


async def test_one_frame_may_be_larger_than_what_is_held() -> None:
    sender = Sender(*(piece(0, bytes(KIB)) for _ in range(9)), piece(0, b"", ends=True), frames=2)
    inbox = await opened(sender, held_bytes=KIB)
    assert len(await inbox.frame()) == 9 * KIB
    await inbox.close()


@pytest.mark.parametrize("waits_for", ["siblings", "go", "credit"])
async def test_what_is_waited_for_is_read_however_much_lies_before_it(waits_for: str) -> None:
    """Otherwise an encoder would wait for what its caller cannot get through to it."""
    messages = {
        "siblings": epb.EncodeRequest(siblings=epb.EncodeSiblings()),
        "go": epb.EncodeRequest(go=epb.EncodeGo()),
        "credit": epb.EncodeRequest(credit=epb.EncodeCredit(bytes=1)),
    }
    before = [piece(i, bytes(KIB), ends=True) for i in range(50)]
    inbox = await opened(Sender(*before, messages[waits_for], frames=60), held_bytes=KIB)
    waiting = {"siblings": inbox.siblings(), "go": inbox.go(), "credit": inbox.spend(1)}
    await asyncio.wait_for(waiting.pop(waits_for), 5)
    for other in waiting.values():
        other.close()
    await inbox.close()


async def test_frames_that_came_are_given_out_before_what_broke_the_rest() -> None:
    good = [piece(i, bytes([i]), ends=True) for i in range(3)]
    inbox = await opened(Sender(*good, piece(1, b"again"), frames=5))
    await settle()
    assert [await inbox.frame() for _ in range(3)] == [b"\0", b"\1", b"\2"]
    with pytest.raises(InvalidRequest) as caught:
        await inbox.frame()
    assert caught.value.reason == "UPLOAD_PROTOCOL"
    await inbox.close()


async def test_pieces_out_of_order_or_after_the_end_break_the_call() -> None:
    await broken(piece(1, b"x"), piece(0, b"x"), frames=3)
    await broken(piece(0, b"x", ends=True), piece(0, b"y"), frames=3)
    await broken(piece(3, b"x"), frames=3)
    await broken(piece(0, b"x", last=True), piece(2, b"y"), frames=3)
    await broken(piece(2, b"x", last=True), piece(2, b"", last=True), frames=3)
    await broken(piece(0, b"x", last=True), piece(0, b"", last=True), frames=0)


async def test_the_end_of_a_medium_may_come_by_itself() -> None:
    inbox = await opened(Sender(piece(0, b"x", ends=True), piece(0, b"", last=True), frames=1))
    assert await inbox.frame() == b"x"
    await inbox.close()


async def test_more_bytes_than_a_medium_may_have_are_refused_although_the_first_were_let_go() -> None:
    sender = Sender(*(piece(i, bytes(KIB), ends=True) for i in range(9)), frames=9)
    inbox = await opened(sender, max_bytes=4 * KIB)
    assert [len(await inbox.frame()) for _ in range(4)] == [KIB] * 4
    with pytest.raises(InvalidRequest) as caught:
        await inbox.frame()
    assert caught.value.reason == "MEDIA_TOO_LARGE"
    assert caught.value.facts == {"bytes": 5 * KIB, "limit": 4 * KIB}
    await inbox.close()
