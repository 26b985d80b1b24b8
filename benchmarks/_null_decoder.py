"""A worker without a model, for `router_hop`: it says who it is as both roles, and streams `Tokens` at a given pace.

    python -m benchmarks._null_decoder unix:/path/to/socket

A request's `seed` is the time between two tokens in microseconds, 0 for none; `max_tokens` is how many there are.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from chiasm.rpc.server import Server
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc, encoder_pb2_grpc
from chiasm.rpc.v1 import encoder_pb2 as epb

MODEL = "null"
FINGERPRINT = bytes(32)
REPLICA = pb.Replica(replica_id=secrets.token_bytes(16), arena_id=b"here")
FORM = pb.ENTRY_FORM_CROSS_KV


class Encoder(encoder_pb2_grpc.EncoderServicer):
    """Is there, so that the router has a pair; nothing is ever encoded."""

    async def Info(self, request: epb.EncoderInfoRequest, context: Any) -> epb.EncoderInfoResponse:
        model = epb.EncoderModel(name=MODEL, fingerprint=FINGERPRINT, forms=[FORM])
        return epb.EncoderInfoResponse(replica=REPLICA, models=[model])


class Decoder(decoder_pb2_grpc.DecoderServicer):
    """Answers as a decoder does that computes nothing."""

    async def Info(self, request: dpb.DecoderInfoRequest, context: Any) -> dpb.DecoderInfoResponse:
        model = dpb.DecoderModel(name=MODEL, fingerprint=FINGERPRINT, forms=[FORM], context_limit=1 << 30, layers=1)
        return dpb.DecoderInfoResponse(replica=REPLICA, models=[model])

    async def Decode(
        self, request_iterator: AsyncIterator[dpb.DecodeRequest], context: Any
    ) -> AsyncIterator[dpb.DecodeResponse]:
        opened = (await anext(request_iterator)).open
        yield dpb.DecodeResponse(admitted=dpb.DecodeAdmitted(prompt_tokens=8, room=1 << 20, context_limit=1 << 30))
        yield dpb.DecodeResponse(started=pb.Started())
        loop, pace = asyncio.get_running_loop(), opened.seed / 1e6
        due = loop.time()
        for index in range(opened.sampling.max_tokens):
            if pace:
                await asyncio.sleep(due - loop.time())
                due += pace
            tokens = pb.Tokens(attempt=opened.attempt, index=index, ids=[index % 50_000], text=b" token")
            yield dpb.DecodeResponse(tokens=tokens)
        usage = pb.Usage(prompt_tokens=8, output_tokens=opened.sampling.max_tokens)
        finished = pb.Finished(
            reason=pb.FINISH_REASON_LENGTH,
            usage=usage,
            attempt=opened.attempt,
            tokens=opened.sampling.max_tokens,
        )
        yield dpb.DecodeResponse(finished=finished)


async def serve(address: str) -> None:
    server = Server(address)
    server.add("chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, Encoder())
    server.add("chiasm.rpc.v1.Decoder", decoder_pb2_grpc.add_DecoderServicer_to_server, Decoder())
    async with server:
        await server.set_ready(True)
        await asyncio.to_thread(sys.stdin.read)  # until whoever started it closes its standard input


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
