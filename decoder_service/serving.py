"""A decoder put together from its settings: region, half of the model, servicer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from chiasm.allocation import keep_freed
from chiasm.cache.form import Form
from chiasm.models.loading import crossing, followed, place, streaming
from chiasm.models.registry import Model, open_model
from chiasm.models.residence import Residence
from chiasm.rpc.process import Process
from chiasm.rpc.replica import replica
from chiasm.rpc.turns import Turns
from chiasm.rpc.v1 import decoder_pb2_grpc
from chiasm.settings import read_secret
from decoder_service.computing import attends, captured_rows
from decoder_service.engine import DecoderEngine, pool_tokens
from decoder_service.form_choice import form_for
from decoder_service.metrics import collector
from decoder_service.model import DecoderModel
from decoder_service.servicer import DecoderServicer
from decoder_service.settings import DecoderSettings


@asynccontextmanager
async def serve(settings: DecoderSettings, process: Process) -> AsyncIterator[None]:
    """The role of `chiasm.rpc.process`. Raises SettingsError, CheckpointError, and what `Region` raises."""
    secret = read_secret(settings.workers_secret_file)
    async with crossing(settings, step=process.failpoints.within("store")) as kept:
        device, given = place(settings.device, settings.dtype)
        model = await asyncio.to_thread(open_model, settings.model, condition_layers=settings.condition_layers)
        model.name = settings.name or model.name
        dtype = given or model.checkpoint.dtype
        form = await form_for(settings.forms, model, kept, secret=secret, device=device, dtype=dtype)
        engine, fingerprint = await asyncio.to_thread(_load, settings, process, model, device, dtype, form)
        decoder = DecoderModel(
            engine,
            model.prompt(),
            fingerprint=fingerprint,
            text_fingerprint=model.text_fingerprint,
            store=kept.store,
            workers_secret=secret,
            max_rows=settings.max_rows,
            max_units=settings.max_units,
            max_running=settings.max_running,
            form=form,
            states_bytes=settings.states_bytes,
            step=process.failpoints.within("decoder"),
        )
        try:
            servicer = DecoderServicer(
                decoder,
                name=model.name,
                family=model.family.name,
                me=replica(device=settings.device, arena_id=kept.arena_id, shared_store_id=kept.shared_store_id),
                turns=Turns(max_waiting=settings.max_waiting, max_cost=settings.max_waiting_tokens),
                draining=lambda: process.draining,
                standing=lambda: process.standing,
            )
            process.watch([decoder.pulse], seconds=settings.pass_seconds)
            process.needs("the region", kept.there)
            process.registry.register(collector(servicer))
            process.server.add("chiasm.rpc.v1.Decoder", decoder_pb2_grpc.add_DecoderServicer_to_server, servicer)
            yield
        finally:
            await decoder.close()


def _load(
    settings: DecoderSettings, process: Process, model: Model, device: torch.device, dtype: torch.dtype, form: Form
) -> tuple[DecoderEngine, str]:
    if device.type == "cpu":
        keep_freed()
    projects = form is Form.STATES and not model.entry_shape.overlaid
    with followed(model, "decoder", lambda done, total: process.loading(model.name, done, total), projects=projects):
        half = model.decoder(device=device, dtype=dtype, projects=projects, streaming=streaming(settings))
        fingerprint = model.checkpoint.fingerprint  # read once, here, where time may pass
    text, visual = pool_tokens(
        half, text=settings.text_tokens, visual=settings.visual_tokens, most_bytes=settings.pool_bytes
    )
    engine = DecoderEngine(
        half,
        model.processor,
        text_tokens=text,
        visual_tokens=visual,
        attention=settings.attention,
        graph_rows=captured_rows(
            settings.cuda_graphs,
            settings.graph_rows,
            attends(half, settings.attention, deterministic=settings.deterministic),
            streams=Residence.of(half).streams,
        ),
        compiled=settings.compile,
        deterministic=settings.deterministic,
    )
    engine.prepare()
    return engine, fingerprint
