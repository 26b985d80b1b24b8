"""Work that nobody waits for any more: whatever the stage and the cause, nothing later begins, what computes ends with
its step, and everything is given back. Rows M51, M52, M55, M56 and M57."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chiasm.errors import ChiasmError, DeadlineExceeded, InvalidRequest
from chiasm.local import LocalService
from chiasm.rpc.call import answered, streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc
from router.uploads import UploadLimits, Uploads
from tests import digits
from tests.asking import Answer, ask, note, question, running, video
from tests.e2e.test_requests import settled
from tests.faults.stages import Stage, Stages, idle
from tests.waiting import until

CLIP = digits.shipped_clips()[-1]
REQUEST = question("Read the digits.", video(CLIP.path.read_bytes()))

STAGES = ("sandbox", "encode", "put", "get", "prefill", "decode")
ORDER = ("sandbox", "encode", "put", "get", "step")


class Front(router_pb2_grpc.RouterServicer):
    """The router of a service, and the task that serves the call that came last."""

    def __init__(self, service: LocalService) -> None:
        self.router = service.router
        self.serving: asyncio.Task[Any] | None = None

    async def Generate(  # type: ignore[override]  # as the router's own
        self, request: rpb.GenerateRequest, context: Any
    ) -> None:
        self.serving = asyncio.current_task()
        await self.router.Generate(request, context)

    async def Upload(self, request_iterator: AsyncIterator[rpb.UploadRequest], context: Any) -> rpb.UploadResponse:
        return await self.router.Upload(request_iterator, context)

    async def has_heard(self) -> None:
        """Waits until the server knows that its caller has left."""
        serving = self.serving
        assert serving is not None
        await until(lambda: serving.done() or serving.cancelling() > 0)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[LocalService, Front, str]]:
    async with running() as service:
        front = Front(service)
        server = Server(f"unix:{folder}/router", message_bytes=16 << 20)
        server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, front)
        async with server:
            yield service, front, server.target


async def read(target: str, request: rpb.GenerateRequest, *, timeout: float | None = None) -> Answer:  # noqa: ASYNC109
    got = Answer()
    async with connect(target, message_bytes=16 << 20) as channel:
        async for event in streamed(router_pb2_grpc.RouterStub(channel).Generate(request, timeout=timeout)):
            note(got, event)
    return got


async def timed(
    service: LocalService, stages: Stages, name: str, begin: Callable[[float], Coroutine[Any, Any, Any]]
) -> tuple[Stage, asyncio.Task[Any]]:
    """A request that is held at a stage before its deadline has passed, however busy the machine is.

    Args:
        begin: asks with a deadline of so many seconds.
    """
    for seconds in (5.0, 15.0, 40.0):
        await service.store.flush()
        service.decoder.flush()
        stage = stages.hold(name)
        asking = asyncio.create_task(begin(seconds))
        await until(lambda: stage.held or asking.done(), seconds=60)  # noqa: B023 - awaited here
        if stage.held:
            return stage, asking
        stage.go_on()
        await asyncio.gather(asking, return_exceptions=True)
        await settled(service)
    raise AssertionError(f"no deadline was long enough to come to {name}")


@pytest.mark.parametrize("cause", ["cancelled", "killed", "deadline"])
@pytest.mark.parametrize("name", STAGES)
async def test_m51_m52_m56_who_leaves_at_any_stage_begins_no_later_one_and_leaves_nothing(
    name: str, cause: str, tmp_path: Path
) -> None:
    async with served(tmp_path) as (service, front, target):
        whole = await ask(service, REQUEST)
        await service.store.flush()
        service.decoder.flush()

        def computed() -> int:
            return sum(service.encoder.counts.batches)

        stages, known = Stages(service), computed()
        if cause == "deadline":
            stage, asking = await timed(service, stages, name, lambda seconds: read(target, REQUEST, timeout=seconds))
        else:
            stage = stages.hold(name)
        try:
            if cause == "killed":
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.faults.leaving_client", target, stdin=asyncio.subprocess.PIPE
                )
                assert process.stdin is not None
                process.stdin.write(REQUEST.SerializeToString())
                process.stdin.close()
                await stage.reached()
                process.kill()
                await process.wait()
            else:
                if cause == "cancelled":
                    asking = asyncio.create_task(read(target, REQUEST))
                    await stage.reached()
                    asking.cancel()
                await asyncio.wait([asking])
                assert asking.cancelled() or isinstance(asking.exception(), DeadlineExceeded)
            await front.has_heard()
            await idle()  # and has told whoever works for it
            before = stages.entered
        finally:
            stage.go_on()
        await until(lambda: service.router.meter.running == 0)
        await settled(service)
        after = stages.entered
        at = ORDER.index("step" if name in ("prefill", "decode") else name)
        kept = computed() - known  # units that a pass had made are put, for whoever comes next
        for later in ORDER[at + 1 :]:
            allowed = kept if (later, name) == ("put", "encode") else 0
            assert after[later] <= before[later] + allowed, f"{later} began for nobody"
        ran = max(before[ORDER[at]] + 1, kept if name == "put" else 0)
        assert after[ORDER[at]] <= ran, "more than the step that ran"
        assert service.router.admission.requests == 0
        assert (await ask(service, REQUEST)).ids == whole.ids


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sandbox", "decode_media"),
        ("encode", "encode"),
        ("put", "encode"),
        ("prefill", "prefill"),
        ("decode", "decode"),
    ],
)
async def test_m56_a_deadline_names_the_stage_at_which_it_passed(name: str, told: str) -> None:
    async with running() as service:
        whole = await ask(service, REQUEST)
        stages = Stages(service)

        async def asked(seconds: float) -> None:
            async for _ in service.generate(REQUEST, timeout=seconds):
                pass

        stage, asking = await timed(service, stages, name, asked)
        (work,) = service.router._answering
        await until(lambda: work._window._over, seconds=60)
        before = stages.entered
        stage.go_on()
        with pytest.raises(DeadlineExceeded) as caught:
            await asking
        assert caught.value.stage == told
        await settled(service)
        after = stages.entered
        assert after["step"] <= before["step"] + (name in ("prefill", "decode"))
        assert (await ask(service, REQUEST)).ids == whole.ids


async def _piece(upload_id: bytes, forever: asyncio.Event, data: bytes) -> AsyncIterator[rpb.UploadRequest]:
    header = pb.MediaHeader(kind=pb.MEDIA_KIND_VIDEO, byte_length=2 * len(data))
    yield rpb.UploadRequest(header=rpb.UploadHeader(upload_id=upload_id, media=header))
    yield rpb.UploadRequest(chunk=pb.MediaChunk(data=data))
    await forever.wait()


@pytest.mark.parametrize("cause", ["cancelled", "deadline"])
async def test_m51_m56_who_leaves_while_its_upload_still_comes_leaves_nothing_but_the_upload(
    cause: str, tmp_path: Path
) -> None:
    async with served(tmp_path) as (service, front, target), connect(target) as channel:
        stages, forever, upload_id = Stages(service), asyncio.Event(), b"u" * 16
        stub = router_pb2_grpc.RouterStub(channel)
        data = CLIP.path.read_bytes()
        sending = asyncio.create_task(answered(stub.Upload(), _piece(upload_id, forever, data[: len(data) // 2])))
        request = question("Read the digits.", pb.Media(kind=pb.MEDIA_KIND_VIDEO, handle=upload_id.hex()))
        asking = asyncio.create_task(read(target, request, timeout=2.0 if cause == "deadline" else None))
        await until(lambda: service.router.meter.running == 2)
        await until(lambda: service.router.uploads.size > 0)
        if cause == "cancelled":
            asking.cancel()
        (outcome,) = await asyncio.gather(asking, return_exceptions=True)
        if isinstance(outcome, DeadlineExceeded):
            assert outcome.stage == "fetch"
        else:
            assert isinstance(outcome, asyncio.CancelledError)
        await front.has_heard()
        await until(lambda: service.router.meter.running == 1)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: service.router.meter.running == 0)
        await settled(service)
        assert service.router.uploads.size == 0 and not any(stages.entered[one] for one in ("encode", "put", "step"))


@pytest.mark.parametrize("end", ["half-closed", "silent"])
async def test_m55_an_upload_that_is_never_finished_ends_and_gives_its_memory_back(end: str, tmp_path: Path) -> None:
    async with served(tmp_path) as (service, _, target), connect(target) as channel:
        service.router.uploads = Uploads(UploadLimits(stall_seconds=0.3))
        forever = asyncio.Event()
        if end == "half-closed":
            forever.set()
        sending = answered(router_pb2_grpc.RouterStub(channel).Upload(), _piece(b"u" * 16, forever, bytes(100_000)))
        with pytest.raises(ChiasmError) as caught:
            await sending
        assert isinstance(caught.value, InvalidRequest | DeadlineExceeded)
        assert service.router.uploads.size == 0 and len(service.router.uploads) == 0


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e-9])
async def test_m57_a_deadline_that_has_passed_is_refused_before_anything_is_done(seconds: float) -> None:
    async with running() as service:
        stages = Stages(service)
        with pytest.raises(DeadlineExceeded) as caught:
            async for _ in service.generate(REQUEST, timeout=seconds):
                pass
        assert caught.value.stage == "queue"
        await settled(service)
        assert not any(stages.entered.values())


async def test_m57_an_absurd_deadline_is_cut_to_what_the_router_allows() -> None:
    async with running() as service:
        ends = service.router._deadline(1e18)
        assert ends <= time.monotonic() + service.router.limits.max_seconds
        got = Answer()
        async for event in service.generate(REQUEST, timeout=1e18):
            note(got, event)
        assert got.text == CLIP.answer
