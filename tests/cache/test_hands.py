"""What is handed to a thread: its result, its error, and that nobody leaves before it has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from chiasm.cache.hands import by_hand


async def test_what_a_thread_returns_or_raises_is_given_to_who_handed_it_over() -> None:
    assert await by_hand(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await by_hand(lambda: 1 // 0)
    assert await by_hand(lambda: 3) == 3


async def test_who_is_cancelled_leaves_when_the_thread_has_ended() -> None:
    loop, began, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    ended = []

    def work() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait(30)
        ended.append(True)

    task = asyncio.create_task(by_hand(work))
    await began.wait()
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
