"""What a client gives to every call unless it says otherwise, and the transport that it shares with its copies."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from dataclasses import dataclass, fields
from types import EllipsisType

from chiasm.client import checks
from chiasm.client.connection import Headers
from chiasm.client.stream import AsyncGenerationStream
from chiasm.client.transport import Opener, Transport
from chiasm.client.types import SamplingParams

TIMEOUT = 600.0
"""Seconds of a whole call, unless the caller says otherwise."""

IDLE_TIMEOUT = 60.0
"""Seconds between two events."""

IN_SAMPLING = {
    field.name: f"sampling=SamplingParams({field.name}=...)"
    for field in fields(SamplingParams)
    if field.name != "max_tokens"
}
"""Options that callers of other libraries look for beside the prompt."""

OF_CLIENT = {
    name: f"{name}= of a client that is made anew"
    for name in ("target", "tls", "connect_timeout", "max_retries", "channel_options", "interceptors", "compression")
}
"""Options that belong to the connection, which a copy shares."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a client gives to every call.

    Attributes:
        inline: bytes of media that a request may carry itself; None: all.
    """

    timeout: float | None
    idle_timeout: float | None
    headers: Headers
    inline: int | None

    def __post_init__(self) -> None:
        checks.seconds("timeout", self.timeout)
        checks.seconds("idle_timeout", self.idle_timeout)

    def seconds(self, timeout: float | EllipsisType | None) -> float | None:
        """The time of a call. Raises InvalidRequest FIELD_OUT_OF_RANGE."""
        whole = self.timeout if isinstance(timeout, EllipsisType) else timeout
        checks.seconds("timeout", whole)
        return whole


class Link:
    """The transport that a client and its copies share: opened once, when it is first needed."""

    def __init__(self, opener: Opener) -> None:
        self.streams: weakref.WeakSet[AsyncGenerationStream] = weakref.WeakSet()
        self._opener = opener
        self._opening = asyncio.Lock()
        self._transport: Transport | None = None
        self._closed = False

    async def transport(self) -> Transport:
        """Raises ChiasmError if it cannot be opened, RuntimeError after `close()`."""
        async with self._opening:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._transport is None:
                self._transport = await self._opener()
            return self._transport

    async def close(self) -> None:
        self._closed = True
        for stream in list(self.streams):
            await stream.aclose()
        async with self._opening:
            transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()


def label_of(request_id: str | None) -> str:
    """The id of a request: the caller's, or one that is drawn."""
    return uuid.uuid4().hex if request_id is None else request_id
