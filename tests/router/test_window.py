"""What waits for a client is bounded in events and in bytes, and for a time."""

from __future__ import annotations

import asyncio

import pytest

from chiasm.errors import ServerError, Unavailable
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.window import Window


def event(size: int = 1) -> rpb.GenerateResponse:
    return rpb.GenerateResponse(tokens=pb.Tokens(text=b"x" * size))


async def blocked(window: Window[rpb.GenerateResponse], size: int = 1) -> bool:
    """Whether who puts an event has to wait for room."""
    putting = asyncio.create_task(window.put(event(size)))
    done, _ = await asyncio.wait({putting}, timeout=0.05)
    putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    return not done


@pytest.mark.parametrize(("events", "size"), [(4, 1 << 20), (1 << 20, 4_000)])
async def test_who_writes_waits_once_as_much_waits_as_may(events: int, size: int) -> None:
    window = Window[rpb.GenerateResponse](events=events, size=size)
    for _ in range(3):
        assert not await blocked(window, 1_000)
    assert await blocked(window, 1_000)


async def test_an_event_whose_writer_is_cancelled_while_it_waits_is_not_lost() -> None:
    window = Window[rpb.GenerateResponse](events=1)
    assert await blocked(window)
    assert await window.get() == event()


async def test_who_writes_goes_on_when_half_of_what_waited_was_read() -> None:
    window = Window[rpb.GenerateResponse](events=4)
    for _ in range(3):
        await window.put(event())
    putting = asyncio.create_task(window.put(event()))
    await asyncio.sleep(0)
    await window.get()
    await asyncio.sleep(0)
    assert not putting.done()
    await window.get()
    await putting


async def test_a_reader_that_is_too_slow_is_given_up_although_it_reads() -> None:
    window = Window[rpb.GenerateResponse](events=100, patience=0.2)

    async def read() -> None:
        while True:
            await window.get()
            await asyncio.sleep(0.05)

    reading = asyncio.create_task(read())
    with pytest.raises(ServerError) as caught:
        while True:
            await window.put(event())
    reading.cancel()
    assert (caught.value.code, caught.value.reason) == ("ABORTED", "SLOW_CONSUMER")


async def test_an_error_comes_behind_what_waits_or_in_its_place() -> None:
    error = Unavailable("GONE", "it is gone")
    for at_once in (False, True):
        window = Window[rpb.GenerateResponse]()
        await window.put(event())
        window.end(error, at_once=at_once)
        window.end()
        if not at_once:
            assert await window.get() == event()
        with pytest.raises(Unavailable):
            await window.get()
