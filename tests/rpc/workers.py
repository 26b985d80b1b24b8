"""Encoder and decoder as processes with the shipped model, and one `Encode` or `Decode` spoken to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import grpc.aio

from chiasm.rpc.call import answered, streamed
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc, encoder_pb2_grpc
from chiasm.rpc.v1 import encoder_pb2 as epb
from tests.rpc.running import Running, started

ARENA_BYTES = 16 << 20
ITEM = "messages[0].content[0]"


def flags(folder: Path, *more: str) -> list[str]:
    """What a worker needs, all of it in one folder."""
    secret = folder / "workers"
    if not secret.exists():
        secret.touch(mode=0o600)
        secret.write_text("5a" * 32)
    return [
        *("--model", "digits", "--log-format", "json", "--http", "127.0.0.1:0"),
        *("--arena", str(folder / "arena"), "--arena-bytes", str(ARENA_BYTES)),
        *("--workers-secret-file", str(secret)),
        *more,
    ]


def worker(service: str, folder: Path, *more: str) -> AbstractAsyncContextManager[Running]:
    """`encoder_service` or `decoder_service`, while the block lasts."""
    return started("-m", service, *flags(folder, *more))


def encoder(channel: grpc.aio.Channel) -> encoder_pb2_grpc.EncoderAsyncStub:
    return encoder_pb2_grpc.EncoderStub(channel)


def decoder(channel: grpc.aio.Channel) -> decoder_pb2_grpc.DecoderAsyncStub:
    return decoder_pb2_grpc.DecoderStub(channel)


class Encoding:
    """One `Encode` call about one file, driven step by step."""

    def __init__(self, channel: grpc.aio.Channel, fingerprint: bytes, kind: pb.MediaKind.ValueType) -> None:
        self._requests: asyncio.Queue[epb.EncodeRequest | None] = asyncio.Queue()
        self.responses = streamed(encoder(channel).Encode(timeout=60), self._sent())
        self.send(
            open=epb.EncodeOpen(
                item=ITEM,
                model="digits",
                fingerprint=fingerprint,
                tenant_root=bytes(32),
                media=pb.MediaHeader(kind=kind),
                initial_credit=1 << 30,
            )
        )

    def send(self, **message: Any) -> None:
        self._requests.put_nowait(epb.EncodeRequest(**message))

    async def sized(self, data: bytes) -> epb.EncodeSized:
        """Brings the call to where it waits for go."""
        self.send(chunk=pb.MediaChunk(data=data, last=True))
        probed = (await anext(self.responses)).probed
        self.send(siblings=epb.EncodeSiblings(siblings=[epb.Sibling(slot=0, probe=probed.probe)]))
        return (await anext(self.responses)).sized

    async def finish(self) -> list[epb.EncodeReady]:
        """Goes, takes every unit and ends, so that what was announced stays pinned."""
        self.send(go=epb.EncodeGo())
        ready = []
        async with aclosing(self.responses):
            async for response in self.responses:
                if response.HasField("ready"):
                    ready.append(response.ready)
                if response.HasField("end"):
                    self._requests.put_nowait(None)
        return ready

    async def _sent(self) -> AsyncGenerator[epb.EncodeRequest, None]:
        while (request := await self._requests.get()) is not None:
            yield request


async def fingerprint_of(channel: grpc.aio.Channel) -> bytes:
    """Of the one model that an encoder serves."""
    return (await answered(encoder(channel).Info(epb.EncoderInfoRequest(), timeout=20))).models[0].fingerprint


async def decode(
    channel: grpc.aio.Channel,
    fingerprint: bytes,
    text: str,
    *,
    kind: pb.MediaKind.ValueType = pb.MEDIA_KIND_IMAGE,
    sized: epb.EncodeSized | None = None,
    ready: Sequence[epb.EncodeReady] = (),
    max_tokens: int = 8,
) -> tuple[str, list[dpb.DecodeResponse]]:
    """The answer to one question about at most one medium, and everything that was told."""
    opened = dpb.DecodeOpen(
        model="digits",
        fingerprint=fingerprint,
        tenant_root=bytes(32),
        sample=dpb.SAMPLE_MODE_WHEN_CLOSED,
        seed=0,
        attempt=1,
    )
    opened.sampling.max_tokens = max_tokens
    turn = opened.prompt.conversation.turns.add(role=pb.ROLE_USER)
    turn.parts.add(text=text)
    messages = [dpb.DecodeRequest(open=opened)]
    if sized is not None:
        turn.parts.add(slot=0)
        opened.slots.add(slot=0, kind=kind, item=ITEM)
        told = dpb.DecodeSized(slot=0, revision=sized.revision, final=True, units=sized.units)
        messages[0] = dpb.DecodeRequest(open=opened)
        messages.append(dpb.DecodeRequest(sized=told))
    messages += [dpb.DecodeRequest(ready=dpb.DecodeReady(slot=0, unit=r.unit, entry=r.entry)) for r in ready]
    messages.append(dpb.DecodeRequest(close=dpb.DecodeClose()))

    async def sent() -> AsyncGenerator[dpb.DecodeRequest, None]:
        for message in messages:
            yield message

    answer, told_all = b"", []
    async with aclosing(streamed(decoder(channel).Decode(timeout=60), sent())) as responses:
        async for response in responses:
            told_all.append(response)
            answer += response.tokens.text + response.finished.text
    return answer.decode(), told_all
