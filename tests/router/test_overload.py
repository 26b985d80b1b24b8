"""Refusals on their way: a worker's, of which one other is asked, and the router's own, over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from benchmarks._paced import MODEL, TENANT, Decoder, Encoder
from chiasm.errors import ChiasmError, DeadlineExceeded, Overloaded
from chiasm.rpc.call import answered, streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import decoder_pb2_grpc, encoder_pb2_grpc, router_pb2_grpc
from chiasm.rpc.v1 import router_pb2 as rpb
from router.admission import AdmissionLimits
from router.servicer import RouterLimits, RouterServicer
from router.static_fleet import StaticFleet
from router.tenants import Quota, Tenant
from tests.asking import image, question
from tests.waiting import until


class Counting(Encoder):
    """Counts its calls, and notes for whom they are."""

    calls = 0

    async def Encode(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.calls += 1
        async for response in super().Encode(request_iterator, context):
            yield response


class Answering(Decoder):
    """Counts its calls, and notes by what they share it."""

    def __init__(self, *, seats: int = 8, seconds: float = 0.0) -> None:
        super().__init__(seats=seats, seconds=seconds)
        self.calls = 0
        self.keys: list[str] = []

    async def Decode(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.calls += 1
        async for response in super().Decode(self._noted(request_iterator), context):
            yield response

    async def _noted(self, requests: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request.HasField("open"):
                self.keys.append(request.open.fairness_key)
            yield request


def full(worker: Encoder | Decoder) -> ExitStack:
    """A worker that can let nobody wait, until the stack is closed."""
    stack = ExitStack()
    for _ in range(worker.turns.max_waiting):
        stack.enter_context(worker.turns.enter())
    return stack


class System:
    """Real servers, and a router."""

    def __init__(self, router: RouterServicer, fleet: StaticFleet, stub: router_pb2_grpc.RouterAsyncStub) -> None:
        self.router = router
        self.fleet = fleet
        self.stub = stub

    async def ask(
        self, data: bytes = b"a picture", *, tokens: int = 2, seconds: float = 30.0, tenant: str = "local"
    ) -> int:
        """How many tokens came."""
        request = question("What is it?", image(data), model=MODEL, max_tokens=tokens)
        count = 0
        async for event in streamed(self.stub.Generate(request, timeout=seconds, metadata=((TENANT, tenant),))):
            count += len(event.tokens.ids)
        return count


@asynccontextmanager
async def system(
    folder: Path, encoders: Sequence[Encoder], decoders: Sequence[Decoder], *, limits: RouterLimits | None = None
) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:
        targets: dict[str, list[str]] = {"encoder": [], "decoder": []}
        for number, encoder in enumerate(encoders):
            server = Server(f"unix:{folder}/encoder-{number}")
            server.add("chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, encoder)
            await stack.enter_async_context(server)
            targets["encoder"].append(server.target)
        for number, decoder in enumerate(decoders):
            server = Server(f"unix:{folder}/decoder-{number}")
            server.add("chiasm.rpc.v1.Decoder", decoder_pb2_grpc.add_DecoderServicer_to_server, decoder)
            await stack.enter_async_context(server)
            targets["decoder"].append(server.target)
        fleet = StaticFleet(targets["encoder"], targets["decoder"])
        await fleet.start()
        stack.push_async_callback(fleet.close)
        quotas = {"poor": Quota(requests=1)}

        def tenant_of(metadata: Mapping[str, str]) -> Tenant:
            name = metadata.get(TENANT, "local")
            return Tenant(name, bytes(32), quotas.get(name, Quota()))

        router = RouterServicer(fleet, tenant_root=bytes(32), limits=limits, tenant_of=tenant_of)
        server = Server(f"unix:{folder}/router")
        server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, router)
        await stack.enter_async_context(server)
        channel = await stack.enter_async_context(connect(server.target))
        await until(lambda: len([*fleet.workers()]) == len(encoders) + len(decoders))
        yield System(router, fleet, router_pb2_grpc.RouterStub(channel))


async def test_a_decoder_that_refuses_is_replaced_by_one_other_and_is_no_lost_worker(tmp_path: Path) -> None:
    decoders = [Answering(), Answering()]
    async with system(tmp_path, [Counting(places=8, seconds=0)], decoders) as made:
        with full(decoders[0]):
            for number in range(6):
                assert await made.ask(bytes([number]) * 8) == 2
            assert decoders[0].calls <= 1, "it is not asked again for a while"
            assert len([*made.fleet.workers()]) == 3
            with full(decoders[1]), pytest.raises(Overloaded) as caught:
                await made.ask()
            assert caught.value.reason == "QUEUE_FULL" and caught.value.retry_after == 1.0
            assert decoders[0].calls + decoders[1].calls <= 6 + 1 + 2, "the refusal is passed on"


async def test_an_encoder_that_refuses_is_replaced_by_one_other_and_then_the_refusal_is_passed_on(
    tmp_path: Path,
) -> None:
    encoders = [Counting(places=8, seconds=0) for _ in range(3)]
    async with system(tmp_path, encoders, [Answering()]) as made:
        with full(encoders[0]), full(encoders[1]), full(encoders[2]):
            with pytest.raises(Overloaded) as caught:
                await made.ask()
            assert caught.value.reason == "QUEUE_FULL"
            assert sum(encoder.calls for encoder in encoders) == 2
        with full(encoders[0]):
            for number in range(6):
                assert await made.ask(bytes([number]) * 8) == 2


async def test_equal_media_are_given_to_one_encoder_by_a_router_that_is_busy(tmp_path: Path) -> None:
    encoders = [Counting(places=8, seconds=0.05) for _ in range(3)]
    async with system(tmp_path, encoders, [Answering(seats=64)]) as made:
        await asyncio.gather(*(made.ask(b"the same") for _ in range(16)))
        assert sorted(encoder.calls for encoder in encoders) == [0, 0, 16]


async def test_a_refusal_says_when_to_come_again_in_both_ways_and_costs_the_workers_nothing(tmp_path: Path) -> None:
    encoder, decoder = Counting(places=8, seconds=0), Answering()
    limits = RouterLimits(admission=AdmissionLimits(requests=1))
    async with system(tmp_path, [encoder], [decoder], limits=limits) as made:
        with made.router.admission.admit(made.router.local, 1, seconds=60):
            call = made.stub.Generate(question("?", image(b"x"), model=MODEL))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(call))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(caught.value.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1000"
            with pytest.raises(Overloaded) as told:
                await made.ask()
            assert told.value.retry_after == 1.0 and told.value.request_id
        assert (encoder.calls, decoder.calls) == (0, 0)
        assert await made.ask() == 2


async def test_workers_are_told_for_whom_a_request_is_and_a_quota_is_one_tenants(tmp_path: Path) -> None:
    decoder = Answering(seconds=0.02)
    async with system(tmp_path, [Counting(places=8, seconds=0)], [decoder]) as made:
        asking = [asyncio.create_task(made.ask(tenant="poor", tokens=50)) for _ in range(3)]
        assert await made.ask(tenant="rich") == 2
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        assert [outcome for outcome in outcomes if outcome == 50] == [50]
        refusals = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
        assert [refusal.reason for refusal in refusals] == ["TENANT_QUOTA"] * 2
        assert sorted(decoder.keys) == ["poor", "rich"]
        assert (made.router.admission.requests, len(made.router.admission)) == (0, 0)


async def test_what_workers_say_of_their_load_comes_with_their_answers(tmp_path: Path) -> None:
    decoder = Answering(seconds=0.01)
    async with system(tmp_path, [Counting(places=8, seconds=0)], [decoder]) as made:
        (worker,) = (one for one in made.fleet.workers() if one.replica_id == decoder.replica.replica_id)
        made.fleet._beat = 1e9
        asking = asyncio.create_task(made.ask(tokens=40))
        await until(lambda: worker.load == 1 and worker.cost > 0)
        await asking
        assert worker.load == 0 and worker.cost == 0, "the last message says that it is done"


async def test_a_deadline_that_passes_in_the_line_names_it_and_nothing_is_computed(tmp_path: Path) -> None:
    decoder = Answering(seats=1, seconds=0.01)
    async with system(tmp_path, [Counting(places=8, seconds=0)], [decoder]) as made:
        with decoder.turns.enter() as first:
            await first.begin()
            with pytest.raises(DeadlineExceeded) as caught:
                await made.ask(seconds=0.8)
            assert caught.value.stage == "queue"
            await until(lambda: decoder.turns.waiting == 0)
        assert decoder.steps == 0 and await made.ask() == 2


async def test_cancelled_requests_of_any_number_leave_nothing_counted(tmp_path: Path) -> None:
    decoder = Answering(seats=2, seconds=0.01)
    encoder = Counting(places=2, seconds=0.01)
    async with system(tmp_path, [encoder], [decoder]) as made:
        asking = [asyncio.create_task(made.ask(bytes([number]) * 9, tokens=30)) for number in range(40)]
        await until(lambda: decoder.steps > 10)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: (decoder.turns.running, decoder.turns.waiting, decoder.turns.cost) == (0, 0, 0))
        await until(lambda: (encoder.turns.running, encoder.turns.waiting, encoder.turns.cost) == (0, 0, 0))
        await until(lambda: made.router.admission.requests == 0)
        assert all(not worker.running and not worker.hints for worker in made.fleet.workers())
        steps = decoder.steps
        assert await made.ask(tokens=3) == 3 and decoder.steps == steps + 3


async def test_uploads_are_refused_while_there_is_no_memory_for_them(tmp_path: Path) -> None:
    limits = RouterLimits(admission=AdmissionLimits(memory=1))
    async with system(tmp_path, [Counting(places=8, seconds=0)], [Answering()], limits=limits) as made:
        for call in (made.ask(), _upload(made)):
            with pytest.raises(ChiasmError) as caught:
                await call
            assert caught.value.reason == "MEMORY_FULL" and caught.value.retryable
        assert len(made.router.uploads) == 0


async def _upload(made: System) -> rpb.UploadResponse:
    async def nothing() -> AsyncIterator[rpb.UploadRequest]:
        yield rpb.UploadRequest(header=rpb.UploadHeader(upload_id=bytes(16)))

    return await answered(made.stub.Upload(), nothing())
