"""An answer as it comes: an iterator of events that is also a context manager. Leaving it early cancels the request.

The asynchronous stream does the work; the synchronous one drives it on the client's loop. Both gather the answer on the
way, so that all of it is at hand when the stream has ended.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Callable
from datetime import UTC
from types import TracebackType
from typing import Self

from chiasm.client.answer import Answer
from chiasm.client.attempts import Beside, Patience
from chiasm.client.call import Call
from chiasm.client.convert import Outgoing
from chiasm.client.events import (
    Event,
    FinishReason,
    Generation,
    StageTimes,
    TimelineFrame,
    TokenLogprobs,
    Usage,
)
from chiasm.client.loop import LoopThread
from chiasm.client.reading import Reader
from chiasm.client.routes import Routes
from chiasm.client.types import ResumePoint
from chiasm.errors import Cancelled, ChiasmError
from chiasm.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse


class AsyncGenerationStream:
    """`async with client.stream(...) as stream: async for event in stream: ...`

    The request is sent when the context is entered. Leaving the context cancels it unless it has finished; so do
    `aclose()` and the cancellation of the task that reads. A stream that is dropped without either is cancelled too,
    with a ResourceWarning.
    """

    def __init__(
        self,
        routes: Routes,
        outgoing: Callable[[], Outgoing[GenerateRequest]],
        beside: Beside,
        patience: Patience,
        *,
        request_id: str,
        resume: ResumePoint | None = None,
    ) -> None:
        self.answer = Answer(request_id, resume)
        self._routes = routes
        self._outgoing = outgoing
        self._beside = beside
        self._patience = patience
        self._call: Call | None = None
        self._reader = Reader(0 if resume is None else len(resume.ids))
        self._events: deque[Event] = deque()
        self._over = False
        self._left = False

    @property
    def text(self) -> str:
        return self.answer.text

    @property
    def ids(self) -> tuple[int, ...]:
        return self.answer.ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.answer.logprobs

    @property
    def frames(self) -> tuple[TimelineFrame, ...]:
        return self.answer.frames

    @property
    def usage(self) -> Usage | None:
        return self.answer.usage

    @property
    def times(self) -> StageTimes | None:
        return self.answer.times

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.answer.finish_reason

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self.answer.stop

    @property
    def request_id(self) -> str:
        return self.answer.request_id

    @property
    def resumes(self) -> int:
        """How often the stream broke and was taken up again."""
        return self.answer.resumes

    @property
    def resume_point(self) -> ResumePoint | None:
        """Where the answer can be taken up, also by another process: after the last event that was read. None before
        the server has said how, and when the answer has ended."""
        return self.answer.resume_point

    def generation(self) -> Generation:
        """The whole answer. Raises RuntimeError before its end."""
        return self.answer.whole()

    @property
    def closed(self) -> bool:
        """Whether nothing runs any longer, because the answer has ended or the stream was closed."""
        return self._over

    async def start(self) -> None:
        """Reads the media and sends the request, once. Entering the context does this, and so does the first event."""
        if self._call is None and not self._over:
            await self._routes.current()
            # Files are read and pictures packed beside the loop, which others use too.
            outgoing = await asyncio.to_thread(self._outgoing)
            self._call = Call(self._routes, outgoing, self._beside, self._patience)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event.

        Raises ChiasmError: what the server refused or failed with, DeadlineExceeded, IdleTimeout, Cancelled after an
        early end, Unavailable CONNECTION_LOST if the stream broke off and could not be taken up again.
        """
        while not self._events:
            if self._left:
                raise Cancelled("the stream was closed before its end")
            if self._over:
                raise StopAsyncIteration
            await self._fetch()
        event = self._events.popleft()
        self.answer.add(event)
        return event

    async def _fetch(self) -> None:
        await self.start()
        assert self._call is not None, "a stream that is not over has a call once it was started"
        try:
            response = await self._call.next()
            self.answer.resumes = self._call.resumes
            if response is not None:
                self._events.extend(self._reader.read(response))
                self._note(response)
                return
            self._over = True
        except asyncio.CancelledError:
            # The reader left: nobody is there for whom the answer would be generated.
            self._left = True
            self._call.abandon()
            raise
        except Exception as error:
            if isinstance(error, ChiasmError) and error.request_id is None:
                error.request_id = self.request_id
            await self._end()
            raise

    def _note(self, response: GenerateResponse) -> None:
        """What a response says beside its events."""
        self.answer.attempts = max(1, self._reader.attempt)
        if response.HasField("resume_point"):
            point = response.resume_point
            until = point.expire_time.ToDatetime(UTC) if point.HasField("expire_time") else None
            self.answer.resumable(point.resume_token, until)

    async def aclose(self) -> None:
        """Cancels the request unless it has finished, and returns when everything it held is free. Twice is fine."""
        if not self._over:
            self._left = self.finish_reason is None
            self._events.clear()
        await self._end()

    async def _end(self) -> None:
        self._over = True
        if self._call is not None:
            await self._call.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request_id} {self.finish_reason or 'unfinished'}>"

    def __del__(self) -> None:
        # A stream whose constructor failed has no call.
        if not getattr(self, "_over", True) and self._call is not None:
            warnings.warn(
                f"{self!r} was dropped before its end; use it in a `with` block or close it",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )
            self._call.abandon()


async def whole(stream: AsyncGenerationStream) -> Generation:
    """Reads an answer to its end."""
    async with stream:
        async for _ in stream:
            pass
    return stream.generation()


class GenerationStream:
    """`with client.stream(...) as stream: for event in stream: ...`

    As AsyncGenerationStream, in any thread. Ctrl-C in the middle of an event cancels the request as well.
    """

    def __init__(self, stream: AsyncGenerationStream, loop: LoopThread, client: object = None) -> None:
        self._stream = stream
        self._loop = loop
        self._client = client  # lives as long as the stream: a client that is dropped ends its streams

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def ids(self) -> tuple[int, ...]:
        return self._stream.ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self._stream.logprobs

    @property
    def frames(self) -> tuple[TimelineFrame, ...]:
        return self._stream.frames

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    @property
    def times(self) -> StageTimes | None:
        return self._stream.times

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stream.finish_reason

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stream.stop

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def resumes(self) -> int:
        """How often the stream broke and was taken up again."""
        return self._stream.resumes

    @property
    def resume_point(self) -> ResumePoint | None:
        """As that of AsyncGenerationStream."""
        return self._stream.resume_point

    def generation(self) -> Generation:
        """The whole answer. Raises RuntimeError before its end."""
        return self._stream.generation()

    @property
    def closed(self) -> bool:
        """Whether nothing runs any longer, because the answer has ended or the stream was closed."""
        return self._stream.closed

    def __enter__(self) -> Self:
        self._loop.run(self._stream.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        try:
            event = self._loop.run(_next(self._stream))
        except (KeyboardInterrupt, SystemExit):
            self.close()
            raise
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """Cancels the request unless it has finished, and returns when everything it held is free. Twice is fine."""
        if not self._stream.closed:
            self._loop.run(self._stream.aclose())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request_id} {self.finish_reason or 'unfinished'}>"


async def _next(stream: AsyncGenerationStream) -> Event | None:
    return await anext(stream, None)
