"""A small role, run as a process by `test_process`: `python role.py SCRIPT [flags]`. SCRIPT says how it misbehaves."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import Counter

from chiasm.errors import CheckpointError, Unsupported
from chiasm.rpc.http import STALLED
from chiasm.rpc.process import OVERTIME, Process, run
from chiasm.rpc.v1 import router_pb2, router_pb2_grpc
from chiasm.settings import RoleSettings, SettingsError

SCRIPT = sys.argv[1]


class Router(router_pb2_grpc.RouterServicer):
    """`ListModels` takes as long as it is told, and finds what is lacking; `Estimate` stops the event loop for good."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._calls = Counter("chiasm_calls", "Calls.", registry=process.registry)

    async def ListModels(self, request: router_pb2.ListModelsRequest, context: Any) -> router_pb2.ListModelsResponse:
        self._calls.inc()
        if SCRIPT == "lacking":
            await _find(self._process)
        logging.getLogger("role").info("called")
        if SCRIPT in ("hopeless", "hopeless-late"):
            self._process.refuse(SettingsError("no encoder will come", "encoder digits", "name another model"))
        seconds = float(dict(context.invocation_metadata()).get("seconds", 0))
        await asyncio.sleep(seconds)
        return router_pb2.ListModelsResponse(models=[router_pb2.Model(name=str(self._process.draining))])

    async def Estimate(self, request: router_pb2.EstimateRequest, context: Any) -> router_pb2.EstimateResponse:
        time.sleep(3600)  # noqa: ASYNC251 - that is what is tested
        return router_pb2.EstimateResponse()


@asynccontextmanager
async def serve(settings: RoleSettings, process: Process) -> AsyncIterator[None]:
    if SCRIPT == "checkpoint":
        raise CheckpointError("tiny", ["a.weight is missing", "b.weight is missing"])
    if SCRIPT == "arena":
        raise Unsupported("ARENA_MISSING", "there is no arena at /dev/shm/none")
    if SCRIPT == "bug":
        raise ZeroDivisionError("unforeseen")
    if SCRIPT == "load":
        await asyncio.to_thread(_load, process)
    if SCRIPT in ("lacking", "hopeless"):
        await process.require("an encoder", there=False)
    process.server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, Router(process))
    yield


def _load(process: Process) -> None:
    for done in range(10_000):
        process.loading("tiny", done, 10_000)
        time.sleep(0.01)


async def _find(process: Process) -> None:
    for there in (True, False, True):
        await process.require("an encoder", there=there)


if __name__ == "__main__":
    hasty = SCRIPT == "hasty"
    run(
        "front",
        RoleSettings,
        serve,
        program="python role.py",
        argv=sys.argv[2:],
        stalled=1.0 if hasty else STALLED,
        overtime=0.5 if hasty else OVERTIME,
    )
