"""`python -m decoder_service` with the shipped model: what it says of itself, answers, measures and survives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from chiasm.errors import InvalidRequest
from chiasm.rpc.call import answered
from chiasm.rpc.channel import connect
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from tests import digits
from tests.rpc.plain import fetch, metrics
from tests.rpc.workers import Encoding, decode, decoder, fingerprint_of, worker

SERVICE = "decoder_service"


async def test_it_says_who_it_is_answers_counts_and_comes_to_rest(tmp_path: Path) -> None:
    async with worker(SERVICE, tmp_path, "--text-tokens", "512", "--visual-tokens", "256") as running:
        ready = await running.logged("ready")
        assert running.events == ["starting", "form", "loading", "listening", "ready"]
        assert fetch(ready["http"], "/readyz").status == 200
        async with connect(ready["target"]) as channel:
            info = await answered(decoder(channel).Info(dpb.DecoderInfoRequest()))
            fingerprint = info.models[0].fingerprint
            _, told = await decode(channel, fingerprint, "Read the digits.", max_tokens=3)
        after = metrics(ready["http"])
        line = await running.logged("decode")
    assert len(info.replica.arena_id) == len(info.replica.replica_id) == 16
    assert (info.replica.device, info.models[0].name, info.models[0].dtype) == ("cpu", "digits", pb.DTYPE_FLOAT32)
    assert (info.limits.self_pool_tokens, info.limits.cross_pool_tokens, info.limits.max_waiting) == (512, 256, 256)
    assert (info.load.running, info.load.waiting, info.load.pool_usage, info.draining) == (0, 0, 0, False)
    finished = next(response.finished for response in told if response.HasField("finished"))
    drawn = sum(len(response.tokens.ids) for response in told)
    assert drawn == finished.usage.output_tokens
    assert (line["outcome"], line["drawn"], line["prompt"]) == ("ok", drawn, finished.usage.prompt_tokens)
    assert after["chiasm_generation_tokens_total"] == drawn
    assert after["chiasm_prompt_tokens_total"] == finished.usage.prompt_tokens > 0
    assert after["chiasm_request_success_total:stop"] + after["chiasm_request_success_total:length"] == 1
    assert after["chiasm_kv_cache_usage_perc:self"] == after["chiasm_kv_cache_usage_perc:cross"] == 0
    assert (after["chiasm_num_requests_waiting"], after["chiasm_num_requests_running"]) == (0, 0)


async def test_the_form_is_measured_by_the_first_decoder_of_a_store_and_taken_over_by_the_next(tmp_path: Path) -> None:
    async with worker(SERVICE, tmp_path) as first:
        told = await first.logged("form")
        assert told["why"] == "measured" and told["form"] in ("cross_kv", "states")
        quicker = "cross_kv" if told["link_gb_per_s"] >= told["break_even_gb_per_s"] else "states"
        assert told["form"] == quicker and told["gflop_per_s"] > 0
        async with worker(SERVICE, tmp_path) as second:
            taken_over = await second.logged("form")
            assert taken_over | {"timestamp": ""} == told | {"why": "agreed", "timestamp": ""}
        async with worker(SERVICE, tmp_path, "--forms", "cross_kv_int8") as third:
            asked = await third.logged("form")
            assert (asked["form"], asked["why"]) == ("cross_kv_int8", "settings")
            async with connect((await third.logged("ready"))["target"]) as channel:
                info = await answered(decoder(channel).Info(dpb.DecoderInfoRequest()))
            assert list(info.models[0].forms) == [pb.ENTRY_FORM_CROSS_KV_INT8, pb.ENTRY_FORM_CROSS_KV]


async def test_it_reads_from_the_arena_what_an_encoder_left_there_that_was_killed(tmp_path: Path) -> None:
    clip = digits.shipped_clips()[0]
    async with worker(SERVICE, tmp_path) as reading, worker("encoder_service", tmp_path) as writing:
        async with connect((await writing.logged("ready"))["target"]) as channel:
            fingerprint = await fingerprint_of(channel)
            call = Encoding(channel, fingerprint, pb.MEDIA_KIND_VIDEO)
            sized = await call.sized(clip.path.read_bytes())
            announced = await call.finish()
        os.kill(writing.pid, signal.SIGKILL)
        await writing.ended()
        http = (await reading.logged("ready"))["http"]
        async with connect((await reading.logged("ready"))["target"]) as channel:
            answer, _ = await decode(
                channel,
                fingerprint,
                "Read the digits.",
                kind=pb.MEDIA_KIND_VIDEO,
                sized=sized,
                ready=announced,
                max_tokens=4 * len(clip.digits),
            )
        assert answer.split() == clip.answer.split()
        assert metrics(http)["chiasm_visual_tokens_total"] == sum(unit.tokens for unit in sized.units)


async def test_a_killed_decoder_breaks_its_calls_and_starts_again_at_the_same_place(tmp_path: Path) -> None:
    listen = ("--listen", f"unix:{tmp_path}/s")
    async with worker(SERVICE, tmp_path, *listen) as first:
        target = (await first.logged("ready"))["target"]
        async with connect(target) as channel:
            fingerprint = (await answered(decoder(channel).Info(dpb.DecoderInfoRequest()))).models[0].fingerprint
            call = decoder(channel).Decode()
            opened = dpb.DecodeOpen(model="digits", fingerprint=fingerprint, tenant_root=bytes(32), seed=0)
            opened.sample = dpb.SAMPLE_MODE_WHEN_CLOSED
            opened.prompt.conversation.turns.add(role=pb.ROLE_USER).parts.add(text="Read the digits.")
            await call.write(dpb.DecodeRequest(open=opened))
            os.kill(first.pid, signal.SIGKILL)
            assert (await call.code()).name == "UNAVAILABLE"
        await first.ended()
    async with worker(SERVICE, tmp_path, *listen) as second:
        await second.logged("ready")
        async with connect(target) as channel:
            await channel.channel_ready()
            _, told = await decode(channel, fingerprint, "Read the digits.", max_tokens=2)
            assert told[-1].HasField("finished")


async def test_pools_that_are_too_small_for_a_question_refuse_it_and_not_the_start(tmp_path: Path) -> None:
    async with worker(SERVICE, tmp_path, "--text-tokens", "16", "--visual-tokens", "16") as running:
        ready = await running.logged("ready")
        async with connect(ready["target"]) as channel:
            fingerprint = (await answered(decoder(channel).Info(dpb.DecoderInfoRequest()))).models[0].fingerprint
            with pytest.raises(InvalidRequest, match="NEVER_FITS"):
                await decode(channel, fingerprint, "Read the digits. " * 4, max_tokens=64)


async def test_an_arena_that_holds_nothing_is_refused_at_the_start(tmp_path: Path) -> None:
    given = ("--arena", str(tmp_path / "none"), "--arena-bytes", "1")
    async with worker(SERVICE, tmp_path, *given) as running:
        assert await running.ended() == 2
    assert len(running.text) == 3
    assert not (tmp_path / "none").exists()
