"""Calls of gRPC as the rest of this library writes them: responses as a generator, errors as classes, nothing left.

What is called is the caller's business, and so are deadlines: the stub's method takes both. Requests of a stream are
given here and not to the stub: gRPC's own task that reads them outlives a call that the server ends, and turns what
goes wrong in them into a cancellation without a cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import grpc.aio

from chiasm.errors import Cancelled
from chiasm.rpc.status import from_rpc_error

Q = TypeVar("Q")
R = TypeVar("R")


async def streamed(
    call: grpc.aio.UnaryStreamCall[Q, R] | grpc.aio.StreamStreamCall[Q, R], requests: AsyncIterable[Q] | None = None
) -> AsyncGenerator[R, None]:
    """The responses of a call, for example `streamed(stub.Encode(timeout=5), requests)`.

    Closing the generator cancels the call, so it is used with `aclosing`. When it has ended, however it ended,
    `requests` is closed and nothing of the call runs any more.

    Args:
        call: as the stub's method returned it; without requests of its own where they are given here.
        requests: sent one after the other, then the sending side is closed. None for a call that has its request.

    Raises the class of `chiasm.errors` that the status tells about (`from_rpc_error`), Cancelled when somebody else
    cancelled the call or closed its channel, and whatever `requests` raises, as it is.
    """
    ended = _Ended(call)
    writer = _start(call, requests)
    came = False
    try:
        async for response in call:
            came = True
            yield response
    except grpc.aio.AioRpcError as error:
        told = ended.told(error)
        if told.code() != grpc.StatusCode.OK:
            raise from_rpc_error(told, answered=came) from error
    except asyncio.CancelledError:
        if _cancelling():
            raise
        raise _cause(writer) from None
    finally:
        await _end(call, writer)


async def answered(
    call: grpc.aio.UnaryUnaryCall[Q, R] | grpc.aio.StreamUnaryCall[Q, R], requests: AsyncIterable[Q] | None = None
) -> R:
    """The one response of a call, for example `await answered(stub.Info(request, timeout=1))`.

    Cancelling the task that waits cancels the call. Arguments and errors are those of `streamed`.
    """
    ended = _Ended(call)
    writer = _start(call, requests)
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(ended.told(error)) from error
    except asyncio.CancelledError:
        if _cancelling():
            raise
        raise _cause(writer) from None
    finally:
        await _end(call, writer)


class _Ended:
    """The status that a server ended a call with.

    gRPC puts one of its own (INTERNAL) in its place when a message was being written at that moment, as one mostly is
    when a server refuses requests, or has heard enough, before their end. This one is read when it comes, before
    anything else runs.
    """

    def __init__(self, call: grpc.aio.Call) -> None:
        self._error: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def told(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """What was raised, or what the server had said before gRPC wrote over it."""
        own = error.code() == grpc.StatusCode.INTERNAL and not error.trailing_metadata()
        return self._error if own and self._error is not None else error

    def _note(self, call: Any) -> None:
        code = _settled(call.code())
        if code is not None:
            parts = call.initial_metadata(), call.trailing_metadata(), call.details()
            self._error = grpc.aio.AioRpcError(code, *map(_settled, parts))


def _settled(answer: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for, as those about a call that has ended; None for another."""
    try:
        answer.send(None)
    except StopIteration as end:
        return end.value
    answer.close()
    return None


def _start(call: Any, requests: AsyncIterable[Q] | None) -> asyncio.Task[None] | None:
    return None if requests is None else asyncio.create_task(_write(call, requests))


async def _write(call: Any, requests: AsyncIterable[Q]) -> None:
    iterator = aiter(requests)
    try:
        async for request in iterator:
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                return  # the call has ended; who reads it is told how
        with suppress(grpc.aio.InternalError):
            await call.done_writing()
    except BaseException:
        call.cancel()  # requests that broke off must not look like requests that ended
        raise
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


def _cancelling() -> bool:
    """Whether a cancellation is meant for the task that reads, and not only for the call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cause(writer: asyncio.Task[None] | None) -> BaseException:
    """Why a call was cancelled that its reader did not cancel: its requests failed, or somebody else ended it."""
    failed = writer is not None and writer.done() and not writer.cancelled() and writer.exception()
    return failed or Cancelled("the call was cancelled")


async def _end(call: Any, writer: asyncio.Task[None] | None) -> None:
    call.cancel()  # does nothing to a call that has ended
    if writer is not None:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
