"""The servicers behind real sockets: the same messages, the same answer, errors with their class, nothing left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from chiasm.errors import InvalidRequest, NotFound
from chiasm.local import LocalService
from chiasm.rpc.channel import connect
from chiasm.rpc.limits import CLIENT_MESSAGE_BYTES
from chiasm.rpc.server import Server
from chiasm.rpc.status import from_rpc_error
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc, encoder_pb2_grpc, router_pb2_grpc
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.fleet import Pair
from router.servicer import RouterServicer
from tests import digits
from tests.asking import Answer, ask, image, note, question, running, video
from tests.e2e.test_requests import picture, settled

T = TypeVar("T")


async def told(call: grpc.aio.StreamStreamCall[Any, T]) -> AsyncIterator[T]:
    """The responses of a call, errors as ours; closing it cancels the call."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    finally:
        call.cancel()


class Encoder:
    """`EncoderCalls` over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = encoder_pb2_grpc.EncoderStub(channel)

    def encode(self, requests: AsyncIterator[epb.EncodeRequest]) -> AsyncIterator[epb.EncodeResponse]:
        return told(self.stub.Encode(requests))


class Decoder:
    """`DecoderCalls` over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = decoder_pb2_grpc.DecoderStub(channel)

    def decode(self, requests: AsyncIterator[dpb.DecodeRequest]) -> AsyncIterator[dpb.DecodeResponse]:
        return told(self.stub.Decode(requests))


class OneModel:
    """`Fleet` of the two workers, described by what they say of themselves."""

    def __init__(self, encoder: Encoder, decoder: Decoder, info: dpb.DecoderInfoResponse) -> None:
        model = info.models[0]
        self._pair = Pair(model.fingerprint, encoder, decoder, model.family, model.context_limit, model.layers)
        self._name = model.name

    def models(self) -> dict[str, Pair]:
        return {self._name: self._pair}

    def choose(self, model: str) -> Pair:
        if model != self._name:
            raise NotFound("MODEL_NOT_FOUND", "there is no such model")
        return self._pair


@asynccontextmanager
async def behind_sockets(service: LocalService) -> AsyncIterator[router_pb2_grpc.RouterAsyncStub]:
    """A router whose workers are the service's own, each on a server of its own; yields a client's stub."""
    pair = service.router.fleet.choose("digits")
    workers = Server("127.0.0.1:0")
    workers.add("chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, pair.encoder.servicer)  # type: ignore[attr-defined]
    workers.add("chiasm.rpc.v1.Decoder", decoder_pb2_grpc.add_DecoderServicer_to_server, pair.decoder.servicer)  # type: ignore[attr-defined]
    await workers.start()
    front = Server("127.0.0.1:0", message_bytes=CLIENT_MESSAGE_BYTES)
    async with connect(workers.target) as channel:
        encoder, decoder = Encoder(channel), Decoder(channel)
        maker = await encoder.stub.Info(epb.EncoderInfoRequest())
        info = await decoder.stub.Info(dpb.DecoderInfoRequest())
        assert maker.models[0].fingerprint == info.models[0].fingerprint, "the halves of one checkpoint fit"
        router = RouterServicer(OneModel(encoder, decoder, info), tenant_root=bytes(32))
        front.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, router)
        await front.start()
        try:
            async with connect(front.target, message_bytes=CLIENT_MESSAGE_BYTES) as client:
                yield router_pb2_grpc.RouterStub(client)
        finally:
            await front.stop(1)
            await workers.stop(1)


async def over(stub: router_pb2_grpc.RouterAsyncStub, request: rpb.GenerateRequest) -> Answer:
    answer = Answer()
    async for event in stub.Generate(request):
        note(answer, event)
    return answer


async def test_the_answer_over_sockets_equals_the_answer_in_one_process() -> None:
    clip = digits.shipped_clips()[1]
    shown = digits.shipped_images()[0][0].read_bytes()
    request = question("Read the digits.", video(clip.path.read_bytes()), image(shown))
    async with running() as service:
        inside = await ask(service, request)
        async with behind_sockets(service) as stub:
            outside = await over(stub, request)
            models = await stub.ListModels(rpb.ListModelsRequest())
            await settled(service)
    assert outside.ids == inside.ids and outside.text == inside.text
    assert outside.encoded == inside.encoded == len(clip.digits) + 1, "another tenant's root, so other keys"
    assert [model.name for model in models.models] == ["digits"]


async def test_a_refusal_crosses_three_hops_with_reason_item_and_numbers() -> None:
    request = question("Look:", image(picture(64, 64)), image(picture(1, 300)))
    async with running() as service, behind_sockets(service) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await over(stub, request)
        await settled(service)
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert (error.reason, error.item) == ("ASPECT_RATIO", "messages[0].content[2]")
    assert error.facts == {"ratio": 300.0, "limit": 200} and not error.retryable


async def test_a_client_that_leaves_frees_every_stage() -> None:
    clip = digits.shipped_clips()[-1]
    async with running() as service, behind_sockets(service) as stub:
        for events in range(4):
            call = stub.Generate(question("Read the digits.", video(clip.path.read_bytes())))
            for _ in range(events):
                await call.read()
            call.cancel()
            await settled(service)


async def test_what_is_not_built_answers_unimplemented() -> None:
    async with running() as service, behind_sockets(service) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Estimate(rpb.EstimateRequest(model="digits"))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
