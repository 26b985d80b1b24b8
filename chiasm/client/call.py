"""One call of a transport, with its two clocks.

The call runs in a task of its own: whatever the transport opens on the way is entered and left by one task, whoever
asks for the next response and whoever ends the call. A few responses are fetched ahead of the reader, no more: a reader
who pauses slows the server down. Knows responses, not events.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from chiasm.client.transport import Transport
from chiasm.errors import Cancelled, DeadlineExceeded, IdleTimeout
from chiasm.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse

AHEAD = 4
"""Responses fetched before they are asked for."""

GRACE = 0.25
"""Seconds beyond the deadline that the client waits for the server's own word, which names the stage at fault."""


class Call:
    """A running call. Made inside an event loop; starts at once.

    Args:
        timeout: seconds of the whole call, the reader's pauses counted. None: no limit.
        idle_timeout: seconds between two responses; the wait for the first is bounded by `timeout` alone.
    """

    def __init__(
        self, transport: Transport, request: GenerateRequest, *, timeout: float | None, idle_timeout: float | None
    ) -> None:
        self._responses: asyncio.Queue[GenerateResponse | Exception | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(AHEAD)
        self._loop = asyncio.get_running_loop()
        # The task refers to the queue and not to this object, so that a call nobody holds any longer can be noticed.
        self._task = self._loop.create_task(
            _run(transport, request, timeout, idle_timeout, self._responses, self._room), name=request.request_id
        )

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
    transport: Transport,
    request: GenerateRequest,
    timeout: float | None,  # noqa: ASYNC109 - the deadline is the server's too, which is told it
    idle_timeout: float | None,
    responses: asyncio.Queue[GenerateResponse | Exception | None],
    room: asyncio.Semaphore,
) -> None:
    end: Exception | None = None
    deadline = asyncio.timeout(None if timeout is None else timeout + GRACE)
    try:
        async with deadline, aclosing(transport.generate(request, timeout=timeout)) as incoming:
            allowed: float | None = None
            while True:
                idle = asyncio.timeout(allowed)
                try:
                    async with idle:
                        response = await anext(incoming, None)
                except TimeoutError as error:
                    if not idle.expired():
                        raise
                    raise IdleTimeout(f"no event came for {idle_timeout:g} s (idle_timeout)") from error
                if response is None:
                    break
                allowed = idle_timeout
                await room.acquire()
                responses.put_nowait(response)
    except asyncio.CancelledError:
        end = Cancelled("the call was cancelled")
        raise
    except Exception as error:  # whatever it is, the reader raises it
        end = error
        if isinstance(error, TimeoutError) and deadline.expired():
            end = DeadlineExceeded(f"the call took longer than {timeout:g} s (timeout)")
    finally:
        responses.put_nowait(end)
