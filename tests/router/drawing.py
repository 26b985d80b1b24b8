"""Routers and decoders over real sockets, where a decoder draws tokens that anybody can work out: each is a digest of
the prompt, the seed, the sequence and its index, so one that is lost, repeated or another's shows. It goes on with what
was emitted, and does wrong what it is told to.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from blake3 import blake3

from chiasm.errors import ServerError, Unavailable
from chiasm.rpc.call import streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc, encoder_pb2_grpc, router_pb2_grpc
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.servicer import RouterLimits, RouterServicer
from router.static_fleet import StaticFleet
from tests.waiting import until

PRINT = bytes(range(32))
TEXT = bytes([7] * 32)
ROOT = bytes([9] * 32)
LENGTH = 6
"""Tokens of sequence 0; each further one is shorter by one."""

Kind = Literal["lost", "broken", "gap", "repeat", "stale", "still", "drains", "not resumable", "other prompt", "short"]


@dataclass(frozen=True)
class Fault:
    """What a decoder does wrong when token `at` of sequence 0 is due; at `LENGTH` before it has finished."""

    kind: Kind
    at: int = 0


def drawn(prompt: pb.Prompt, seed: int, sequence: int, index: int) -> int:
    said = prompt.SerializeToString(deterministic=True) + repr((seed, sequence, index)).encode()
    return int.from_bytes(blake3(said).digest(3), "little")


def truth(request: rpb.GenerateRequest, *, length: int = LENGTH) -> list[list[int]]:
    """The ids of every sequence of a request that says its seed."""
    sampling = request.sampling
    return [
        [drawn(request.prompt, sampling.seed, sequence, index) for index in range(length - sequence)]
        for sequence in range(max(sampling.n, 1))
    ]


def asked(text: str = "Say something.", *, seed: int = 5, n: int = 1) -> rpb.GenerateRequest:
    request = rpb.GenerateRequest(model="m", sampling=pb.SamplingParams(seed=seed, n=n))
    request.prompt.plain.parts.add(text=text)
    return request


class Encoder(encoder_pb2_grpc.EncoderServicer):
    """Says who it is."""

    def __init__(self) -> None:
        self.replica = pb.Replica(replica_id=secrets.token_bytes(16), arena_id=bytes(16))

    async def Info(self, request: epb.EncoderInfoRequest, context: Any) -> epb.EncoderInfoResponse:
        model = epb.EncoderModel(name="m", fingerprint=PRINT, forms=[pb.ENTRY_FORM_CROSS_KV])
        return epb.EncoderInfoResponse(replica=self.replica, models=[model])


class Decoder(decoder_pb2_grpc.DecoderServicer):
    """Draws.

    Args:
        faults: taken one a call, by whichever decoder is called.
        text: of each token.
        pause: seconds between two tokens.

    Attributes:
        opened: how each call began, with what the decoder was told.
        left: calls that were cancelled.
        wakes: lets go who stands still.
    """

    def __init__(
        self,
        faults: deque[Fault] | None = None,
        *,
        text_fingerprint: bytes = TEXT,
        text: bytes = b"",
        length: int = LENGTH,
        pause: float = 0.0,
    ) -> None:
        self.replica = pb.Replica(replica_id=secrets.token_bytes(16), arena_id=bytes(16))
        self.faults = deque[Fault]() if faults is None else faults
        self.text_fingerprint = text_fingerprint
        self.text, self.length, self.pause = text, length, pause
        self.opened: list[dpb.DecodeOpen] = []
        self.draining = False
        self.deaf = False
        self.left = 0
        self.running = 0
        self.told = 0
        self.wakes = asyncio.Event()

    async def Info(self, request: dpb.DecoderInfoRequest, context: Any) -> dpb.DecoderInfoResponse:
        if self.deaf:
            await self.wakes.wait()
        model = dpb.DecoderModel(name="m", fingerprint=PRINT, family="f", context_limit=99, layers=1)
        model.forms.append(pb.ENTRY_FORM_CROSS_KV)
        model.text_fingerprint = self.text_fingerprint
        return dpb.DecoderInfoResponse(replica=self.replica, models=[model], draining=self.draining)

    async def Decode(
        self, requests: AsyncIterator[dpb.DecodeRequest], context: Any
    ) -> AsyncIterator[dpb.DecodeResponse]:
        self.running += 1
        try:
            async for response in self._answer((await anext(requests)).open):
                self.told += response.HasField("tokens")
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise
        finally:
            self.running -= 1

    async def _answer(self, opened: dpb.DecodeOpen) -> AsyncIterator[dpb.DecodeResponse]:
        self.opened.append(opened)
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "drains":
            raise Unavailable("DRAINING", "the worker is ending", retry_after=1.0)
        if fault is not None and fault.kind == "not resumable":
            raise ServerError("NOT_RESUMABLE", "the state cannot be replayed")
        digest = blake3(opened.prompt.SerializeToString(deterministic=True)).digest()
        if fault is not None and fault.kind == "other prompt":
            digest = bytes([1] * 32)
        known = {emitted.sequence: list(emitted.ids) for emitted in opened.emitted}
        n, attempt = max(opened.sampling.n, 1), opened.attempt
        yield dpb.DecodeResponse(admitted=dpb.DecodeAdmitted(prompt_digest=digest))
        yield dpb.DecodeResponse(started=pb.Started(attempt=attempt, prompt_digest=digest, prompt_tokens=3))
        for sequence in range(n):
            ids = known.get(sequence, [])
            assert ids == [drawn(opened.prompt, opened.seed, sequence, i) for i in range(len(ids))], "they are ours"
        ends = 0
        for index in range(self.length + 1):
            for sequence in range(n):
                have, length = len(known.get(sequence, [])), self.length - sequence
                if fault is not None and sequence == 0 and fault.at == index:
                    async for response in self._go_wrong(fault, opened, index):
                        yield response
                        if response.HasField("load"):
                            return
                if have <= index < length:
                    if index == have:
                        yield dpb.DecodeResponse(
                            visible=pb.Visible(sequence=sequence, attempt=attempt, index=index, count=1)
                        )
                    yield self._token(opened, sequence, index)
                    if self.pause:
                        await asyncio.sleep(self.pause)
                elif index == length:
                    ends += 1
                    usage = pb.Usage(output_tokens=sum(self.length - s for s in range(n))) if ends == n else None
                    yield dpb.DecodeResponse(
                        finished=pb.Finished(
                            sequence=sequence, attempt=attempt, reason=pb.FINISH_REASON_STOP, tokens=length, usage=usage
                        )
                    )

    async def _go_wrong(self, fault: Fault, opened: dpb.DecodeOpen, index: int) -> AsyncIterator[dpb.DecodeResponse]:
        if fault.kind == "lost":
            raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")
        if fault.kind == "broken":
            yield dpb.DecodeResponse(load=pb.Load())  # the last thing it says
        if fault.kind == "gap":
            yield self._token(opened, 0, index + 1)
        if fault.kind == "repeat":
            yield self._token(opened, 0, index - 1)
        if fault.kind == "short":
            yield dpb.DecodeResponse(finished=pb.Finished(attempt=opened.attempt, tokens=index + 1, usage=pb.Usage()))
        if fault.kind == "stale":
            stale = self._token(opened, 0, index)
            stale.tokens.attempt -= 1
            stale.tokens.ids[0] = 1
            yield stale
        if fault.kind == "still":
            self.deaf = True
            await self.wakes.wait()

    def _token(self, opened: dpb.DecodeOpen, sequence: int, index: int) -> dpb.DecodeResponse:
        token = drawn(opened.prompt, opened.seed, sequence, index)
        return dpb.DecodeResponse(
            tokens=pb.Tokens(
                sequence=sequence, attempt=opened.attempt, index=index, ids=[token], text=self.text or b"%x " % token
            )
        )


@dataclass
class Heard:
    """What a client was told, and has to send to be told more."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, bytes] = field(default_factory=dict)
    started: list[pb.Started] = field(default_factory=list)
    visible: list[pb.Visible] = field(default_factory=list)
    points: list[rpb.ResumePoint] = field(default_factory=list)
    finished: list[pb.Finished] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)

    def note(self, event: rpb.GenerateResponse) -> None:
        which = event.WhichOneof("event")
        if which == "started":
            self.started.append(event.started)
        elif which == "visible":
            self.visible.append(event.visible)
        elif which == "resume_point":
            self.points.append(event.resume_point)
        elif which == "finished":
            self.finished.append(event.finished)
        elif which == "tokens":
            tokens = event.tokens
            ids = self.ids.setdefault(tokens.sequence, [])
            assert tokens.index == len(ids), "indices come once and in order"
            ids.extend(tokens.ids)
            self.text[tokens.sequence] = self.text.get(tokens.sequence, b"") + tokens.text
            self.attempts.append(tokens.attempt)

    @property
    def tokens(self) -> list[list[int]]:
        return [ids for _, ids in sorted(self.ids.items())]

    def resume(self, request: rpb.GenerateRequest) -> rpb.GenerateRequest:
        """The request that goes on."""
        again = rpb.GenerateRequest()
        again.CopyFrom(request)
        again.resume.resume_token = self.points[-1].resume_token
        for sequence, ids in self.ids.items():
            again.resume.emitted.add(sequence=sequence, ids=ids)
        return again


class Routed:
    """A router's socket.

    Attributes:
        servicer: behind it.
    """

    def __init__(self, servicer: RouterServicer, target: str) -> None:
        self.servicer = servicer
        self.channel = connect(target)
        self.stub = router_pb2_grpc.RouterStub(self.channel)

    async def ask(
        self, request: rpb.GenerateRequest, heard: Heard | None = None, *, tokens: int | None = None
    ) -> Heard:
        """What is told until the end, or until the client has so many tokens of sequence 0 and leaves."""
        heard = heard or Heard()
        events = streamed(self.stub.Generate(request, timeout=30))
        try:
            async for event in events:
                heard.note(event)
                if tokens is not None and len(heard.ids.get(0, [])) >= tokens:
                    break
        finally:
            await events.aclose()
        return heard


@asynccontextmanager
async def serving(
    decoders: Sequence[Decoder], *, roots: Sequence[bytes] = (ROOT,), limits: RouterLimits | None = None
) -> AsyncIterator[list[Routed]]:
    """Routers, one for each tenant's root, over the same workers."""
    async with AsyncExitStack() as stack:
        encoder, *at = [Server() for _ in (None, *decoders)]
        encoder.add("chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, Encoder())
        for server, decoder in zip(at, decoders, strict=True):
            server.add("chiasm.rpc.v1.Decoder", decoder_pb2_grpc.add_DecoderServicer_to_server, decoder)
        for server in (encoder, *at):
            await stack.enter_async_context(server)
        made = []
        for root in roots:
            fleet = StaticFleet([encoder.target], [server.target for server in at], patience=2.0, beat=0.05)
            stack.push_async_callback(fleet.close)
            await fleet.start()
            servicer = RouterServicer(fleet, tenant_root=root, limits=limits)
            front = Server()
            front.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, servicer)
            await stack.enter_async_context(front)
            made.append(Routed(servicer, front.target))
            stack.push_async_callback(made[-1].channel.close)
            await until(lambda fleet=fleet: "m" in fleet.models() and len([*fleet.workers()]) == 1 + len(decoders))  # type: ignore[misc]
        yield made
        for decoder in decoders:
            decoder.wakes.set()
        await until(lambda: not any(decoder.running for decoder in decoders))
