"""One job followed to its end in a task of its own, whoever reads its answers and for how long.

A reader may leave in the middle of an answer. What was begun is then read on and thrown away, because a process that
has come to the end of a job can do the next one, and one that was interrupted can only be ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """Answers, one ahead of their reader and no more. Made inside a running event loop; begins at once."""

    def __init__(self, answers: AsyncGenerator[T, None]) -> None:
        self._answers: asyncio.Queue[T | BaseException | None] = asyncio.Queue(1)
        self._left = False
        self._following = asyncio.create_task(self._follow(answers))

    async def __aiter__(self) -> AsyncIterator[T]:
        """Raises what the job raised."""
        while True:
            answer = await self._answers.get()
            if isinstance(answer, BaseException):
                raise answer
            if answer is None:
                return
            yield answer

    async def leave(self, seconds: float) -> bool:
        """Reads on for so long, and throws away what comes. Returns whether the job came to a good end."""
        self._left = True
        while not self._answers.empty():
            self._answers.get_nowait()  # whoever waits to put the next one goes on
        done, _ = await asyncio.wait([self._following], timeout=seconds)
        if not done:
            self._following.cancel()
            await asyncio.wait([self._following])
            return False
        return self._following.result()

    async def _follow(self, answers: AsyncGenerator[T, None]) -> bool:
        """Returns whether it came to a good end."""
        try:
            async with aclosing(answers):
                async for answer in answers:
                    await self._tell(answer)
        except Exception as error:  # whatever it is, it is the reader's to hear
            await self._tell(error)
            return False
        await self._tell(None)
        return True

    async def _tell(self, answer: T | BaseException | None) -> None:
        if not self._left:
            await self._answers.put(answer)
