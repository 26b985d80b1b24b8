"""One call, however often it has to be taken up again, with the clock of the whole of it.

The call runs in a task of its own: whatever the transport opens on the way is entered and left by one task, whoever
asks for the next response and whoever ends the call. A few responses are fetched ahead of the reader, no more: a reader
who pauses slows the server down. Knows responses, not events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from chiasm.client.attempts import Attempts, Beside, Patience, late
from chiasm.client.convert import Outgoing
from chiasm.client.routes import Routes
from chiasm.errors import Cancelled
from chiasm.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse

AHEAD = 4
"""Responses fetched before they are asked for."""

GRACE = 0.25
"""Seconds beyond the deadline that the client waits for the server's own word, which names the stage at fault."""

T = TypeVar("T")


class Call:
    """A running call. Made inside an event loop; starts at once.

    Args:
        beside: asked for each attempt, within the deadline.
        patience: `timeout` is of the whole call, the reader's pauses counted.
    """

    def __init__(self, routes: Routes, outgoing: Outgoing[GenerateRequest], beside: Beside, patience: Patience) -> None:
        self._responses: asyncio.Queue[GenerateResponse | Exception | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(AHEAD)
        self._loop = asyncio.get_running_loop()
        self._attempts = Attempts(routes, outgoing, beside, patience)
        # The task refers to the queue and not to this object, so that a call nobody holds any longer can be noticed.
        self._task = self._loop.create_task(
            _run(self._attempts, patience.timeout, self._responses, self._room),
            name=outgoing.request.request_id,
        )

    @property
    def resumes(self) -> int:
        """How often the answer broke and was taken up again."""
        return self._attempts.resumes

    async def next(self) -> GenerateResponse | None:
        """The next response, or None after the last. Raises what ended the call. Not to be asked after either."""
        response = await self._responses.get()
        if isinstance(response, Exception):
            raise response
        self._room.release()
        return response

    async def close(self) -> None:
        """Ends the call, if it runs, and returns when the transport has freed everything."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def abandon(self) -> None:
        """Ends the call soon. From any thread, also when the loop is gone."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)


async def _run(
    attempts: Attempts,
    timeout: float | None,  # noqa: ASYNC109 - the deadline is the server's too, which is told it
    responses: asyncio.Queue[GenerateResponse | Exception | None],
    room: asyncio.Semaphore,
) -> None:
    async def deliver(response: GenerateResponse) -> None:
        await room.acquire()
        responses.put_nowait(response)

    end: Exception | None = None
    deadline = asyncio.timeout(None if timeout is None else timeout + GRACE)
    try:
        async with deadline:
            await attempts.run(deliver)
    except asyncio.CancelledError:
        end = Cancelled("the call was cancelled")
        raise
    except Exception as error:  # whatever it is, the reader raises it
        end = error
        if isinstance(error, TimeoutError) and deadline.expired():
            end = late(timeout)
            end.__cause__ = attempts.failure
    finally:
        responses.put_nowait(end)


async def within(answer: Awaitable[T], timeout: float | None) -> T:  # noqa: ASYNC109 - and a grace
    """A call's one answer. Raises DeadlineExceeded when the other side did not tell of the deadline itself."""
    deadline = asyncio.timeout(None if timeout is None else timeout + GRACE)
    try:
        async with deadline:
            return await answer
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise late(timeout) from error
