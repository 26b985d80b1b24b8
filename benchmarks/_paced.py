"""Workers that compute nothing and take their time: an encoder and a decoder of fixed step times behind the real wire,
and a router before them. `python -m benchmarks._paced ROLE …`; each ends when its standard input does.

They wait, run and refuse as real ones do (`chiasm.rpc.turns`): what is measured with them is what stands before them.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

from chiasm.cache.tenant import LOCAL, tenant_root
from chiasm.rpc.limits import CLIENT_MESSAGE_BYTES
from chiasm.rpc.load import Riding, load_of
from chiasm.rpc.server import Server
from chiasm.rpc.times import seconds_left
from chiasm.rpc.turns import Turns
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc, encoder_pb2_grpc, router_pb2_grpc
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.admission import AdmissionLimits
from router.servicer import RouterLimits, RouterServicer
from router.static_fleet import StaticFleet
from router.tenants import Tenant

MODEL: Final = "paced"
TENANT: Final = "x-tenant"
"""Metadata that names the tenant of a call."""

_PRINT: Final = bytes(32)
_ARENA: Final = bytes(16)
_FORMS: Final = (pb.ENTRY_FORM_CROSS_KV,)
_PATCHES: Final = 1024
_TOKENS: Final = 256


def _replica() -> pb.Replica:
    return pb.Replica(replica_id=secrets.token_bytes(16), arena_id=_ARENA)


class Encoder(encoder_pb2_grpc.EncoderServicer):
    """Every medium is one unit, and so many at a time take `seconds` each."""

    def __init__(self, *, places: int, seconds: float) -> None:
        self.turns = Turns(max_waiting=1024, max_running=places, max_cost=1 << 24)
        self._seconds = seconds
        self.replica = _replica()

    def _load(self) -> pb.Load:
        return load_of(self.turns, 0.0)

    async def Info(self, request: epb.EncoderInfoRequest, context: Any) -> epb.EncoderInfoResponse:
        models = [epb.EncoderModel(name=MODEL, fingerprint=_PRINT, forms=_FORMS)]
        return epb.EncoderInfoResponse(replica=self.replica, models=models, load=self._load())

    async def Encode(
        self, request_iterator: AsyncIterator[epb.EncodeRequest], context: Any
    ) -> AsyncIterator[epb.EncodeResponse]:
        riding = Riding(self._load)
        with self.turns.enter(seconds_left(context)) as turn:
            tenant = b""
            async for request in request_iterator:
                which = request.WhichOneof("message")
                if which == "open":
                    tenant = request.open.fairness_key.encode()
                    probed = epb.EncodeResponse(probed=epb.EncodeProbed(probe=pb.Probe(kind=pb.MEDIA_KIND_IMAGE)))
                    riding.on(probed)
                    yield probed
                elif which == "siblings":
                    turn.weigh(_PATCHES, tenant)
                    units = [pb.Unit(index=0, grid=pb.Grid(t=1, h=32, w=32), tokens=_TOKENS)]
                    yield epb.EncodeResponse(sized=epb.EncodeSized(revision=1, final=True, units=units))
                elif which == "go":
                    await turn.begin()
                    await asyncio.sleep(self._seconds)
                    turn.finish()
                    entry = pb.Entry(form=_FORMS[0], byte_length=1)
                    yield epb.EncodeResponse(ready=epb.EncodeReady(unit=0, entry=entry))
                    end = epb.EncodeResponse(end=epb.EncodeEnd(usage=pb.MediaUsage(units=1)))
                    riding.on(end, last=True)
                    yield end


class Decoder(decoder_pb2_grpc.DecoderServicer):
    """So many answers at a time, of a token every `seconds`.

    Attributes:
        steps: tokens that were drawn.
    """

    def __init__(self, *, seats: int, seconds: float) -> None:
        self.steps = 0
        self.turns = Turns(max_waiting=256, max_running=seats, max_cost=1 << 22)
        self._seconds = seconds
        self.replica = _replica()

    def _load(self) -> pb.Load:
        return load_of(self.turns, 0.0)

    async def Info(self, request: dpb.DecoderInfoRequest, context: Any) -> dpb.DecoderInfoResponse:
        model = dpb.DecoderModel(name=MODEL, fingerprint=_PRINT, family="paced", context_limit=65_536, layers=1)
        model.forms.extend(_FORMS)
        return dpb.DecoderInfoResponse(replica=self.replica, models=[model], load=self._load())

    async def Decode(
        self, request_iterator: AsyncIterator[dpb.DecodeRequest], context: Any
    ) -> AsyncIterator[dpb.DecodeResponse]:
        riding = Riding(self._load)
        with self.turns.enter(seconds_left(context)) as turn:
            opened, lacking, sized = dpb.DecodeOpen(), 0, 0
            async for request in request_iterator:
                which = request.WhichOneof("message")
                if which == "open":
                    opened, lacking = request.open, len(request.open.slots)
                    sized = lacking
                sized -= which == "sized"
                lacking -= which == "ready"
                if opened.request_id and not sized and not turn.running:
                    turn.weigh(opened.sampling.max_tokens + _TOKENS, opened.fairness_key.encode())
                    await turn.begin()
                    admitted = dpb.DecodeResponse(
                        admitted=dpb.DecodeAdmitted(prompt_tokens=1, room=opened.sampling.max_tokens)
                    )
                    riding.on(admitted)
                    yield admitted
                if turn.running and not lacking:
                    break
            units = [pb.UnitRef(slot=slot.slot, unit=0) for slot in opened.slots]
            yield dpb.DecodeResponse(attached=dpb.DecodeAttached(units=units))
            yield dpb.DecodeResponse(started=pb.Started(attempt=opened.attempt))
            for index in range(opened.sampling.max_tokens):
                await asyncio.sleep(self._seconds)
                self.steps += 1
                token = dpb.DecodeResponse(tokens=pb.Tokens(attempt=opened.attempt, index=index, ids=[index]))
                riding.on(token)
                yield token
            turn.finish()
            tokens = opened.sampling.max_tokens
            end = pb.Finished(
                attempt=opened.attempt,
                reason=pb.FINISH_REASON_LENGTH,
                tokens=tokens,
                usage=pb.Usage(output_tokens=tokens),
            )
            finished = dpb.DecodeResponse(finished=end)
            riding.on(finished, last=True)
            yield finished


async def serve_workers(folder: Path, *, decoders: int, seats: int, seconds: float) -> None:
    """One encoder and several decoders on socket files."""
    encoder = Encoder(places=4 * decoders, seconds=seconds / 2)
    servers = [
        Server(f"unix:{folder}/encoder").add(
            "chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, encoder
        )
    ]
    for number in range(decoders):
        decoder = Decoder(seats=seats, seconds=seconds)
        server = Server(f"unix:{folder}/decoder-{number}")
        servers.append(server.add("chiasm.rpc.v1.Decoder", decoder_pb2_grpc.add_DecoderServicer_to_server, decoder))
    for server in servers:
        await server.start()
    await _told_ready()
    for server in servers:
        await server.stop()


async def serve_router(folder: Path, *, decoders: int, limits: AdmissionLimits) -> None:
    """A router before them, for whatever tenant a call names."""
    root = tenant_root(bytes(32), LOCAL)

    def tenant_of(metadata: Mapping[str, str]) -> Tenant:
        return Tenant(metadata.get(TENANT, LOCAL), root)

    fleet = StaticFleet([f"unix:{folder}/encoder"], [f"unix:{folder}/decoder-{number}" for number in range(decoders)])
    servicer = RouterServicer(fleet, tenant_root=root, limits=RouterLimits(admission=limits), tenant_of=tenant_of)
    await fleet.start()
    server = Server(f"unix:{folder}/router", message_bytes=CLIENT_MESSAGE_BYTES)
    server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, servicer)
    await server.start()
    while len([*fleet.workers()]) < decoders + 1:
        await fleet.changed()
    await _told_ready()
    await server.stop()
    await fleet.close()


async def _told_ready() -> None:
    """Says so, and returns when there is nobody to say it to."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("workers", "router"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--decoders", type=int, default=2)
    parser.add_argument("--seats", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--wait", type=float, default=0.5)
    options = parser.parse_args()
    if options.role == "workers":
        asyncio.run(
            serve_workers(options.folder, decoders=options.decoders, seats=options.seats, seconds=options.seconds)
        )
    else:
        limits = AdmissionLimits(wait=options.wait)
        asyncio.run(serve_router(options.folder, decoders=options.decoders, limits=limits))


if __name__ == "__main__":
    main()
