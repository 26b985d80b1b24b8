"""`python -m router`: one router as a process. See `chiasm.rpc.process` for its life.

It is ready while at least one model has an encoder and a decoder that fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chiasm.cache.tenant import LOCAL, tenant_root
from chiasm.rpc.limits import CLIENT_MESSAGE_BYTES
from chiasm.rpc.process import Process, run
from chiasm.rpc.v1 import router_pb2_grpc
from chiasm.settings import read_secret
from router.admission import AdmissionLimits
from router.ray_fleet import RayFleet
from router.servicer import RouterLimits, RouterServicer
from router.settings import RouterSettings
from router.spread import Spread
from router.static_fleet import MemberFleet, StaticFleet
from router.tenants import Quota
from router.uploads import UploadLimits

FAREWELL = 0.5
"""Seconds before the end of its drain at which a router ends the answers that still run."""

PAIR = "an encoder and a decoder that fit"


@asynccontextmanager
async def serve(settings: RouterSettings, process: Process) -> AsyncIterator[None]:
    root = tenant_root(read_secret(settings.tenants_secret_file), LOCAL)
    fleet = _fleet(settings)
    limits = RouterLimits(
        max_seconds=settings.max_seconds,
        slow_seconds=settings.slow_seconds,
        spread=Spread(encoders=settings.fan_out),
        uploads=UploadLimits(total_bytes=settings.upload_bytes, ttl=settings.upload_ttl),
        admission=AdmissionLimits(
            requests=settings.max_requests,
            cost=settings.max_cost,
            wait=settings.max_wait,
            memory=settings.max_memory,
        ),
        quota=Quota(requests=settings.tenant_requests, cost_per_minute=settings.tenant_cost_per_minute),
    )
    servicer = RouterServicer(fleet, tenant_root=root, limits=limits)
    process.registry.register(servicer.meter)
    process.server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, servicer)
    await process.require(PAIR, there=False)
    await fleet.start()
    tasks = [asyncio.create_task(_follow(fleet, process)), asyncio.create_task(_let_go(servicer, process))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.close()


async def _let_go(servicer: RouterServicer, process: Process) -> None:
    """Answers that do not end within the drain are told so before it is over: a call that is cut off tells nothing."""
    await process.almost_drained(FAREWELL)
    await servicer.let_go()


def _fleet(settings: RouterSettings) -> MemberFleet:
    """Raises SettingsError for a plan that is none."""
    if settings.ray_plan is not None:
        return RayFleet(settings.ray_plan, keep=settings.ray_keep, patience=settings.patience)
    return StaticFleet(settings.encoders, settings.decoders, patience=settings.patience)


async def _follow(fleet: MemberFleet, process: Process) -> None:
    """Readiness follows the fleet."""
    while True:
        await process.require(PAIR, there=fleet.takes_requests())
        await fleet.changed()


if __name__ == "__main__":
    run("router", RouterSettings, serve, message_bytes=CLIENT_MESSAGE_BYTES)
