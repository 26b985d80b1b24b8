"""What a request costs the decoder's memory while it waits to be admitted.

One process serves the shipped model, its pools taken by one holder; this process asks it, over one connection, about
videos of 64 frames of 512x288 pixels, every slot sized. Three decoders, each in a process of its own: of one the keys
of the units are not known (`sized`), of one they are (`known`), of one every entry is announced too (`announced`).
A fourth process has the same server and takes the same messages of `sized`, but only waits: that is the stream's share.

Measured is the resident memory of the serving process, collected and trimmed: what `--requests` more requests add to
some that wait already, by their number. `kib_per_request` is what `sized` takes beyond its stream and its text, which
is the prompt's bytes and four bytes for each of its token ids; what the family writes around the frames is not taken
for text. The peer holds what Hugging Face's processor makes of the same video; that is arithmetic, nothing is run.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import uvloop

from chiasm.cache import wire
from chiasm.cache.memory import MemoryStore
from chiasm.cache.place import InArena
from chiasm.models.entries import contract_of
from chiasm.models.registry import Model, find
from chiasm.rpc.channel import connect
from chiasm.rpc.server import Server
from chiasm.rpc.times import to_duration
from chiasm.rpc.turns import Turns
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc
from decoder_service.engine import DecoderEngine
from decoder_service.model import DecoderModel
from decoder_service.servicer import DecoderServicer
from tests.decoder_service.holders import hold

KINDS = ("stream", "sized", "known", "announced")
GRID = (18, 32)
"""Patches of a frame of 512x288 pixels."""

PIXEL_BYTES = 4 * 4 * 3 * 16 * 16
"""Of Hugging Face's float32 `pixel_values` for a visual token of four patches."""

TEXT_TOKENS = 8192
SETTLED = 0.3
"""Seconds in which a process that has nothing to do any more does nothing."""


class Facts(NamedTuple):
    """What a caller has to know of the model.

    Attributes:
        tokens: keys and values of a frame.
        entry: an announcement without a key, serialised.
    """

    fingerprint: bytes
    tokens: int
    entry: bytes


# -- the process that serves -------------------------------------------------------------------------------------------


class OnlyWaits(decoder_pb2_grpc.DecoderServicer):
    """Takes messages and keeps none of them."""

    def __init__(self) -> None:
        self.waiting = 0

    async def Decode(
        self, request_iterator: AsyncIterator[dpb.DecodeRequest], context: Any
    ) -> AsyncIterator[dpb.DecodeResponse]:
        try:
            async for request in request_iterator:
                self.waiting += request.HasField("sized")
                del request  # it would be kept until the next one comes
        finally:
            self.waiting -= 1
        yield dpb.DecodeResponse()


def resident() -> int:
    """Bytes of this process, without what it could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def settled() -> None:
    """Returns when this process has nothing more to do."""
    busy = -1.0
    while (now := time.process_time()) - busy > SETTLED / 20:
        busy = now
        await asyncio.sleep(SETTLED)


@asynccontextmanager
async def full_decoder(waiting: int, units: int) -> AsyncIterator[DecoderModel]:
    """A decoder all of whose visual room is taken, and how it answers."""
    model = Model(find("digits"))
    half = model.decoder(dtype=torch.float32)
    visual = units * model.processor.unit_layout(GRID).vision_tokens
    engine = DecoderEngine(half, model.processor, text_tokens=TEXT_TOKENS, visual_tokens=visual)
    decoder = DecoderModel(
        engine,
        model.prompt(),
        fingerprint=model.checkpoint.fingerprint,
        text_fingerprint=model.checkpoint.text_fingerprint,
        store=MemoryStore(1),
        workers_secret=bytes(32),
    )
    try:
        holder = await hold(decoder, text=1, visual=visual)
        yield decoder
        await decoder.release(holder)
    finally:
        await decoder.close()


def facts_of(decoder: DecoderModel) -> Facts:
    engine = decoder.engine
    contract = contract_of(
        engine.half.entry_shape,
        engine.processor,
        key=bytes(32),
        identity=decoder.identity_digest,
        dtype=engine.half.dtype,
        grid=GRID,
    )
    entry = wire.announce(contract, InArena(bytes(16), 0, 0)).SerializeToString()
    return Facts(decoder.identity_digest, contract.shape[3], entry)


async def serve(kind: str, address: str, waiting: int, units: int, pipe: Connection) -> None:
    """Answers each number of waiting requests with its memory once there are so many, until it is told None."""
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        decoder = await stack.enter_async_context(full_decoder(waiting, units))
        servicer: decoder_pb2_grpc.DecoderServicer = OnlyWaits()
        if kind != "stream":
            servicer = DecoderServicer(decoder, name="digits", family="moss_vl", turns=Turns(max_waiting=waiting))
        server = Server(address).add("chiasm.rpc.v1.Decoder", decoder_pb2_grpc.add_DecoderServicer_to_server, servicer)
        await stack.enter_async_context(server)
        pipe.send(facts_of(decoder))
        while (count := await asyncio.to_thread(pipe.recv)) is not None:
            here = servicer if isinstance(servicer, OnlyWaits) else decoder
            while here.waiting != count:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
            await settled()
            pipe.send(resident())


def served(kind: str, address: str, waiting: int, units: int, pipe: Connection) -> None:
    uvloop.run(serve(kind, address, waiting, units, pipe))


# -- the process that asks ---------------------------------------------------------------------------------------------


def messages(kind: str, number: int, units: int, facts: Facts) -> Iterator[dpb.DecodeRequest]:
    """All that a caller says before it is admitted."""
    opened = dpb.DecodeOpen(
        request_id=secrets.token_bytes(16),
        attempt=1,
        model="digits",
        fingerprint=facts.fingerprint,
        tenant_root=bytes(32),
        seed=number,
        sample=dpb.SAMPLE_MODE_WHEN_CLOSED,
        slots=[dpb.Slot(slot=0, kind=pb.MEDIA_KIND_VIDEO, item="media[0]")],
    )
    turn = opened.prompt.conversation.turns.add(role=pb.ROLE_USER)
    turn.parts.add(slot=0)
    turn.parts.add(text=text_of(number))
    opened.sampling.max_tokens = 256
    yield dpb.DecodeRequest(open=opened)
    sized = dpb.DecodeSized(slot=0, revision=1, final=True)
    for index in range(units):
        unit = sized.units.add(index=index, grid=pb.Grid(t=1, h=GRID[0], w=GRID[1]), tokens=facts.tokens)
        # No two videos have the same times.
        unit.frames.add(file_index=index, frame_offset=to_duration(index + number / 1000))
        if kind in ("known", "announced"):
            unit.key = secrets.token_bytes(32)
    yield dpb.DecodeRequest(sized=sized)
    if kind == "announced":
        for index, unit in enumerate(sized.units):
            entry = pb.Entry.FromString(facts.entry)
            entry.key = unit.key
            entry.arena.byte_offset, entry.arena.generation = 65536 * (64 * number + index), 64 * number + index + 1
            entry.lease.lease_id = secrets.token_bytes(16)
            yield dpb.DecodeRequest(ready=dpb.DecodeReady(slot=0, unit=index, entry=entry))


def text_of(number: int) -> str:
    """A question of about 100 words."""
    return f"Question {number}:" + 10 * " What is to be seen in this video, and what in its first half?"


@contextmanager
def server_of(kind: str, address: str, waiting: int, units: int) -> Iterator[Connection]:
    """A serving process, and the pipe to it."""
    spawned = multiprocessing.get_context("spawn")
    pipe, theirs = spawned.Pipe()
    process = spawned.Process(target=served, args=(kind, address, waiting, units, theirs))
    process.start()
    theirs.close()
    try:
        yield pipe
    finally:
        pipe.send(None)
        process.join()


async def bytes_per_request(kind: str, requests: int, units: int) -> float:
    """What each of so many requests adds to the memory of the server."""
    before = max(requests // 5, 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        server_of(kind, f"unix:{folder}/decoder", before + requests, units) as pipe,
    ):
        facts: Facts = await asyncio.to_thread(pipe.recv)
        calls: list[Any] = []
        weighed: list[int] = []
        async with connect(f"unix:{folder}/decoder") as channel:
            stub = decoder_pb2_grpc.DecoderStub(channel)
            for count in (before, before + requests):
                while len(calls) < count:
                    calls.append(stub.Decode())
                    for message in messages(kind, len(calls), units, facts):
                        await calls[-1].write(message)
                pipe.send(count)
                weighed.append(await asyncio.to_thread(pipe.recv))
            for call in calls:
                call.cancel()
            pipe.send(0)  # until the last of them has gone
            await asyncio.to_thread(pipe.recv)
    return (weighed[1] - weighed[0]) / requests


def measure(requests: int, units: int) -> dict[str, object]:
    prompt = Model(find("digits")).prompt()
    taken = {kind: asyncio.run(bytes_per_request(kind, requests, units)) / 1024 for kind in KINDS}
    text = text_of(requests)
    text_kib = (len(text.encode()) + 4 * len(prompt.text(text))) / 1024
    beyond = {kind: taken[kind] - taken["stream"] - text_kib for kind in KINDS[1:]}
    pixels = GRID[0] * GRID[1] // 4 * units * PIXEL_BYTES / 1024
    return {
        "kib_per_request": round(beyond["sized"], 2),
        "known_kib_per_request": round(beyond["known"], 2),
        "announced_kib_per_request": round(beyond["announced"], 2),
        "stream_kib": round(taken["stream"], 2),
        "text_kib": round(text_kib, 2),
        "pixel_values_kib": round(pixels),
        "ratio": round(pixels / beyond["sized"]),
        "requests": requests,
        "units": units,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks waiting_memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    result = measure(options.requests, options.units)
    if not options.json:
        print(f"a waiting request takes {result['kib_per_request']} KiB beyond {result['stream_kib']} of its stream")
    print(json.dumps(result))
