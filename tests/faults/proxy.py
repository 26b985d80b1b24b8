"""A slow, or broken, link to a server: a proxy on a socket file that passes bytes on as it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path


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
        self._pipes: set[asyncio.Task[None]] = set()
        self.delay = 0.0
        self.rate: float | None = None
        self.broken = False
        self.passed = 0

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_behind = await asyncio.open_unix_connection(self._server)
        pipes = [
            asyncio.create_task(self._pipe(reader, to_behind, back=False)),
            asyncio.create_task(self._pipe(behind, writer, back=True)),
        ]
        self._pipes.update(pipes)
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
        self._pipes.difference_update(pipes)
        for end in (writer, to_behind):
            end.close()

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
        for pipe in self._pipes:
            pipe.cancel()

    async def end(self) -> None:
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)


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
