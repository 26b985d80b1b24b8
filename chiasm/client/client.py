"""The clients. `AsyncClient` does the work; `Client` is the same for programs without an event loop.

Knows which calls there are and what they take by default. How a call is carried is the transport's matter.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import EllipsisType, TracebackType
from typing import Self

from chiasm.client import convert
from chiasm.client.events import Generation, ModelInfo
from chiasm.client.loop import LoopThread
from chiasm.client.stream import AsyncGenerationStream, GenerationStream
from chiasm.client.transport import Opener, Transport, in_process
from chiasm.client.types import Content, Message, SamplingParams
from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import MAX_SECONDS
from chiasm.rpc.v1.router_pb2 import GenerateRequest

TIMEOUT = 600.0
"""Seconds of a whole call, unless the caller says otherwise."""

IDLE_TIMEOUT = 60.0
"""Seconds between two events."""


class AsyncClient:
    """Asks models about text, images and videos.

        async with AsyncClient.in_process("digits") as client:
            async with client.stream("digits", ["Read the digits.", Video("clip.mp4")]) as stream:
                async for event in stream:
                    ...

    Making a client opens nothing. Entering its context does, and so does the first call; `close()` or leaving the
    context cancels what still runs. It belongs to one event loop.

    Args:
        transport: opens what carries the calls.
        timeout: seconds of a whole call; None for no limit.
        idle_timeout: seconds between two events of a stream; None for no limit.
    """

    def __init__(
        self, *, transport: Opener, timeout: float | None = TIMEOUT, idle_timeout: float | None = IDLE_TIMEOUT
    ) -> None:
        _check_seconds("timeout", timeout)
        _check_seconds("idle_timeout", idle_timeout)
        self._opener = transport
        self._timeout = timeout
        self._idle_timeout = idle_timeout
        self._opening = asyncio.Lock()
        self._transport: Transport | None = None
        self._closed = False
        self._streams: weakref.WeakSet[AsyncGenerationStream] = weakref.WeakSet()

    @classmethod
    def in_process(
        cls, model: str = "digits", *, timeout: float | None = TIMEOUT, idle_timeout: float | None = IDLE_TIMEOUT
    ) -> Self:
        """The whole system in this process, with one model: the folder of a checkpoint, the name of one that comes with
        the package, or a hub name (`owner/name`), which is downloaded the first time. What was given here names the
        model in calls, and so does the name that `list_models` tells.

        Returns at once; the model is loaded when the client is opened.
        """
        return cls(transport=in_process(model), timeout=timeout, idle_timeout=idle_timeout)

    async def open(self) -> None:
        """Opens the transport, once. Raises ChiasmError if it cannot be, RuntimeError after `close()`."""
        await self._opened()

    async def _opened(self) -> Transport:
        async with self._opening:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._transport is None:
                self._transport = await self._opener()
            return self._transport

    async def close(self) -> None:
        """Cancels every open stream and closes the transport. Twice is fine."""
        self._closed = True
        for stream in list(self._streams):
            await stream.aclose()
        async with self._opening:
            transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def stream(
        self,
        model: str,
        content: Content | None = None,
        *,
        messages: Sequence[Message] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
    ) -> AsyncGenerationStream:
        """An answer as it comes.

        Args:
            model: the name of a model.
            content: what the user says: text, a medium, or a sequence of both.
            messages: several turns instead of `content`, a system message first if there is one.
            sampling: how tokens are drawn.
            max_tokens: bounds the answer; takes the place of the one in `sampling`.
            timeout: seconds of the whole call, from entering the stream; None for no limit, `...` for the client's own.
            request_id: 1 to 128 printable ASCII characters. Made if absent.

        Raises TypeError unless exactly one of `content` and `messages` is given, InvalidRequest for a timeout that is
        none. What is wrong with the request itself is raised when the stream is entered.
        """
        label = _label(request_id)
        request = partial(
            convert.to_request,
            model,
            _turns(content, messages),
            request_id=label,
            sampling=sampling,
            max_tokens=max_tokens,
        )
        return self._stream(request, label, timeout)

    def _stream(
        self, request: Callable[[], GenerateRequest], request_id: str, timeout: float | EllipsisType | None
    ) -> AsyncGenerationStream:
        whole = self._timeout if isinstance(timeout, EllipsisType) else timeout
        _check_seconds("timeout", whole)
        stream = AsyncGenerationStream(
            self._opened, request, request_id=request_id, timeout=whole, idle_timeout=self._idle_timeout
        )
        self._streams.add(stream)
        return stream

    async def generate(
        self,
        model: str,
        content: Content | None = None,
        *,
        messages: Sequence[Message] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        timeout: float | EllipsisType | None = ...,  # noqa: ASYNC109 - the server is told it as well
        request_id: str | None = None,
    ) -> Generation:
        """A whole answer. Arguments and errors are those of `stream`; cancelling the task cancels the request."""
        return await _whole(
            self.stream(
                model,
                content,
                messages=messages,
                sampling=sampling,
                max_tokens=max_tokens,
                timeout=timeout,
                request_id=request_id,
            )
        )

    async def list_models(self) -> tuple[ModelInfo, ...]:
        """The models that may be asked, in the order of their names."""
        transport = await self._opened()
        return convert.to_models(await transport.list_models())


class Client:
    """Asks models about text, images and videos.

        with Client.in_process("digits") as client:
            print(client.generate("digits", ["Read the digits.", Video("clip.mp4")]).text)

    Works in any thread, several at a time, and where another event loop runs. A client that is dropped without
    `close()` is closed when Python collects it or exits.

    Args: as AsyncClient; `transport` is opened at once, on the client's own event loop.
    """

    def __init__(
        self, *, transport: Opener, timeout: float | None = TIMEOUT, idle_timeout: float | None = IDLE_TIMEOUT
    ) -> None:
        self._client = AsyncClient(transport=transport, timeout=timeout, idle_timeout=idle_timeout)
        self._loop = LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._client, self._loop)
        try:
            self._loop.run(self._client.open())
        except BaseException:
            self.close()
            raise

    @classmethod
    def in_process(
        cls, model: str = "digits", *, timeout: float | None = TIMEOUT, idle_timeout: float | None = IDLE_TIMEOUT
    ) -> Self:
        """The whole system in this process, with one model: the folder of a checkpoint, the name of one that comes with
        the package, or a hub name (`owner/name`), which is downloaded the first time. What was given here names the
        model in calls, and so does the name that `list_models` tells.

        Raises CheckpointError if the model cannot be served, Unsupported if the package was not installed.
        """
        return cls(transport=in_process(model), timeout=timeout, idle_timeout=idle_timeout)

    def close(self) -> None:
        """Cancels every open stream and closes the transport. Twice is fine."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stream(
        self,
        model: str,
        content: Content | None = None,
        *,
        messages: Sequence[Message] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
    ) -> GenerationStream:
        """An answer as it comes. Arguments are those of `AsyncClient.stream`.

        Files are read here, and whatever is wrong with the request is raised here. It is sent when the stream is
        entered.
        """
        label = _label(request_id)
        request = convert.to_request(
            model, _turns(content, messages), request_id=label, sampling=sampling, max_tokens=max_tokens
        )
        return GenerationStream(self._client._stream(lambda: request, label, timeout), self._loop)

    def generate(
        self,
        model: str,
        content: Content | None = None,
        *,
        messages: Sequence[Message] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
    ) -> Generation:
        """A whole answer. Arguments are those of `AsyncClient.stream`. Ctrl-C cancels the request."""
        label = _label(request_id)
        request = convert.to_request(
            model, _turns(content, messages), request_id=label, sampling=sampling, max_tokens=max_tokens
        )
        return self._loop.run(_whole(self._client._stream(lambda: request, label, timeout)))

    def list_models(self) -> tuple[ModelInfo, ...]:
        """The models that may be asked, in the order of their names."""
        return self._loop.run(self._client.list_models())


async def _whole(stream: AsyncGenerationStream) -> Generation:
    async with stream:
        async for _ in stream:
            pass
    return stream.generation()


def _close(client: AsyncClient, loop: LoopThread) -> None:
    if loop.is_current():
        # Python may collect a client in any thread, in the loop's own too, which cannot wait for itself.
        threading.Thread(target=_close, args=(client, loop)).start()
        return
    try:
        loop.run(client.close())
    finally:
        loop.stop()


def _label(request_id: str | None) -> str:
    return uuid.uuid4().hex if request_id is None else request_id


def _turns(content: Content | None, messages: Sequence[Message] | None) -> tuple[Message, ...]:
    if (content is None) == (messages is None):
        raise TypeError("give either content (one user turn) or messages= (several turns)")
    if content is not None:
        return (Message("user", content),)
    assert messages is not None, "one of the two is given"
    if isinstance(messages, Message) or not all(isinstance(message, Message) for message in messages):
        raise TypeError("messages is a sequence of Message(role, content)")
    return tuple(messages)


def _check_seconds(name: str, value: float | None) -> None:
    # False for NaN too.
    if value is not None and not 0 < value <= MAX_SECONDS:
        allowed = f"more than 0 and at most {MAX_SECONDS:g} seconds, or None for no limit"
        raise InvalidRequest.out_of_range(name, value, allowed)
