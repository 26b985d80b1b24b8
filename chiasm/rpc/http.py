"""The plain port of a process: `/metrics`, `/healthz`, `/readyz`, for scrapers and probes that speak no gRPC.

It answers from threads of its own, so that a process whose event loop hangs says so and does not hang as well. What is
measured, and what a process needs to be ready, is its role's business.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

HEARTBEAT: Final = 0.25
"""Seconds between two beats of the event loop."""

STALLED: Final = 10.0
"""Seconds without a beat after which a process counts as dead. Well above what loading or a busy machine costs."""

_POLL: Final = 0.1
"""Seconds after which its thread notices that it should end."""

PATIENCE: Final = 5.0
"""Seconds that a scrape waits for the event loop, which alone may read what it counts."""


class PlainPort:
    """Serves the plain port while it is entered (`async with`), from the event loop that it tells of.

    * `/metrics`: the registry in Prometheus' text format, collected on the event loop; 503 if that does not answer.
    * `/healthz`: 200, or 503 when the loop has not run for `stalled` seconds, or a thread hangs.
    * `/readyz`: 200, or 503 with what is missing. Both say it as JSON, for people.

    Args:
        address: `HOST:PORT`; port 0 takes a free one. See `address`.
        registry: of this process.
        missing: what the process still needs before it can take calls; nothing when it is ready. Called in a thread.
        hanging: names of the threads that hang. Called in a thread.
        stalled, patience: seconds, as the constants of these names.

    Raises OSError on entering when the address cannot be taken.
    """

    def __init__(
        self,
        address: str,
        *,
        registry: CollectorRegistry,
        missing: Callable[[], Sequence[str]],
        hanging: Callable[[], Sequence[str]] = tuple,
        stalled: float = STALLED,
        patience: float = PATIENCE,
    ) -> None:
        self.address = address
        """`HOST:PORT`; the port is known once it is entered."""
        self._registry = registry
        self._missing = missing
        self._hanging = hanging
        self._stalled = stalled
        self._patience = patience
        self._beat = time.monotonic()

    async def __aenter__(self) -> PlainPort:
        self._loop = asyncio.get_running_loop()
        host, _, port = self.address.rpartition(":")
        try:
            self._server = make_server(
                host.strip("[]"),
                int(port),
                self._answer,
                server_class=_Threads6 if host.startswith("[") else _Threads,
                handler_class=_Silent,
            )
        except OSError as error:
            raise OSError(error.errno, f"cannot listen: {error.strerror}", self.address) from error
        self.address = f"{host}:{self._server.server_port}"
        self._heart = asyncio.create_task(self._beating())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL,), name="http", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._heart.cancel()

    async def _beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(HEARTBEAT)

    # -- in the server's threads -----------------------------------------------------------------------------------

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        kind = "application/json"
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", _json(error="only GET is answered")
        elif path == "/healthz":
            silent = time.monotonic() - self._beat
            hanging = list(self._hanging())
            alive = silent < self._stalled and not hanging
            body = _json(alive=alive, seconds_since_heartbeat=round(silent, 3), hanging=hanging)
            status = _status(alive)
        elif path == "/readyz":
            missing = list(self._missing())
            status, body = _status(not missing), _json(ready=not missing, missing=missing)
        elif path == "/metrics":
            status, kind, body = self._metrics(environ.get("HTTP_ACCEPT", ""))
        else:
            status, body = "404 Not Found", _json(error="there are /metrics, /healthz and /readyz")
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _metrics(self, accept: str) -> tuple[str, str, bytes]:
        encode, kind = choose_encoder(accept)

        async def collect() -> bytes:
            return encode(self._registry)

        collecting = asyncio.run_coroutine_threadsafe(collect(), self._loop)
        try:
            return _status(True), kind, collecting.result(self._patience)
        except concurrent.futures.TimeoutError:
            collecting.cancel()
            body = _json(error=f"the process did not answer within {self._patience:g} s")
            return _status(False), "application/json", body


class _Threads(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # the base class would ask the network for its host's name
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Threads6(_Threads):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    """Probes come every few seconds: they are not logged. One that says nothing is let go."""

    timeout = 10.0

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        pass


def _status(good: bool) -> str:
    return "200 OK" if good else "503 Service Unavailable"


def _json(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"
