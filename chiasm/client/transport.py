"""The one seam of the client: what carries requests away and brings events back.

A transport speaks protobuf and raises `chiasm.errors`. `chiasm.client.remote` is the one over a socket. The system in
this process is another; it is found by its entry point, because the client stands below it and may not import it.
Knows no media and no events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from importlib.metadata import entry_points
from typing import Protocol, TypeAlias, cast

from chiasm.errors import Unsupported
from chiasm.rpc.v1.router_pb2 import (
    ConditionRequest,
    ConditionResponse,
    EmbedRequest,
    EmbedResponse,
    EstimateRequest,
    EstimateResponse,
    GenerateRequest,
    GenerateResponse,
    ListModelsResponse,
    UploadRequest,
    UploadResponse,
)

GROUP = "chiasm.in_process"
"""Entry points that name an `InProcess`."""

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
"""What goes beside a call, for example `(("authorization", "Bearer …"),)`. Where there is no wire nothing reads it."""


class Transport(Protocol):
    """Belongs to the event loop it was opened on. Its calls raise ChiasmError; `timeout` is the deadline of the whole
    call in seconds, None for no limit."""

    def generate(
        self, request: GenerateRequest, *, timeout: float | None, metadata: Metadata = ()
    ) -> AsyncGenerator[GenerateResponse, None]:
        """The events of an answer. Closing the generator cancels the request and frees everything it holds."""
        ...

    def embed(
        self, request: EmbedRequest, *, timeout: float | None, metadata: Metadata = ()
    ) -> AsyncGenerator[EmbedResponse, None]:
        """A vector in its pieces, and the end. As `generate`."""
        ...

    def condition(
        self, request: ConditionRequest, *, timeout: float | None, metadata: Metadata = ()
    ) -> AsyncGenerator[ConditionResponse, None]:
        """States in their pieces, and the end. As `generate`."""
        ...

    async def estimate(
        self,
        request: EstimateRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - the deadline is told to the other side
        metadata: Metadata = (),
    ) -> EstimateResponse: ...

    async def upload(
        self,
        requests: AsyncIterator[UploadRequest],
        *,
        timeout: float | None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> UploadResponse:
        """Sends a medium: its header, then its pieces. What `requests` raises is raised here as it is."""
        ...

    async def list_models(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> ListModelsResponse: ...

    async def wait_ready(
        self,
        timeout: float,  # noqa: ASYNC109 - as above
        *,
        metadata: Metadata = (),
    ) -> None:
        """Returns when a request would be taken. Raises ConnectionFailed or Unavailable NOT_READY after `timeout`."""
        ...

    async def close(self) -> None: ...


Opener: TypeAlias = Callable[[], Awaitable[Transport]]
"""Opens a transport; called on the event loop that will use it."""


class InProcess(Protocol):
    """What an entry point of `GROUP` names."""

    @classmethod
    async def start(cls, model: str) -> Transport:
        """The whole system in this process, with one model: the folder of a checkpoint, the name of one that comes with
        the package, or a hub name (`owner/name`). Requests may name the model as it was given here.

        Raises CheckpointError for one that cannot be served.
        """
        ...


def in_process(model: str, *, group: str = GROUP) -> Opener:
    """Opens the whole system in this process.

    Raises Unsupported FEATURE_DISABLED, when opened, if no package offers it.
    """

    async def open_in_process() -> Transport:
        found = sorted(entry_points(group=group), key=lambda point: point.name)
        if not found:
            raise Unsupported(
                "FEATURE_DISABLED",
                f"nothing offers the entry point {group!r}: chiasm runs from a folder that was never installed; "
                "`pip install -e .` in it mends that",
                facts={"entry_point": group},
            )
        # In a thread: it imports the libraries of the models, which takes seconds.
        service = cast(type[InProcess], await asyncio.to_thread(found[0].load))
        return await service.start(model)

    return open_in_process
