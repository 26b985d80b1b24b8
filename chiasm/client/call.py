"""One call of a transport, with its two clocks, and the media that are sent beside it.

The call runs in a task of its own: whatever the transport opens on the way is entered and left by one task, whoever
asks for the next response and whoever ends the call. A few responses are fetched ahead of the reader, no more: a reader
who pauses slows the server down. Knows responses, not events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias, TypeVar

from chiasm.client.convert import Outgoing
from chiasm.client.transport import Metadata, Transport
from chiasm.client.upload import Upload
from chiasm.errors import Cancelled, DeadlineExceeded, IdleTimeout, StatusError
from chiasm.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse, UploadResponse

AHEAD = 4
"""Responses fetched before they are asked for."""

GRACE = 0.25
"""Seconds beyond the deadline that the client waits for the server's own word, which names the stage at fault; and
seconds that it waits for the word about an upload once the request that reads it has failed."""

Beside: TypeAlias = Callable[[str], Awaitable[Metadata]]
"""Makes what goes beside a call, of the id of its request."""

T = TypeVar("T")


class Call:
    """A running call. Made inside an event loop; starts at once.

    Args:
        beside: asked once, within the deadline.
        timeout: seconds of the whole call, the reader's pauses counted. None: no limit.
        idle_timeout: seconds between two responses; the wait for the first is bounded by `timeout` alone.
    """

    def __init__(
        self,
        transport: Transport,
        outgoing: Outgoing[GenerateRequest],
        beside: Beside,
        *,
        timeout: float | None,
        idle_timeout: float | None,
    ) -> None:
        self._responses: asyncio.Queue[GenerateResponse | Exception | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(AHEAD)
        self._loop = asyncio.get_running_loop()
        # The task refers to the queue and not to this object, so that a call nobody holds any longer can be noticed.
        self._task = self._loop.create_task(
            _run(transport, outgoing, beside, timeout, idle_timeout, self._responses, self._room),
            name=outgoing.request.request_id,
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
    outgoing: Outgoing[GenerateRequest],
    beside: Beside,
    timeout: float | None,  # noqa: ASYNC109 - the deadline is the server's too, which is told it
    idle_timeout: float | None,
    responses: asyncio.Queue[GenerateResponse | Exception | None],
    room: asyncio.Semaphore,
) -> None:
    end: Exception | None = None
    deadline = asyncio.timeout(None if timeout is None else timeout + GRACE)
    try:
        async with deadline:
            metadata = await beside(outgoing.request.request_id)
            incoming = transport.generate(outgoing.request, timeout=timeout, metadata=metadata)
            async with sending(transport, outgoing.uploads, timeout, metadata), aclosing(incoming):
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
            end = _late(timeout)
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
        raise _late(timeout) from error


@asynccontextmanager
async def sending(
    transport: Transport,
    uploads: Sequence[Upload],
    timeout: float | None,  # noqa: ASYNC109 - that of the request
    metadata: Metadata,
) -> AsyncIterator[None]:
    """Sends media while the block asks for what names them: the server reads them as they come.

    What goes wrong with one of them ends the block, and is raised in place of what it did to the request.
    """
    if not uploads:
        yield
        return
    tasks: list[asyncio.Task[UploadResponse]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(send(transport, upload, timeout, metadata)) for upload in uploads]
            try:
                yield
            except StatusError as error:
                if error.reason == "UPLOAD_PROTOCOL":
                    # The request heard of a broken upload before its sender does.
                    await asyncio.wait(tasks, timeout=GRACE, return_when=asyncio.FIRST_EXCEPTION)
                raise
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as several:
        failed = [task.exception() for task in tasks if not task.cancelled()]
        cause = next((fault for fault in failed if fault is not None), several.exceptions[0])
        raise cause from cause.__cause__


async def send(
    transport: Transport,
    upload: Upload,
    timeout: float | None,  # noqa: ASYNC109 - that of the call
    metadata: Metadata,
) -> UploadResponse:
    """Sends one medium. Errors name its place in the request that it belongs to."""
    try:
        response = await transport.upload(upload.requests(), timeout=timeout, metadata=metadata)
        upload.check(response)
    except StatusError as error:
        if upload.item is None:
            raise
        raise error.at(upload.item) from error.__cause__
    return response


def _late(timeout: float | None) -> DeadlineExceeded:
    assert timeout is not None, "what has no limit is never late"
    return DeadlineExceeded(f"the call took longer than {timeout:g} s (timeout)")
