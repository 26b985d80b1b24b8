"""Running ahead of a reader: not too far, nothing lost, and over when the reader is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from decoder_service.ahead import Bell, ahead, ended


class Source:
    """Counts what it has made, and takes two turns of the event loop to end."""

    def __init__(self, count: int, *, error: Exception | None = None) -> None:
        self.count = count
        self.error = error
        self.made = 0
        self.over = False

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for i in range(self.count):
                self.made += 1
                yield i
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.over = True


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_it_runs_ahead_by_so_many_items_and_no_more() -> None:
    source = Source(100)
    async with aclosing(ahead(source.run(), items=5)) as items:
        assert await anext(items) == 0
        await turns()
        assert source.made == 1 + 5 + 1, "one was taken, five wait, one is held"
        assert [await anext(items) for _ in range(3)] == [1, 2, 3]
        await turns()
        assert source.made == 10
    assert source.over and source.made == 10


async def test_every_item_comes_in_order_and_an_error_behind_the_last() -> None:
    source = Source(7, error=ValueError("broken"))
    taken: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        async for item in ahead(source.run(), items=3):
            taken.append(item)
    assert taken == list(range(7)) and source.over
    assert [item async for item in ahead(Source(7).run(), items=3)] == list(range(7))


async def test_a_reader_that_is_cancelled_leaves_only_when_the_source_is_over() -> None:
    source = Source(100)

    async def read() -> None:
        async with aclosing(ahead(source.run(), items=2)) as items:
            async for _ in items:
                await asyncio.Event().wait()

    reader = asyncio.create_task(read())
    await turns()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert source.over


async def test_a_task_is_waited_for_to_its_end_however_often_the_caller_is_cancelled() -> None:
    may_end = asyncio.Event()
    done: list[str] = []

    async def last_wishes() -> None:
        await may_end.wait()
        done.append("over")

    waiting = asyncio.create_task(ended(asyncio.create_task(last_wishes())))
    for _ in range(3):
        await turns(3)
        waiting.cancel()
    await turns(3)
    assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done == ["over"]


async def test_a_bell_that_rang_while_nobody_waited_is_heard_until_it_is_hushed() -> None:
    bell = Bell()
    bell.ring()
    await asyncio.wait_for(bell.wait(), 30)
    bell.hush()
    waiting = asyncio.create_task(bell.wait())
    await turns()
    assert not waiting.done()
    bell.ring()
    bell.ring()
    await asyncio.wait_for(waiting, 30)
    bell.hush()
    left = asyncio.create_task(bell.wait())
    await turns()
    left.cancel()
    await turns()
    bell.ring()  # for nobody
    assert left.cancelled()
