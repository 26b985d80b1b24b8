"""One gRPC server for every service: limits, health, reflection, and errors as statuses.

It listens on TCP or on a socket file. Health answers to the names `""`, `liveness`, `readiness` and each service's own.
It knows nothing of what it serves.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from chiasm.errors import ChiasmError, Overloaded, StatusError, Unavailable, Unsupported
from chiasm.rpc import limits
from chiasm.rpc.handler import behavior_of, with_behavior
from chiasm.rpc.socket_file import SocketFile
from chiasm.rpc.status import to_status

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"

_LAST_WORD: Final = 0.2
"""Seconds that clients who watch health are given to hear that it is over."""

_PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"

_NO_RETRY: Final = (_PUSHBACK_KEY, "-1")
"""Tells a client's gRPC not to try again by itself: the server has waited already, and its caller decides. A server
that is ending has not, and another one may be there.
https://github.com/grpc/proposal/blob/master/A6-client-retries.md"""

_Servicer = TypeVar("_Servicer")
_log = logging.getLogger(__name__)


class Server:
    """A server that is alive from `start` on and ready when it is told so.

    Args:
        address: `HOST:PORT`, where port 0 takes a free one, or `unix:/path/to/socket`. See `target`.
        message_bytes: bytes of one message, at most, both ways.
        credentials: TLS. None is plain text.
        interceptors: run inside the one that turns errors into statuses, the first outermost.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        message_bytes: int = limits.WORKER_MESSAGE_BYTES,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self.port = 0
        """Of TCP, known once it is bound; a socket file has 1."""
        self._address = address
        self._socket = SocketFile(address.removeprefix("unix:")) if address.startswith("unix:") else None
        self._credentials = credentials
        self._started = False
        self._stopping: set[asyncio.Task[None]] = set()
        self._services: list[str] = []
        self._health = _Health()
        self._server = grpc.aio.server(
            interceptors=[StatusInterceptor(), *interceptors], options=limits.server_options(message_bytes)
        )

    @property
    def target(self) -> str:
        """The address as a channel takes it. Its port is known once it is bound."""
        return self._address if self._socket else f"{self._address.rpartition(':')[0]}:{self.port}"

    def add(self, service: str, register: Callable[[_Servicer, grpc.aio.Server], None], servicer: _Servicer) -> Server:
        """Serves one more service; before `start` only.

        Args:
            service: its full name, for example `chiasm.rpc.v1.Router`.
            register: the generated `add_…Servicer_to_server`.
            servicer: what answers.
        """
        assert not self._started, "services are added before start"
        register(servicer, self._server)
        self._services.append(service)
        return self

    def bind(self) -> int:
        """Takes the address without answering yet, so that a server which prepares for long learns first whether it
        can have it. Who connects meanwhile waits. Returns the port.

        Raises:
            OSError: the address cannot be taken. A socket file that a dead process left is replaced.
        """
        if self.port:
            return self.port
        if self._socket:
            self._socket.clear()
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            raise _refused(self._address) from error
        if self._socket:
            self._socket.take()
        return self.port

    async def start(self) -> int:
        """Listens, and returns the port. The server is alive, and not ready before `set_ready(True)`.

        Raises:
            OSError: as `bind`, which comes first.
        """
        self.bind()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        await self.set_ready(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        self._started = True
        await self._server.start()
        return self.port

    async def set_ready(self, ready: bool) -> None:
        """Says through health whether calls are welcome. Calls are answered either way."""
        word = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", READINESS, *self._services):
            await self._health.set(name, word)

    async def set_alive(self, alive: bool) -> None:
        """Says through health whether the process works at all."""
        word = health_pb2.HealthCheckResponse.SERVING if alive else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(LIVENESS, word)

    async def stop(self, grace: float | None = None) -> None:
        """Takes no new call, waits up to `grace` seconds for the running ones, cancels the rest. None waits not at all.

        Clients that watch health are told and let go; they are not waited for. May be called again with less grace
        while it waits. It goes on when whoever called it is cancelled: gRPC takes one stop that was cut short for the
        end of all.
        """
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(grace))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        await self._health.let_go()
        await asyncio.shield(stopping)
        if self._socket:
            self._socket.remove()

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _refused(address: str) -> OSError:
    """Why an address cannot be had. gRPC does not say; a socket that tries the same does."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except (OSError, ValueError) as error:
        number, why = getattr(error, "errno", errno.EINVAL), getattr(error, "strerror", str(error))
        return OSError(number, f"cannot listen: {why}", address)
    return OSError(errno.EADDRNOTAVAIL, "cannot listen", address)


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Health whose watchers do not hold up the end: they would watch for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._over = asyncio.Event()
        self._watching = 0

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802 - as on the wire
        watching = asyncio.ensure_future(super().Watch(request, context))
        over = asyncio.ensure_future(self._over.wait())
        self._watching += 1
        try:
            await asyncio.wait({watching, over}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
        finally:
            self._watching -= 1
            watching.cancel()
            over.cancel()
            await asyncio.gather(watching, over, return_exceptions=True)

    async def let_go(self) -> None:
        """Ends every `Watch`, after what was last set could be told."""
        if self._watching:
            await asyncio.sleep(_LAST_WORD)
        self._over.set()


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose handler raised with the status that `chiasm.rpc.status` gives the error.

    Handlers are coroutines or asynchronous generators. An error that nobody foresaw is logged with its traceback, and
    the caller is told a constant text. A method that the generated base class answers is UNIMPLEMENTED.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        behavior = behavior_of(handler)
        wrap = _stream if inspect.isasyncgenfunction(behavior) else _single
        return with_behavior(handler, wrap(behavior, handler_call_details.method, handler.request_streaming))


def _single(behavior: Callable[..., Any], method: str, many: bool) -> Callable[..., Awaitable[Any]]:
    """Wraps a handler that returns its response, or writes its responses into the context.

    Args:
        many: it takes a stream of requests.
    """

    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            response = behavior(_requests(context) if many else request, context)
            return await response if inspect.isawaitable(response) else response
        except Exception as error:
            await _end(error, context, method)

    return handle


def _stream(behavior: Callable[..., AsyncIterator[Any]], method: str, many: bool) -> Callable[..., AsyncIterator[Any]]:
    """Wraps a handler that yields its responses. `many` as above."""

    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        responses = behavior(_requests(context) if many else request, context)
        try:
            async for response in responses:
                yield response
        except Exception as error:
            await _end(error, context, method)
        finally:
            # A caller who left closes this generator; the handler must hear of it now, not when it is collected.
            close: Callable[[], Awaitable[None]] | None = getattr(responses, "aclose", None)
            if close is not None:
                await close()

    return handle


async def _requests(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
    """The requests of a stream. Unlike gRPC's own iterator it does not keep one until the next one comes: it may be
    large, and the next one long in coming."""
    while (request := await context.read()) is not grpc.aio.EOF:
        yield request
        del request


async def _end(error: Exception, context: grpc.aio.ServicerContext[Any, Any], method: str) -> NoReturn:
    """Ends the call with the status of `error`; returns by raising."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, NotImplementedError) and context.code() == grpc.StatusCode.UNIMPLEMENTED:
        name = method.rpartition("/")[2]
        error = Unsupported(
            "UNIMPLEMENTED", f"this server does not serve {name}", code="UNIMPLEMENTED", facts={"method": name}
        )
    elif isinstance(error, grpc.RpcError) or not isinstance(error, ChiasmError):
        _log.error("%s failed", method, exc_info=error)
    elif isinstance(error, StatusError) and error.code == "INTERNAL":
        _log.error("%s failed: %s", method, error, exc_info=error)
    status = rpc_status.to_status(to_status(error))
    # What the handler had to say in trailing metadata, as the name of the request, goes with the details.
    trailing = (*(context.trailing_metadata() or ()), *(status.trailing_metadata or ()))
    if isinstance(error, Unavailable) and error.reason != "DRAINING":
        trailing = (*trailing, _NO_RETRY)
    elif isinstance(error, Overloaded):
        trailing = (*trailing, _pushback(error.retry_after))
    await context.abort(status.code, status.details, trailing)
    raise asyncio.CancelledError  # abort always raises; this tells the type checker


def _pushback(seconds: float | None) -> tuple[str, str]:
    """Tells a client's gRPC what `RetryInfo` tells its caller: when to come again, or not to."""
    return (_PUSHBACK_KEY, "-1" if seconds is None else str(round(seconds * 1000)))
