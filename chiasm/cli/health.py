"""`chiasm health`: asks a server whether it is alive, or ready, in one line and an exit code. Made for probes.

`grpc.health.v1` on a gRPC address, `/healthz` or `/readyz` where the address begins with `http://`. No proxy is used: a
probe is about this address. Loads neither torch nor a decoder of media.
"""

from __future__ import annotations

import asyncio
import http.client
import time
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.cli.probe import Service
from chiasm.rpc.channel import connect

_DIRECT = {"grpc.enable_http_proxy": 0}

_AGAIN = 0.05
"""Seconds between two questions of one who waits."""

_PATHS = {Service.READINESS: "/readyz", Service.LIVENESS: "/healthz"}


def check(target: str, service: Service, timeout: float) -> tuple[bool, str]:
    """Asks once. Returns whether all is well, and what was answered, in a few words.

    Args:
        target: `HOST:PORT`, `unix:…`, a gRPC name, or `http://HOST:PORT`.
        timeout: seconds that the answer may take.
    """
    if target.startswith("http://"):
        return _ask_http(target.rstrip("/") + _PATHS[service], timeout)
    return asyncio.run(ask(target, service, timeout))


async def ask(target: str, service: Service, timeout: float) -> tuple[bool, str]:  # noqa: ASYNC109 - gRPC's deadline
    """As `check`, of a gRPC address."""
    async with connect(target, options=_DIRECT) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service.value), timeout=timeout
            )
        except grpc.aio.AioRpcError as error:
            return False, _in_words(error.code(), timeout)
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return answer.status == health_pb2.HealthCheckResponse.SERVING, word


async def until_ready(target: str) -> None:
    """Waits until a server that listens takes calls; the caller bounds the wait."""
    while not (await ask(target, Service.READINESS, 5))[0]:  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(_AGAIN)


def _in_words(code: grpc.StatusCode, timeout: float) -> str:
    return {
        grpc.StatusCode.UNAVAILABLE: "no server answers",
        grpc.StatusCode.DEADLINE_EXCEEDED: f"no answer within {timeout:g} s",
        grpc.StatusCode.NOT_FOUND: "answers, but knows no such service: not a server of chiasm",
        grpc.StatusCode.UNIMPLEMENTED: "answers, but has no health service: not a server of chiasm",
    }.get(code, code.name)


def _ask_http(url: str, timeout: float) -> tuple[bool, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    began = time.monotonic()
    try:
        with opener.open(url, timeout=timeout) as answer:
            return True, f"{answer.status} {answer.reason}"
    except urllib.error.HTTPError as error:
        return False, f"{error.code} {error.reason}"
    except http.client.HTTPException:
        return False, "answers, but not as HTTP: a gRPC address has no http://"
    except (OSError, ValueError) as error:
        late = time.monotonic() - began >= timeout
        return False, f"no answer within {timeout:g} s" if late else f"no server answers ({_cause(error)})"


def _cause(error: Exception) -> str:
    return str(error.reason) if isinstance(error, urllib.error.URLError) else str(error)
