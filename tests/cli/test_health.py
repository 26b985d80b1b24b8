"""`chiasm health` against a real server, over gRPC and over plain HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from grpc import aio
from typer.testing import CliRunner

from chiasm.cli.app import app
from chiasm.cli.health import ask, check, until_ready
from chiasm.cli.probe import Service
from chiasm.rpc.server import Server

PROBE = """
import sys
from chiasm.cli import main
try:
    main()
finally:
    print(sorted({"torch", "av", "ray", "transformers", "numpy"} & set(sys.modules)))
"""


def probe(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROBE, "health", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


async def test_a_server_is_ready_when_it_says_so() -> None:
    async with Server() as server:
        assert await ask(server.target, Service.LIVENESS, 5) == (True, "SERVING")
        assert await ask(server.target, Service.READINESS, 5) == (False, "NOT_SERVING")
        await server.set_ready(True)
        assert await ask(server.target, Service.READINESS, 5) == (True, "SERVING")
        await until_ready(server.target)


async def test_nobody_and_somebody_else_are_told_apart() -> None:
    other = aio.server()
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    well, said = await ask(f"127.0.0.1:{port}", Service.READINESS, 5)
    assert (well, said) == (False, "answers, but has no health service: not a server of chiasm")
    await other.stop(None)
    assert await ask(f"127.0.0.1:{port}", Service.READINESS, 5) == (False, "no server answers")


async def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    class Silent(aio.ServerInterceptor):
        async def intercept_service(self, continuation: object, details: object) -> None:
            await silence.wait()

    silence = asyncio.Event()
    async with Server(interceptors=[Silent()]) as server:
        assert await ask(server.target, Service.READINESS, 0.05) == (False, "no answer within 0.05 s")
        silence.set()


@contextmanager
def plain(statuses: dict[str, int]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses[self.path])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_address_that_begins_with_http_is_asked_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with plain({"/healthz": 200, "/readyz": 503}) as url:
        assert check(url, Service.LIVENESS, 5) == (True, "200 OK")
        assert check(f"{url}/", Service.READINESS, 5) == (False, "503 Service Unavailable")
    well, said = check(url, Service.READINESS, 5)
    assert not well
    assert said.startswith("no server answers")


async def test_the_command_says_one_line_exits_0_or_1_and_loads_no_large_library() -> None:
    async with Server() as server:
        down = await asyncio.to_thread(probe, "--target", server.target)
        await server.set_ready(True)
        up = await asyncio.to_thread(probe, "--target", server.target)
        # A proxy is for the world outside, never for the address that is probed.
        proxied = {"http_proxy": "http://127.0.0.1:9", "CHIASM_TARGET": server.target}
        through = await asyncio.to_thread(probe, environment=proxied)
        alive = await asyncio.to_thread(probe, "--target", server.target, "--service", "liveness")
    assert down.stdout.splitlines() == [f"not ok: readiness of {server.target}: NOT_SERVING", "[]"]
    assert down.returncode == 1
    for done in (up, through):
        assert done.stdout.splitlines() == [f"ok: readiness of {server.target}: SERVING", "[]"]
        assert done.returncode == 0
    assert (alive.returncode, alive.stdout.splitlines()[0]) == (0, f"ok: liveness of {server.target}: SERVING")


def test_an_unknown_service_is_misuse() -> None:
    done = CliRunner().invoke(app, ["health", "--service", "readyness"])
    assert done.exit_code == 2
    assert "readiness" in done.output
