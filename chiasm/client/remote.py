"""The transport over a socket: one channel to a router, opened when it is first used.

Errors come as the classes of `chiasm.errors`; here they learn what only the client knows: its own target, its own
deadline, and the id that the server gave the request. Knows no media and no events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.client.transport import Metadata
from chiasm.errors import Cancelled, ChiasmError, ConnectionFailed, DeadlineExceeded, Unavailable
from chiasm.rpc.call import answered, streamed
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc

READINESS = "readiness"
"""What the router's health service calls being able to take requests."""

ASK_SECONDS = 0.1
"""How often a server that is not ready is asked again, at first. Doubles up to a second."""

REQUEST_ID = "x-request-id"

_UNCONNECTED = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


@dataclass(frozen=True, slots=True)
class Remote:
    """`Transport` over a channel.

    Args:
        target: what the channel goes to, shown in errors.
        connect_timeout: seconds that a call waits for a connection. One that is refused is not waited for.
    """

    channel: grpc.aio.Channel
    target: str
    connect_timeout: float

    @property
    def _stub(self) -> router_pb2_grpc.RouterAsyncStub:
        return router_pb2_grpc.RouterStub(self.channel)

    async def generate(
        self,
        request: rpb.GenerateRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - it is the deadline that gRPC tells the server
        metadata: Metadata = (),
    ) -> AsyncGenerator[rpb.GenerateResponse, None]:
        with self._errors(timeout):
            left = await self._connected(timeout)
            call = self._stub.Generate(request, timeout=left, metadata=metadata)
            async with aclosing(streamed(call)) as responses:
                async for response in responses:
                    yield response

    async def embed(
        self,
        request: rpb.EmbedRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> AsyncGenerator[rpb.EmbedResponse, None]:
        with self._errors(timeout):
            left = await self._connected(timeout)
            async with aclosing(streamed(self._stub.Embed(request, timeout=left, metadata=metadata))) as responses:
                async for response in responses:
                    yield response

    async def condition(
        self,
        request: rpb.ConditionRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> AsyncGenerator[rpb.ConditionResponse, None]:
        with self._errors(timeout):
            left = await self._connected(timeout)
            async with aclosing(streamed(self._stub.Condition(request, timeout=left, metadata=metadata))) as responses:
                async for response in responses:
                    yield response

    async def estimate(
        self,
        request: rpb.EstimateRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> rpb.EstimateResponse:
        with self._errors(timeout):
            left = await self._connected(timeout)
            return await answered(self._stub.Estimate(request, timeout=left, metadata=metadata))

    async def upload(
        self,
        requests: AsyncIterator[rpb.UploadRequest],
        *,
        timeout: float | None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> rpb.UploadResponse:
        with self._errors(timeout):
            left = await self._connected(timeout)
            return await answered(self._stub.Upload(timeout=left, metadata=metadata), requests)

    async def list_models(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> rpb.ListModelsResponse:
        with self._errors(timeout):
            left = await self._connected(timeout)
            return await answered(self._stub.ListModels(rpb.ListModelsRequest(), timeout=left, metadata=metadata))

    async def wait_ready(
        self,
        timeout: float,  # noqa: ASYNC109 - as above
        *,
        metadata: Metadata = (),
    ) -> None:
        """Waits for a connection, for health to say `readiness`, and for one model that is ready.

        Raises ConnectionFailed if no server answered within `timeout`, Unavailable NOT_READY if one did and was not
        ready. What waiting would not change, as a refused key, is raised at once.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        missing: ChiasmError | None = self._unreachable(f"within {timeout:g} s (timeout)")
        pause = ASK_SECONDS
        while missing is not None and (left := end - loop.time()) > 0:
            try:
                missing = await self._missing(left, metadata)
            except Unavailable as error:
                missing = error
            except (ConnectionFailed, DeadlineExceeded):
                pass  # what was heard last stands
            if missing is not None:
                await asyncio.sleep(max(0.0, min(pause, end - loop.time())))
                pause = min(2 * pause, 1.0)
        if missing is not None:
            raise missing

    async def close(self) -> None:
        await self.channel.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _connected(self, timeout: float | None) -> float | None:  # noqa: ASYNC109 - reduced and passed on
        """Waits until there is a connection, or the server refused one, and returns what is left of `timeout`.

        gRPC alone would wait for a connection as long as for an answer, and then tell of a deadline.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        bound, name = self.connect_timeout, "connect_timeout"
        if timeout is not None and timeout < bound:
            bound, name = timeout, "timeout"
        try:
            async with asyncio.timeout(bound):
                while (state := self.channel.get_state(try_to_connect=True)) in _UNCONNECTED:
                    await self.channel.wait_for_state_change(state)
        except TimeoutError:
            raise self._unreachable(f"within {bound:g} s ({name})") from None
        return None if timeout is None else max(0.0, begun + timeout - loop.time())

    async def _missing(self, timeout: float, metadata: Metadata) -> Unavailable | None:  # noqa: ASYNC109 - gRPC's
        """What a server that answers still lacks."""
        check = health_pb2.HealthCheckRequest(service=READINESS)
        health = health_pb2_grpc.HealthStub(self.channel)
        said = await answered(health.Check(check, timeout=timeout, wait_for_ready=True, metadata=metadata))
        if said.status != health_pb2.HealthCheckResponse.SERVING:
            return Unavailable("NOT_READY", f"the server at {self.target} is not ready")
        models = await self.list_models(timeout=timeout, metadata=metadata)
        if any(model.ready for model in models.models):
            return None
        known = len(models.models)
        return Unavailable(
            "NOT_READY", f"the server at {self.target} has {known} models, none of them ready", facts={"models": known}
        )

    def _unreachable(self, when: str = "") -> ConnectionFailed:
        return ConnectionFailed(
            f"no server answers at {self.target}{when and f' {when}'}; is this the right target (CHIASM_TARGET), and "
            "does `chiasm serve` run there? `client.wait_ready()` waits for one that is starting"
        )

    @contextmanager
    def _errors(self, timeout: float | None) -> Iterator[None]:
        """Tells errors what only the client knows."""
        try:
            yield
        except ConnectionFailed as error:
            raise (self._unreachable() if error.__cause__ else error) from error.__cause__
        except DeadlineExceeded as error:
            if error.stage is not None or timeout is None:
                raise _labelled(error) from error.__cause__
            late = DeadlineExceeded(f"the call took longer than {timeout:g} s (timeout)", request_id=error.request_id)
            raise late from error.__cause__
        except grpc.aio.UsageError as error:
            raise Cancelled("the client was closed") from error
        except ChiasmError as error:
            raise _labelled(error) from error.__cause__


def _labelled(error: ChiasmError) -> ChiasmError:
    """The error with the id of its request, where gRPC's metadata say it and no detail did."""
    cause = error.__cause__
    if error.request_id is None and isinstance(cause, grpc.aio.AioRpcError):
        for metadata in (cause.trailing_metadata(), cause.initial_metadata()):
            for key, value in metadata or ():
                if key == REQUEST_ID and isinstance(value, str):
                    error.request_id = value
    return error
