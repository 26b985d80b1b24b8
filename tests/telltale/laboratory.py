"""A system of tell-tale services in this process: two replicas of each worker, two routers for each tenant, a region
between the workers, and real gRPC on socket files. For runs of a second, many times over.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from chiasm import AsyncClient
from chiasm.cache.arena import ArenaStore
from chiasm.cache.form import Form
from chiasm.cache.region import Region
from chiasm.cache.tenant import LOCAL, tenant_root
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Limits
from chiasm.rpc.limits import CLIENT_MESSAGE_BYTES
from chiasm.rpc.replica import replica
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import decoder_pb2_grpc, encoder_pb2_grpc, router_pb2_grpc
from decoder_service.model import DecoderModel
from decoder_service.servicer import DecoderServicer
from encoder_service.servicer import EncoderServicer
from router.servicer import RouterServicer
from router.static_fleet import StaticFleet
from tests.telltale.model import TellingDecoder, TellingEngine, TellingModel, decoder_engine
from tests.waiting import until

TENANTS = ("one", "two")

_ROUTERS = 2
"""Of each tenant."""

_BEAT = 0.2
"""Seconds between two questions of a router to its workers."""


@dataclass
class Laboratory:
    """A running system.

    Attributes:
        routers: by tenant.
        clients: by tenant; each knows both routers.
        roots: of the tenants.
        servers: of the decoders.
        fronts: servers of the routers, by tenant.
    """

    encoders: list[EncoderServicer] = field(default_factory=list)
    decoders: list[DecoderServicer] = field(default_factory=list)
    routers: dict[str, list[RouterServicer]] = field(default_factory=dict)
    clients: dict[str, AsyncClient] = field(default_factory=dict)
    roots: dict[str, bytes] = field(default_factory=dict)
    servers: list[Server] = field(default_factory=list)
    fronts: dict[str, list[Server]] = field(default_factory=dict)

    async def lose_decoder(self, number: int) -> None:
        """Ends every call of a decoder and takes it off the wire; it comes back at once, as a restart would."""
        server = self.servers[number]
        await server.stop()
        decoder = self.decoders[number]
        await until(lambda: not decoder.turns.running + decoder.turns.waiting)
        decoder.model.flush()  # what a restart would not find either
        self.servers[number] = await _serve(self.decoders[number], server.target)

    async def lose_router(self, tenant: str, number: int) -> None:
        """Ends every call of a router and takes it off the wire; it comes back at once, and knows nothing of them."""
        server = self.fronts[tenant][number]
        await server.stop()
        self.fronts[tenant][number] = await _serve_router(self.routers[tenant][number], server.target)

    async def stop(self) -> None:
        """Ends the servers of decoders and routers."""
        for server in [*itertools.chain(*self.fronts.values()), *self.servers]:
            await server.stop()

    def held(self) -> dict[str, float]:
        """Whatever is not zero of what must be when no request runs."""
        held: dict[str, float] = {}
        for number, encoder in enumerate(self.encoders):
            stats = encoder.engine.store.stats()
            held[f"pinned at encoder {number}"] = stats.pinned_bytes
            held[f"in flight at encoder {number}"] = encoder.engine.in_flight
            held[f"calls of encoder {number}"] = encoder.turns.running + encoder.turns.waiting
        for number, decoder in enumerate(self.decoders):
            holdings = decoder.model.engine.holdings
            held[f"pages of decoder {number}"] = holdings.held.pages + holdings.promised.pages
            held[f"slots of decoder {number}"] = holdings.held.visual + holdings.promised.visual
            held[f"calls of decoder {number}"] = decoder.turns.running + decoder.turns.waiting
            held[f"timelines of decoder {number}"] = decoder.model.running + decoder.model.waiting
        return {what: value for what, value in held.items() if value}

    def lost(self) -> dict[str, float]:
        """What the pools lack, once what is only kept is flushed."""
        lost: dict[str, float] = {}
        for number, decoder in enumerate(self.decoders):
            decoder.model.flush()
            engine = decoder.model.engine
            lost[f"pages of decoder {number}"] = engine.pages.total - engine.pages.free
            lost[f"slots of decoder {number}"] = engine.extents.total - engine.extents.free
        return {what: value for what, value in lost.items() if value}

    async def settled(self, seconds: float) -> dict[str, float]:
        """Waits until nothing is held. Returns what still is when the time is over."""
        end = time.monotonic() + seconds
        while held := self.held():
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.01)
        return held


@asynccontextmanager
async def laboratory(
    folder: Path,
    sandbox: Sandbox,
    *,
    pace: float = 0.0,
    arena_bytes: int = 4 << 20,
    text_tokens: int = 4096,
    visual_tokens: int = 192,
    max_rows: int = 96,
    replicas: int = 2,
) -> AsyncIterator[Laboratory]:
    """The system, ended with the block.

    Args:
        pace: seconds of a decoder's step beyond what it takes.
        visual_tokens: of the cross pool: as a rule few, so that units are attached again and answers give way.
    """
    made = Laboratory()
    workers = secrets.token_bytes(32)
    async with AsyncExitStack() as stack:
        region = Region.create(folder / "arena", arena_bytes)
        stack.callback(region.close)
        model = TellingModel()
        targets: dict[str, list[str]] = {"encoder": [], "decoder": []}
        for number in range(replicas):
            store = ArenaStore(_opened(stack, region))
            server = Server(f"unix:{folder}/encoder-{number}")
            made.encoders.append(_encoder(stack, model, store, workers, sandbox, region.arena_id))
            server.add("chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, made.encoders[-1])
            await stack.enter_async_context(server)
            await server.set_ready(True)
            targets["encoder"].append(server.target)
        for number in range(replicas):
            store = ArenaStore(_opened(stack, region))
            half = model.decoder()
            assert isinstance(half, TellingDecoder)
            engine = decoder_engine(
                half, model.processor, text_tokens=text_tokens, visual_tokens=visual_tokens, page_size=8, pace=pace
            )
            decoder = DecoderModel(
                engine,
                model.prompt(),
                fingerprint=model.checkpoint.fingerprint,
                text_fingerprint=model.checkpoint.text_fingerprint,
                store=store,
                workers_secret=workers,
                max_rows=max_rows,
            )
            stack.push_async_callback(decoder.close)
            servicer = DecoderServicer(
                decoder, name=model.name, family=model.family.name, me=replica(device="cpu", arena_id=region.arena_id)
            )
            made.decoders.append(servicer)
            made.servers.append(await _serve(servicer, f"unix:{folder}/decoder-{number}"))
            targets["decoder"].append(made.servers[-1].target)
        for tenant in TENANTS:
            made.roots[tenant] = tenant_root(secrets.token_bytes(32), LOCAL)
            made.routers[tenant], made.fronts[tenant] = [], []
            for number in range(_ROUTERS):
                fleet = StaticFleet(targets["encoder"], targets["decoder"], beat=_BEAT)
                await fleet.start()
                stack.push_async_callback(fleet.close)
                made.routers[tenant].append(RouterServicer(fleet, tenant_root=made.roots[tenant]))
                front = await _serve_router(made.routers[tenant][-1], f"unix:{folder}/router-{tenant}-{number}")
                made.fronts[tenant].append(front)
            made.clients[tenant] = AsyncClient([front.target for front in made.fronts[tenant]], max_retries=0)
        stack.push_async_callback(made.stop)
        for client in made.clients.values():
            await stack.enter_async_context(client)
        yield made


async def _serve(servicer: DecoderServicer, target: str) -> Server:
    server = Server(target)
    server.add("chiasm.rpc.v1.Decoder", decoder_pb2_grpc.add_DecoderServicer_to_server, servicer)
    await server.start()
    await server.set_ready(True)
    return server


async def _serve_router(servicer: RouterServicer, target: str) -> Server:
    server = Server(target, message_bytes=CLIENT_MESSAGE_BYTES)
    server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, servicer)
    await server.start()
    await server.set_ready(True)
    return server


def _opened(stack: AsyncExitStack, region: Region) -> Region:
    opened = Region.open(region.path)
    stack.callback(opened.close)
    return opened


def _encoder(
    stack: AsyncExitStack, model: TellingModel, store: ArenaStore, workers: bytes, sandbox: Sandbox, arena_id: bytes
) -> EncoderServicer:
    engine = TellingEngine(
        model.encoder(dtype=torch.float32),
        model.processor,
        fingerprint=model.checkpoint.fingerprint,
        store=store,
        workers_secret=workers,
        forms=(Form.CROSS_KV,),
    )
    stack.push_async_callback(engine.close)
    return EncoderServicer(
        engine,
        sandbox,
        name=model.name,
        family=model.family.name,
        limits=Limits(),
        me=replica(device="cpu", arena_id=arena_id),
    )
