"""Failpoints of the wire: each kind of response of each method is a point, reached before the response is sent.

`Decode/tokens` is a message of tokens of `Decode`, `Encode/ready` the word that an entry is there, `Info/response` the
one response of a method that has only one. So work can be done and its answer lost, and a process can end at any
token. See `chiasm.failpoints`; a server without them has no such interceptor.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from chiasm.failpoints import POINTS, Dropped, Failpoints
from chiasm.rpc.handler import behavior_of, with_behavior
from chiasm.rpc.v1 import decoder_pb2, encoder_pb2, router_pb2
from chiasm.settings.refusal import SettingsError

_RESPONSE = "response"


def points() -> frozenset[str]:
    """All of the wire."""
    found = set()
    for file in (router_pb2, encoder_pb2, decoder_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                kinds = [field.name for oneof in method.output_type.oneofs[:1] for field in oneof.fields]
                found |= {f"{method.name}/{kind}" for kind in kinds or [_RESPONSE]}
    return frozenset(found)


def check(named: Collection[str]) -> None:
    """Raises SettingsError for a point that is nowhere: its fault would never happen."""
    known = points() | set(POINTS)
    for point in named:
        if point not in known:
            near = difflib.get_close_matches(point, known, 1)
            fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
            raise SettingsError(f"{point} is not a failpoint", "--failpoints", fix)


class Interceptor(grpc.aio.ServerInterceptor):
    """Lets the points of the wire be reached. The innermost of a server's interceptors."""

    def __init__(self, failpoints: Failpoints) -> None:
        self._failpoints = failpoints

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]
        if handler is None or not any(point.startswith(f"{method}/") for point in self._failpoints.faults):
            return handler
        behavior = behavior_of(handler)
        wrap = self._stream if inspect.isasyncgenfunction(behavior) else self._single
        return with_behavior(handler, wrap(behavior, method))

    def _stream(self, behavior: Callable[..., Any], method: str) -> Callable[..., AsyncIterator[Any]]:
        async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    await self._reach(method, response, context)
                    yield response

        return handle

    def _single(self, behavior: Callable[..., Any], method: str) -> Callable[..., Awaitable[Any]]:
        async def handle(request: Any, context: Any) -> Any:
            response = behavior(request, context)
            response = await response if inspect.isawaitable(response) else response
            await self._reach(method, response, context)
            return response

        return handle

    async def _reach(self, method: str, response: Message, context: Any) -> None:
        oneofs = response.DESCRIPTOR.oneofs
        kind = response.WhichOneof(oneofs[0].name) if oneofs else _RESPONSE
        try:
            await self._failpoints.reached(f"{method}/{kind}")
        except Dropped:
            # As gRPC itself tells a caller whose connection was lost: without a word of ours.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "")
