"""A slow, or broken, link to a server: a proxy on a socket file that passes bytes on as it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any


class Proxy:
    """Between a client and the server behind another socket file.

    Attributes:
        delay: seconds before anything is passed on, each way.
        rate: bytes a second each way; None for as fast as it goes.
        broken: whether connections end instead of passing anything on.
        passed: bytes that were passed on to the client.
    """

    def __init__(self, path: Path, server: Path) -> None:
        self.path = path
        self._server = server
        self._serving: set[asyncio.Task[Any]] = set()
        self.delay = 0.0
        self.rate: float | None = None
        self.broken = False
        self.passed = 0

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        try:
            behind, to_behind = await asyncio.open_unix_connection(self._server)
        except OSError:  # nobody listens there: the client is told as if it had asked itself
            writer.transport.abort()
            return
        self._serving.add(task)
        pipes = [
            asyncio.create_task(self._pipe(reader, to_behind, back=False)),
            asyncio.create_task(self._pipe(behind, writer, back=True)),
        ]
        with suppress(asyncio.CancelledError):
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
        for end in (writer, to_behind):
            end.transport.abort()
        self._serving.discard(task)

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        with suppress(ConnectionError):
            while (data := await reader.read(4096)) and not self.broken:
                await asyncio.sleep(self.delay + (len(data) / self.rate if self.rate else 0))
                writer.write(data)
                await writer.drain()
                self.passed += len(data) if back else 0

    def turn_to(self, server: Path) -> None:
        """Ends every connection. New ones are to another server."""
        self._server = server
        for task in self._serving:
            task.cancel()

    async def end(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.sleep(0)  # for the transports to say that they are closed


@asynccontextmanager
async def proxy(server: Path) -> AsyncIterator[Proxy]:
    """A proxy in the folder of the server's socket."""
    made = Proxy(server.parent / "proxy", server)
    listening = await asyncio.start_unix_server(made.serve, made.path)
    try:
        yield made
    finally:
        listening.close()
        await made.end()
        made.path.unlink(missing_ok=True)
