"""`python -m encoder_service` with the shipped model: what it says of itself, serves, measures and survives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.cache.region import Region
from chiasm.errors import Overloaded, Unavailable
from chiasm.rpc.call import answered
from chiasm.rpc.channel import connect
from chiasm.rpc.replica import node_id
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from tests import digits
from tests.rpc.plain import fetch, metrics
from tests.rpc.running import children, started
from tests.rpc.workers import ARENA_BYTES, Encoding, encoder, fingerprint_of, flags, worker
from tests.waiting import alive

SERVICE = "encoder_service"


async def test_it_says_who_it_is_and_what_it_takes(tmp_path: Path) -> None:
    async with worker(SERVICE, tmp_path, "--listen", f"unix:{tmp_path}/s", "--max-waiting", "7") as running:
        ready = await running.logged("ready")
        assert ready["target"] == f"unix:{tmp_path}/s"
        assert running.events == ["starting", "loading", "listening", "ready"]
        loading = [line for line in running.lines if line["event"] == "loading"]
        assert loading[0]["done"] == 0
        assert loading[-1]["done"] == loading[-1]["total"] > 0
        async with connect(ready["target"]) as channel:
            info = await answered(encoder(channel).Info(epb.EncoderInfoRequest()))
            checked = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="readiness")
            )
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        assert fetch(ready["http"], "/readyz").status == fetch(ready["http"], "/healthz").status == 200
        region = Region.open(tmp_path / "arena")
        region.close()
    assert info.replica.arena_id == region.arena_id
    assert len(info.replica.replica_id) == 16
    assert info.replica.node_id == node_id()
    assert (info.replica.device, info.draining) == ("cpu", False)
    (model,) = info.models
    assert (model.name, model.family, model.dtype) == ("digits", "moss_vl", pb.DTYPE_FLOAT32)
    assert (info.limits.max_running, info.limits.max_waiting) == (64, 7)
    assert 0 < info.limits.max_pinned_bytes <= ARENA_BYTES
    assert (info.load.running, info.load.waiting, info.load.pool_usage) == (0, 0, 0)


async def test_it_encodes_counts_refuses_and_comes_to_rest(tmp_path: Path) -> None:
    clip = digits.shipped_clips()[0]
    units = len(clip.digits)
    data = clip.path.read_bytes()
    async with worker(SERVICE, tmp_path, "--max-waiting", "1") as running:
        ready = await running.logged("ready")
        before = metrics(ready["http"])
        assert before["chiasm_encoder_units_total:encoded"] == 0, "counters are there from the start"
        async with connect(ready["target"]) as channel:
            fingerprint = await fingerprint_of(channel)
            first = Encoding(channel, fingerprint, pb.MEDIA_KIND_VIDEO)
            assert len((await first.sized(data)).units) == units
            waiting = metrics(ready["http"])
            assert (waiting["chiasm_num_requests_waiting"], waiting["chiasm_num_requests_running"]) == (1, 0)
            with pytest.raises(Overloaded) as caught:
                await Encoding(channel, fingerprint, pb.MEDIA_KIND_VIDEO).sized(data)
            assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", 1.0)
            announced = await first.finish()
            assert [entry.unit for entry in announced] == list(range(units))
            assert {entry.entry.WhichOneof("place") for entry in announced} == {"arena"}
            second = Encoding(channel, fingerprint, pb.MEDIA_KIND_VIDEO)
            await second.sized(data)
            assert all(entry.cached for entry in await second.finish())
            info = await answered(encoder(channel).Info(epb.EncoderInfoRequest()))
        after = metrics(ready["http"])
    outcomes = [line["outcome"] for line in running.lines if line["event"] == "encode"]
    assert outcomes == ["QUEUE_FULL", "ok", "ok"], "one line for each call"
    told = [line for line in running.lines if line["event"] == "encode"][-1]
    assert (told["units"], told["cached"], told["slot"]) == (units, units, 0)
    assert info.load.pool_usage > 0, "what was announced is pinned until it is attached"
    assert after["chiasm_encoder_units_total:encoded"] == units
    assert after["chiasm_encoder_units_total:cached"] == units
    assert after["chiasm_mm_cache_hits_total"] == units
    assert after["chiasm_mm_cache_queries_total"] == 2 * units
    assert after["chiasm_encoder_cache_entries"] == units + 2, "and what the clip was found to be and has become"
    assert 0 < after["chiasm_encoder_cache_pinned_bytes"] < after["chiasm_encoder_cache_size_bytes"]
    assert after["chiasm_admission_rejections_total:QUEUE_FULL"] == 1
    assert (after["chiasm_num_requests_waiting"], after["chiasm_num_requests_running"]) == (0, 0)


async def test_a_caller_that_is_still_encoding_is_served_to_its_end_while_it_drains(tmp_path: Path) -> None:
    clip = digits.shipped_clips()[0]
    async with worker(SERVICE, tmp_path) as running:
        ready = await running.logged("ready")
        async with connect(ready["target"]) as channel:
            call = Encoding(channel, await fingerprint_of(channel), pb.MEDIA_KIND_VIDEO)
            await call.sized(clip.path.read_bytes())
            running.process.terminate()
            await running.logged("draining")
            assert len(await call.finish()) == len(clip.digits)
        assert await running.ended() == 0
    assert running.events[-1] == "stopped"


async def test_a_killed_encoder_leaves_what_it_announced_and_no_process(tmp_path: Path) -> None:
    image, _ = digits.shipped_images()[0]
    data = image.read_bytes()
    async with worker(SERVICE, tmp_path, "--listen", f"unix:{tmp_path}/s") as first:
        target = (await first.logged("ready"))["target"]
        async with connect(target) as channel:
            fingerprint = await fingerprint_of(channel)
            call = Encoding(channel, fingerprint, pb.MEDIA_KIND_IMAGE)
            await call.sized(data)
            assert not (await call.finish())[0].cached
            media = children(first.pid)
            assert media, "a process opened the medium"
            clip = Encoding(channel, fingerprint, pb.MEDIA_KIND_VIDEO)
            await clip.sized(digits.shipped_clips()[0].path.read_bytes())
            os.kill(first.pid, signal.SIGKILL)
            with pytest.raises(Unavailable):
                await clip.finish()
        assert await first.ended() == -signal.SIGKILL
    async with worker(SERVICE, tmp_path, "--listen", f"unix:{tmp_path}/s") as second:
        async with connect((await second.logged("ready"))["target"]) as channel:
            call = Encoding(channel, await fingerprint_of(channel), pb.MEDIA_KIND_IMAGE)
            await call.sized(data)
            assert (await call.finish())[0].cached, "the region outlived its writer"
        assert not [pid for pid in media if alive(pid)]


@pytest.mark.parametrize(
    ("more", "what", "fix"),
    [
        (["--modle", "x"], "error: --modle is not a setting", "did you mean --model?"),
        (["--model", "nowhere"], "error: is neither a folder nor a checkpoint that comes with the package", "--model"),
        (["--device", "cuda:7"], "error: cuda:7 is not there: torch sees", "--device cpu"),
        (["--device", "abacus"], "error: 'abacus' is no device that torch knows", "--device cpu"),
        (["--arena-bytes", "1TiB"], "error: an arena of 1099511627776 bytes does not fit", "--arena-bytes"),
    ],
)
async def test_what_it_cannot_start_with_is_told_in_three_lines(
    tmp_path: Path, more: list[str], what: str, fix: str
) -> None:
    async with worker(SERVICE, tmp_path, *more) as running:
        assert await running.ended() == 2
    assert len(running.text) == 3, running.text
    assert running.text[0].startswith(what)
    assert fix in running.text[2]
    assert not (tmp_path / "arena").exists() or "--arena-bytes" not in more


async def test_a_secret_that_others_may_read_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    given = flags(tmp_path)
    (tmp_path / "workers").chmod(0o644)
    async with started("-m", SERVICE, *given) as running:
        assert await running.ended() == 2
    assert running.text[0] == "error: a secret has mode 0644: others may use it"
    assert running.events == ["starting"]
    assert "5a" not in "".join(running.text)
