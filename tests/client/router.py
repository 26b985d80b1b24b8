"""A router that answers from scripts, on a real server, and records what came and what left."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from blake3 import blake3

from chiasm.errors import ChiasmError
from chiasm.rpc.limits import CLIENT_MESSAGE_BYTES
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc
from tests.client import fake

WAIT = "wait"
"""A step at which a call waits until it is cancelled."""

READ = "read"
"""A step at which a call waits until every medium that it names by a handle is there."""

Step: TypeAlias = rpb.GenerateResponse | ChiasmError | float | str


class ScriptedRouter(router_pb2_grpc.RouterServicer):
    """Answers each call of `Generate` with the next script, the last one again and again.

    Attributes:
        scripts: steps of each: a response is sent, an error raised, a number slept.
        models, refused: what is told of models, and what uploads are refused with.
        requests, headers, remaining: of every call of `Generate`, the metadata and the seconds of its deadline with it.
        beside: metadata of every other call.
        uploads: messages of each upload.
        whole: by handle, set when the upload has come to its end.
        sent: responses that were handed to gRPC.
        came, left: set when a call of `Generate` has come, and when one has ended, however it did.
    """

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self.scripts: list[Sequence[Step]] = list(scripts) or [fake.answer()]
        self.models = fake.MODELS
        self.refused: ChiasmError | None = None
        self.requests: list[rpb.GenerateRequest] = []
        self.headers: list[dict[str, str | bytes]] = []
        self.remaining: list[float | None] = []
        self.beside: list[dict[str, str | bytes]] = []
        self.embeds: list[rpb.EmbedRequest] = []
        self.embedding = fake.embedding()
        self.estimates: list[rpb.EstimateRequest] = []
        self.uploads: list[list[rpb.UploadRequest]] = []
        self.whole: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.sent = 0
        self.came = asyncio.Event()
        self.left = asyncio.Event()

    async def Generate(self, request: rpb.GenerateRequest, context: Any) -> AsyncIterator[rpb.GenerateResponse]:
        self.requests.append(request)
        self.headers.append(dict(context.invocation_metadata()))
        self.remaining.append(context.time_remaining())
        self.came.set()
        script = self.scripts[0] if len(self.scripts) == 1 else self.scripts.pop(0)
        try:
            for step in script:
                if isinstance(step, ChiasmError):
                    raise step
                if step == READ:
                    for medium in request.media:
                        if medium.handle:
                            await self.whole[medium.handle].wait()
                elif isinstance(step, str):
                    await asyncio.Event().wait()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    self.sent += 1
                    yield step
        finally:
            self.left.set()

    async def Upload(self, request_iterator: AsyncIterator[rpb.UploadRequest], context: Any) -> rpb.UploadResponse:
        self.beside.append(dict(context.invocation_metadata()))
        taken: list[rpb.UploadRequest] = []
        self.uploads.append(taken)
        async for request in request_iterator:
            taken.append(request)
            if self.refused is not None:
                raise self.refused
        data = b"".join(request.chunk.data for request in taken[1:])
        self.whole[taken[0].header.upload_id.hex()].set()
        response = rpb.UploadResponse(
            handle=taken[0].header.upload_id.hex(), byte_length=len(data), digest=blake3(data).digest()
        )
        response.expire_time.FromSeconds(1_900_000_000)
        return response

    async def Embed(self, request: rpb.EmbedRequest, context: Any) -> AsyncIterator[rpb.EmbedResponse]:
        self.beside.append(dict(context.invocation_metadata()))
        self.embeds.append(request)
        for response in self.embedding:
            yield response

    async def Estimate(self, request: rpb.EstimateRequest, context: Any) -> rpb.EstimateResponse:
        self.beside.append(dict(context.invocation_metadata()))
        self.estimates.append(request)
        return fake.ESTIMATE

    async def ListModels(self, request: rpb.ListModelsRequest, context: Any) -> rpb.ListModelsResponse:
        self.beside.append(dict(context.invocation_metadata()))
        return self.models


@asynccontextmanager
async def serving(router: ScriptedRouter, *, ready: bool = True, address: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    """The router on a server of its own, with health as every service has it."""
    server = Server(address, message_bytes=CLIENT_MESSAGE_BYTES)
    server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, router)
    await server.start()
    await server.set_ready(ready)
    try:
        yield server
    finally:
        await server.stop(0)
