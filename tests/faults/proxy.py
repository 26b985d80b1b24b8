"""A slow, lossy or broken link to a server: a proxy that passes bytes on as it was told, on a socket file or a port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

Address = Path | tuple[str, int]
"""Of a server: its socket file, or its host and port."""


class Proxy:
    """Between a client and the server behind another address. All that is counted is counted back to the client, over
    all connections.

    Attributes:
        delay: seconds before anything is passed on, each way.
        rate: bytes a second each way; None for as fast as it goes.
        broken: whether connections end instead of passing anything on.
        hole: whether what comes is swallowed, each way, and connections stay.
        half_closed: whether the way to the client has ended, at its next byte, and the way to the server goes on.
        cut_at: bytes after which the connection that carries them ends.
        flip_at: the byte whose lowest bit is turned.
        passed: bytes that were passed on to the client.
        swallowed: bytes that were not, each way.
        flipped, cut: how often it was done.
    """

    def __init__(self, path: Path | None, server: Address) -> None:
        self.path = path
        self.port = 0
        self._server = server
        self._serving: set[asyncio.Task[Any]] = set()
        self.delay = 0.0
        self.rate: float | None = None
        self.broken = False
        self.hole = False
        self.half_closed = False
        self.cut_at: int | None = None
        self.flip_at: int | None = None
        self.passed = 0
        self.swallowed = 0
        self.flipped = 0
        self.cut = 0

    @property
    def url(self) -> str:
        """Of one on a socket file."""
        return f"unix://{self.path}"

    @property
    def target(self) -> str:
        """As gRPC has it."""
        return f"unix:{self.path}" if self.path is not None else f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        try:
            behind, to_behind = await self._connected()
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
            if self.half_closed:  # the other way goes on
                await asyncio.wait(pipes)
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
        for end in (writer, to_behind):
            end.transport.abort()
        self._serving.discard(task)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._server, Path):
            return await asyncio.open_unix_connection(self._server)
        return await asyncio.open_connection(*self._server)

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        with suppress(ConnectionError):
            while (data := await reader.read(4096)) and not self.broken:
                await asyncio.sleep(self.delay + (len(data) / self.rate if self.rate else 0))
                if self.hole:
                    self.swallowed += len(data)
                    continue
                if back and self.half_closed:
                    self.swallowed += len(data)
                    writer.write_eof()
                    return
                whole = len(data)
                if back:
                    data = self._hurt(data)
                writer.write(data)
                await writer.drain()
                self.passed += len(data) if back else 0
                if len(data) < whole:
                    return

    def _hurt(self, data: bytes) -> bytes:
        """What becomes of bytes on their way back. Fewer of them: the connection ends."""
        if self.flip_at is not None and 0 <= (at := self.flip_at - self.passed) < len(data):
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            self.flipped += 1
        if self.cut_at is not None and 0 <= (at := self.cut_at - self.passed) < len(data):
            data = data[:at]
            self.cut += 1
            self.cut_at = None
        return data

    def turn_to(self, server: Address) -> None:
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
    assert made.path is not None
    listening = await asyncio.start_unix_server(made.serve, made.path)
    try:
        yield made
    finally:
        listening.close()
        await made.end()
        made.path.unlink(missing_ok=True)


@asynccontextmanager
async def tcp_proxy(host: str, port: int) -> AsyncIterator[Proxy]:
    """A proxy on a free port of this machine."""
    made = Proxy(None, (host, port))
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        listening.close()
        await made.end()
