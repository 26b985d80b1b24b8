"""The routers that one client may ask: a transport to each, and one of them that is asked until it fails.

Everything of one request goes to one router, because what was uploaded lies in its memory. Knows no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from chiasm.client.transport import Metadata, Opener, Transport
from chiasm.errors import ConnectionFailed, Unavailable

T = TypeVar("T")


class Routes:
    """Opens each transport once, when it is first asked. Belongs to one event loop.

    Args:
        openers: one for each router, in the order in which they are tried.
    """

    def __init__(self, openers: Sequence[Opener]) -> None:
        self._openers = tuple(openers)
        self._transports: dict[int, Transport] = {}
        self._asked = 0
        self._opening = asyncio.Lock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._openers)

    async def current(self) -> Transport:
        """The one that is asked. Raises ChiasmError if it cannot be opened, RuntimeError after `close()`."""
        return await self._at(self._asked)

    def leave(self, transport: Transport) -> None:
        """Has the next one asked from now on, unless another call has seen to that already."""
        if self._transports.get(self._asked) is transport:
            self._asked = (self._asked + 1) % len(self)

    async def first(
        self,
        call: Callable[[Transport, float | None], Awaitable[T]],
        timeout: float | None,  # noqa: ASYNC109 - the deadline is told to the other side
    ) -> T:
        """What the first router says that can be reached and takes the call; each is asked once.

        Args:
            call: is given what is left of `timeout`.
        """
        clock = asyncio.get_running_loop().time
        begun, left = clock(), timeout
        others = len(self) - 1
        while True:
            transport = await self.current()
            try:
                return await call(transport, left)
            except (ConnectionFailed, Unavailable):
                self.leave(transport)
                if others == 0:
                    raise
                others -= 1
                left = None if timeout is None else max(0.0, begun + timeout - clock())

    async def wait_ready(
        self,
        timeout: float,  # noqa: ASYNC109 - as above
        metadata: Metadata,
    ) -> None:
        """Returns when one of them is ready, which is asked from then on. Raises what the most telling one raised."""
        if len(self) == 1:
            await (await self.current()).wait_ready(timeout, metadata=metadata)
            return
        waits: dict[asyncio.Task[None], int] = {}
        try:
            for at in range(len(self)):
                transport = await self._at(at)
                waits[asyncio.create_task(transport.wait_ready(timeout, metadata=metadata))] = at
            pending = set(waits)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None:
                        self._asked = waits[task]
                        return
            faults = [error for task in waits if (error := task.exception()) is not None]
            raise next((error for error in faults if not isinstance(error, ConnectionFailed)), faults[0])
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def refuse(self) -> None:
        """Opens nothing any longer, and names nobody."""
        self._closed = True

    async def close(self) -> None:
        """Closes what was opened. Twice is fine."""
        self.refuse()
        async with self._opening:
            transports, self._transports = list(self._transports.values()), {}
        for transport in transports:
            await transport.close()

    async def _at(self, at: int) -> Transport:
        async with self._opening:
            if self._closed:
                raise RuntimeError("the client is closed")
            if at not in self._transports:
                self._transports[at] = await self._openers[at]()
            return self._transports[at]
