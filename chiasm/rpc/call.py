"""Calls of gRPC as the rest of this library writes them: responses as a generator, errors as classes, nothing left.

What is called is the caller's business, and so are deadlines: the stub's method takes both. Requests of a stream are
better given here than to the stub. gRPC's own task that reads them outlives a call that the server ends, and turns
what goes wrong in them into a cancellation without a cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any, TypeAlias, TypeVar

import grpc.aio

from chiasm.errors import Cancelled
from chiasm.rpc.status import from_rpc_error

Q = TypeVar("Q")
R = TypeVar("R")

_Writable: TypeAlias = grpc.aio.StreamStreamCall[Q, Any] | grpc.aio.StreamUnaryCall[Q, Any]


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
    writer = _start(call, requests)
    came = False
    try:
        async for response in call:
            came = True
            yield response
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, answered=came) from error
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
    writer = _start(call, requests)
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        if _cancelling():
            raise
        raise _cause(writer) from None
    finally:
        await _end(call, writer)


def _start(call: Any, requests: AsyncIterable[Q] | None) -> asyncio.Task[None] | None:
    return None if requests is None else asyncio.create_task(_write(call, requests))


async def _write(call: _Writable[Q], requests: AsyncIterable[Q]) -> None:
    iterator = aiter(requests)
    try:
        async for request in iterator:
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the call has ended; who reads it is told how
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
