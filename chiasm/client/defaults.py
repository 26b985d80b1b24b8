"""What a client gives to every call unless it says otherwise, and what it shares with its copies."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import EllipsisType

from chiasm.client.attempts import Patience
from chiasm.client.connection import Headers
from chiasm.client.routes import Routes
from chiasm.client.stream import AsyncGenerationStream
from chiasm.client.transport import Opener
from chiasm.client.types import ResumePoint, SamplingParams

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
        patience: how long it waits.
        inline: bytes of media that a request may carry itself; None: all.
    """

    patience: Patience
    headers: Headers
    inline: int | None

    def waiting(self, timeout: float | EllipsisType | None) -> Patience:
        """That of a call. Raises InvalidRequest FIELD_OUT_OF_RANGE."""
        return self.patience if isinstance(timeout, EllipsisType) else replace(self.patience, timeout=timeout)


class Link:
    """What a client and its copies share: the routers that they may ask, and the streams that are open."""

    def __init__(self, openers: Sequence[Opener]) -> None:
        self.streams: weakref.WeakSet[AsyncGenerationStream] = weakref.WeakSet()
        self.routes = Routes(openers)

    async def close(self) -> None:
        self.routes.refuse()
        for stream in list(self.streams):
            await stream.aclose()
        await self.routes.close()


def label_of(request_id: str | None, resume: ResumePoint | None = None) -> str:
    """The id of a request: the caller's, that of the request it goes on with, or one that is drawn."""
    if request_id is None:
        return uuid.uuid4().hex if resume is None else resume.request_id
    return request_id
