"""An encoder put together from its settings: region, half of the model, servicer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chiasm.allocation import keep_freed
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Limits
from chiasm.models.family import EncoderHalf, Trunk
from chiasm.models.loading import crossing, followed, place, streaming
from chiasm.models.registry import Model, open_model
from chiasm.rpc.process import Process
from chiasm.rpc.replica import replica
from chiasm.rpc.turns import Turns
from chiasm.rpc.v1 import encoder_pb2_grpc
from chiasm.settings import SettingsError, read_secret
from encoder_service.engine import EncoderEngine
from encoder_service.graphs import captured
from encoder_service.metrics import collector
from encoder_service.servicer import EncoderServicer
from encoder_service.settings import EncoderSettings


@asynccontextmanager
async def serve(settings: EncoderSettings, process: Process) -> AsyncIterator[None]:
    """The role of `chiasm.rpc.process`. Raises SettingsError, CheckpointError, and what `Region` raises."""
    secret = read_secret(settings.workers_secret_file)
    async with crossing(settings, step=process.failpoints.within("store")) as kept:
        model, half, trunk, fingerprint = await asyncio.to_thread(_load, settings, process)
        made = half.entry_shape.forms
        if not set(settings.offer_forms or ()) <= set(made):
            labels = ",".join(form.label for form in made)
            raise SettingsError(f"entries of this model are {labels}", "--offer-forms", "leave it out")
        engine = EncoderEngine(
            half,
            model.processor,
            fingerprint=fingerprint,
            store=kept.store,
            workers_secret=secret,
            max_patches=settings.max_patches,
            max_units=settings.max_units,
            max_unit_patches=settings.max_unit_patches,
            trunk=trunk,
            forms=settings.offer_forms,
            step=process.failpoints.within("encoder"),
        )
        limits = Limits()
        try:
            async with Sandbox(workers=settings.media_workers, limits=limits) as sandbox:
                servicer = EncoderServicer(
                    engine,
                    sandbox,
                    name=model.name,
                    family=model.family.name,
                    limits=limits,
                    lease=settings.lease_seconds,
                    me=replica(device=settings.device, arena_id=kept.arena_id, shared_store_id=kept.shared_store_id),
                    turns=Turns(
                        max_running=settings.max_running,
                        max_waiting=settings.max_waiting,
                        max_cost=settings.max_waiting_patches,
                    ),
                    draining=lambda: process.draining,
                    standing=lambda: process.standing,
                )
                process.watch([engine.device.pulse, engine.publisher.pulse], seconds=settings.pass_seconds)
                process.needs("the region", kept.there)
                process.registry.register(collector(servicer))
                process.server.add("chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, servicer)
                yield
        finally:
            await engine.close()


def _load(settings: EncoderSettings, process: Process) -> tuple[Model, EncoderHalf, Trunk | None, str]:
    device, dtype = place(settings.device, settings.dtype)
    if device.type == "cpu":
        keep_freed()
    model = open_model(settings.model)
    model.name = settings.name or model.name
    with followed(model, "encoder", lambda done, total: process.loading(model.name, done, total)):
        half = model.encoder(device=device, dtype=dtype, streaming=streaming(settings))
        fingerprint = model.checkpoint.fingerprint  # read once, here, where time may pass
    return model, half, captured(half, settings.cuda_graphs, settings.graph_patches), fingerprint
