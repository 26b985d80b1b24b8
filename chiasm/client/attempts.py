"""One answer, over as many streams as it takes.

gRPC repeats a call that nobody began to answer, and no other. What breaks later is taken up here: the request goes out
again with the newest resume token and the ids that came, to the next router where there are several, until it goes on
or patience ends. Knows responses, not events; what is new among them `chiasm.client.progress` says.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

from chiasm.client import checks
from chiasm.client.convert import Outgoing
from chiasm.client.progress import Gap, Progress
from chiasm.client.routes import Routes
from chiasm.client.sending import sending
from chiasm.client.transport import Metadata, Transport
from chiasm.client.upload import Upload
from chiasm.errors import (
    ChiasmError,
    ConnectionFailed,
    DeadlineExceeded,
    IdleTimeout,
    NotFound,
    Overloaded,
    Unavailable,
)
from chiasm.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse

MAX_RESUMES = 8
"""How often one answer is taken up again."""

RESUME_TIMEOUT = 60.0
"""Seconds that a broken answer is tried to be taken up: a router that is started again has its models by then."""

PAUSE = 0.1
"""Seconds before a router is asked again, at first and at most. Doubles up to MAX_PAUSE; the rest is chance."""

MAX_PAUSE = 2.0

Beside: TypeAlias = Callable[[str], Awaitable[Metadata]]
"""Makes what goes beside a call, of the id of its request."""

Deliver: TypeAlias = Callable[[GenerateResponse], Awaitable[None]]
Incoming: TypeAlias = AsyncGenerator[GenerateResponse, None]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an answer is waited for.

    Attributes:
        timeout: seconds of the whole, all attempts and pauses counted. None: no limit.
        idle_timeout: seconds between two responses; the wait for the first of a stream is not bounded by it.
        max_resumes: how often an answer that broke is taken up; 0: it is not.
        resume_timeout: seconds that may pass, each time, until it goes on. None: until `timeout`.

    Raises InvalidRequest FIELD_OUT_OF_RANGE.
    """

    timeout: float | None = None
    idle_timeout: float | None = None
    max_resumes: int = MAX_RESUMES
    resume_timeout: float | None = RESUME_TIMEOUT

    def __post_init__(self) -> None:
        for name in ("timeout", "idle_timeout", "resume_timeout"):
            checks.seconds(name, getattr(self, name))
        if checks.whole("max_resumes", self.max_resumes, 0, 1000) is None:
            raise TypeError("max_resumes is a whole number; 0 takes up nothing")


class Attempts:
    """Made inside an event loop; the clock of `patience.timeout` starts then.

    Attributes:
        failure: what broke the answer, until it goes on.
        resumes: how often it went on.
    """

    def __init__(self, routes: Routes, outgoing: Outgoing[GenerateRequest], beside: Beside, patience: Patience) -> None:
        self.failure: ChiasmError | None = None
        self.resumes = 0
        self._routes = routes
        self._outgoing = outgoing
        self._uploads: tuple[Upload, ...] = outgoing.uploads  # that go beside the attempt, until an answer begins
        self._send_again = False  # all of them beside the next, under new handles
        self._beside = beside
        self._patience = patience
        self._progress = Progress(outgoing.request)
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self._asked = False
        self._give_up = math.inf  # of an answer that broke
        self._failures = 0  # one after the other, without a token between them
        self._breaks = 0
        self._count = 0  # tokens that were there at the last break
        self._others = len(routes) - 1  # that were not asked while nothing had come

    async def run(self, deliver: Deliver) -> None:
        """Delivers each response of the answer once, in order.

        Raises ChiasmError: for an answer that could not be taken up again what broke it, with what stood against going
        on as its cause. DeadlineExceeded before that. And whatever `outgoing` and `beside` raise.
        """
        last: Transport | None = None
        while True:
            transport = await self._routes.current()
            if last is not None and transport is not last:
                self._send_again = True  # what was uploaded lies in the memory of the router before it
            last = transport
            try:
                await self._attempt(transport, deliver)
                return
            except Exception as error:
                if self._progress.finished and isinstance(error, ChiasmError):
                    return  # the answer is whole
                pause = self._pause_after(error)
                if isinstance(error, ConnectionFailed | Unavailable | IdleTimeout):
                    self._routes.leave(transport)
            await asyncio.sleep(pause)

    async def _attempt(self, transport: Transport, deliver: Deliver) -> None:
        left = self._left()
        bound = asyncio.timeout(None if self._give_up == math.inf else max(0.0, self._give_up - self._clock()))
        try:
            async with bound:
                if self._send_again:
                    self._outgoing = await asyncio.to_thread(self._outgoing.again)
                    self._uploads, self._send_again = self._outgoing.uploads, False
                request = self._outgoing.request
                if self._progress.begun:
                    request = self._progress.resuming(request)
                metadata = await self._beside(request.request_id)
                incoming = transport.generate(request, timeout=left, metadata=metadata)
                async with sending(transport, self._uploads, left, metadata), aclosing(incoming):
                    allowed: float | None = None
                    while (response := await self._next(incoming, allowed)) is not None:
                        allowed = self._patience.idle_timeout
                        wanted = self._progress.take(response)
                        if not bound.expired():
                            bound.reschedule(None)
                        self._goes_on()
                        if wanted:
                            await deliver(response)
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise Unavailable("NO_ANSWER", "no router took the answer up in time (resume_timeout)") from error
        if not self._progress.finished:
            raise Unavailable("CONNECTION_LOST", "the stream ended before its answer did")

    async def _next(self, incoming: Incoming, allowed: float | None) -> GenerateResponse | None:
        idle = asyncio.timeout(allowed)
        try:
            async with idle:
                return await anext(incoming, None)
        except TimeoutError as error:
            if not idle.expired():
                raise
            raise IdleTimeout(f"no event came for {allowed:g} s (idle_timeout)") from error

    def _goes_on(self) -> None:
        self._uploads = ()  # an answer begins when all its media were read
        if self.failure is not None:
            self.failure, self._give_up = None, math.inf
            self.resumes += 1

    def _pause_after(self, error: Exception) -> float:
        """Seconds until the next attempt. Raises what the reader is to learn if there is none."""
        if isinstance(error, DeadlineExceeded):
            if self._breaks and error.stage is None:  # it tells of what was left of the time
                raise late(self._patience.timeout) from (self.failure or error)
            raise error
        if self._forgotten(error):
            self._send_again = True
            return 0.0
        if self.failure is None and not self._progress.begun:
            if not isinstance(error, ConnectionFailed | Unavailable) or self._others == 0:
                raise error
            self._others -= 1
            return 0.0
        if self.failure is None:
            self._break(error)
        elif not _passes(error):
            raise self.failure from error
        self._send_again = bool(self._uploads)  # nobody knows how far they came
        assert self.failure is not None, "it broke"
        step = min(MAX_PAUSE, PAUSE * 2**self._failures)
        # A router that asks to be left alone does not speak for the others.
        hint = 0.0 if self._failures < len(self._routes) - 1 else getattr(error, "retry_after", None) or 0.0
        pause: float = hint + random.uniform(0.0, step)
        self._failures += 1
        if self._clock() + pause >= self._give_up:
            raise self.failure from (error if error is not self.failure else error.__cause__)
        return pause

    def _break(self, error: Exception) -> None:
        """An answer that had begun broke. Raises the error if it is none that can be taken up."""
        # One that stands still and keeps its connection says nothing either. With nobody else to ask, that is the end.
        silent = isinstance(error, IdleTimeout) and len(self._routes) > 1
        if (
            not (isinstance(error, Unavailable | Gap) or silent)
            or (self._progress.count > 0 and not self._progress.token)
            or self._breaks == self._patience.max_resumes
        ):
            raise error
        assert isinstance(error, ChiasmError), "it was raised here or told by a server"
        self._breaks += 1
        self.failure = error
        if self._progress.count > self._count:
            self._failures = 0
        self._count = self._progress.count
        if self._patience.resume_timeout is not None:
            self._give_up = self._clock() + self._patience.resume_timeout

    def _forgotten(self, error: Exception) -> bool:
        """Whether a router does not know media that can be sent to it, and were not."""
        unknown = isinstance(error, NotFound) and error.reason == "MEDIA_EXPIRED"
        elsewhere = self.failure is not None or len(self._routes) > 1
        return unknown and elsewhere and not self._uploads and bool(self._outgoing.sources)

    def _left(self) -> float | None:
        """Seconds that the next attempt may take. Raises DeadlineExceeded if there are none."""
        whole = self._patience.timeout
        if whole is None or not self._asked:
            self._asked = True
            return whole
        left = whole - (self._clock() - self._began)
        if left <= 0:
            raise late(whole) from self.failure
        return left


def _passes(error: Exception) -> bool:
    """Whether the next attempt to go on may succeed where this one failed."""
    if isinstance(error, Overloaded):
        return error.retryable
    return isinstance(error, ConnectionFailed | Unavailable)


def late(timeout: float | None) -> DeadlineExceeded:
    """What is told of a call whose deadline only the client saw pass."""
    assert timeout is not None, "what has no limit is never late"
    return DeadlineExceeded(f"the call took longer than {timeout:g} s (timeout)")
