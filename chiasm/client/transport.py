"""The one seam of the client: what carries requests away and brings events back.

A transport speaks protobuf and raises `chiasm.errors`. The system in this process is one; it is found by its entry
point, because the client stands below it and may not import it. Knows no media and no events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from importlib.metadata import entry_points
from typing import Protocol, TypeAlias, cast

from chiasm.errors import Unsupported
from chiasm.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse, ListModelsResponse

GROUP = "chiasm.in_process"
"""Entry points that name an `InProcess`."""


class Transport(Protocol):
    """Belongs to the event loop it was opened on."""

    def generate(self, request: GenerateRequest, *, timeout: float | None) -> AsyncGenerator[GenerateResponse, None]:
        """The events of an answer. Closing the generator cancels the request and frees everything it holds.

        Iterating raises ChiasmError. `timeout` is the deadline of the whole call in seconds.
        """
        ...

    async def list_models(self) -> ListModelsResponse: ...

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
