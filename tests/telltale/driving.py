"""Clients of a tell-tale run: they ask through the SDK and write down what they see. They know neither truth nor
fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from chiasm import AsyncClient, Finished
from tests.telltale.asking import Request
from tests.telltale.history import Record
from tests.telltale.model import NAME

DEADLINE = 60.0
"""Seconds of a request. Far more than any needs: one that meets it has hung."""

GRACE = 5.0

_SOON = 60
"""Milliseconds within which a client leaves that does not wait for an event."""


class Driver:
    """Asks, several at a time.

    Args:
        clients: by tenant.
        told: called with each record that is whole.

    Attributes:
        running: names of the requests that run.
        taken_up: how often an answer was taken up that had broken.
    """

    def __init__(
        self, clients: Mapping[str, AsyncClient], told: Callable[[Record], None], *, deadline: float = DEADLINE
    ) -> None:
        self._clients = clients
        self._told = told
        self._deadline = deadline
        self._began = time.monotonic()
        self.running: set[str] = set()
        self.taken_up = 0

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    async def ask_all(
        self, requests: Iterable[Request], *, at_a_time: int, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Asks until there is no request left, or `until` says so."""
        waiting: Iterator[Request] = iter(requests)

        async def one_after_another() -> None:
            for request in waiting:
                await self.ask(request)
                if until():
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(at_a_time):
                group.create_task(one_after_another())

    async def ask(self, request: Request) -> Record:
        record = Record(request, begun=self.now)
        self.running.add(request.name)
        try:
            async with asyncio.timeout(self._deadline + GRACE):
                await self._follow(record)
        except TimeoutError:
            record.end = "hung"
        except Exception as error:  # whatever a client meets is judged, not handled
            record.fail(error)
        record.ended = self.now
        self.running.discard(request.name)
        self._told(record)
        return record

    async def _follow(self, record: Record) -> None:
        request = record.request
        content = await asyncio.to_thread(lambda: request.content)
        client = self._clients[request.tenant]
        async with client.stream(
            NAME, content, sampling=request.sampling, timeout=self._deadline, request_id=request.name
        ) as stream:
            if request.leave == 0:
                await asyncio.sleep(request.seed % _SOON / 1000)
                record.end = "left"
                return
            try:
                async for event in stream:
                    record.note(event, self.now)
                    if len(record.events) == request.leave and not isinstance(event, Finished):
                        record.end = "left"
                        return
            finally:
                self.taken_up += stream.resumes
        record.end = "whole"
