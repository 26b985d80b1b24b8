"""What is told of processes that hang, that are busy, and that lack something, while requests want them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm import AsyncClient, InvalidRequest
from chiasm.rpc.channel import connect
from router.member_fleet import BEAT
from router.static_fleet import StaticFleet
from tests.faults.poison import HELD, HUNG, INNOCENT, picture
from tests.faults.test_poison import QUESTION, flawed, passes, reads
from tests.processes import Role, trio
from tests.rpc.plain import Answer, fetch
from tests.waiting import until

ENCODER = {"encoder": "tests.faults.poisonous_encoder"}


async def asked(role: Role, path: str) -> Answer:
    return await asyncio.to_thread(fetch, role.wait_for("listening")["http"], path)


async def alive(role: Role) -> bool:
    """What gRPC's health says."""
    async with connect(role.target) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="liveness"), timeout=10
        )
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.timeout(240)
async def test_a_device_that_stands_still_for_longer_than_a_pass_may_take_is_told_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--pass-seconds", "2"]
    with flawed(tmp_path, monkeypatch, ENCODER, encoders=3, encoder=options) as served:
        async with AsyncClient(served.target) as client:
            with pytest.raises(InvalidRequest) as caught:
                await client.generate("digits", [QUESTION, picture(HUNG)], max_tokens=8)
            assert caught.value.reason == "POISON_INPUT"
            hung = [encoder for encoder in served.encoders if encoder.event("no progress")]
            assert len(hung) == 2 and [HUNG] in passes(tmp_path)
            for encoder in hung:
                told = await asked(encoder, "/healthz")
                assert (told.status, told.told["hanging"]) == (503, ["encoder"])
                assert (await asked(encoder, "/readyz")).told["missing"] == ["progress"]
                assert not await alive(encoder)
                assert encoder.counted()["chiasm_seconds_without_progress:encoder"] > 2
            await reads(client, 0)
        for encoder in hung:
            encoder.kill()


@pytest.mark.timeout(240)
async def test_a_long_pass_is_busy_and_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with flawed(tmp_path, monkeypatch, ENCODER) as served:
        hold = (tmp_path / "passes").with_suffix(HELD)
        hold.touch()
        async with AsyncClient(served.target) as client:
            asking = asyncio.create_task(reads(client, 0))
            await until(lambda: served.encoder.counted()["chiasm_seconds_without_progress:encoder"] > 5 * BEAT)
            assert (await asked(served.encoder, "/healthz")).status == 200
            assert (await asked(served.encoder, "/readyz")).status == 200
            hold.unlink()
            await asking
        assert passes(tmp_path) == [[INNOCENT]]


async def test_a_worker_whose_region_is_gone_is_alive_and_not_ready(tmp_path: Path) -> None:
    with trio(tmp_path) as served:
        (arena,) = served.arenas
        aside = arena.with_name("aside")
        arena.rename(aside)
        for role in (served.encoder, served.decoder):
            await asyncio.to_thread(role.wait_for, "not ready")
            assert (await asked(role, "/readyz")).told["missing"] == ["the region"]
            assert (await asked(role, "/healthz")).status == 200
        await asyncio.to_thread(served.router.wait_for, "not ready")
        aside.rename(arena)
        await asyncio.to_thread(served.router.wait_for, "ready again")


# -- a machine that is as busy as it can be ----------------------------------------------------------------------------


def _burn() -> None:
    while True:
        pass


@contextmanager
def burning(count: int) -> Iterator[None]:
    """As many processes that want the processor all the time."""
    processes = [multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) for _ in range(count)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


async def probed(folder: Path, count: int) -> tuple[int, float]:
    """Probes a system that is asked all the time, on a machine that is as busy as it can be; then stops its encoder.

    Returns how many probes called somebody dead who was not, the fleet's own among them, and after how many beats it
    was told that the encoder stood still.
    """
    with trio(folder) as served, burning(2 * (os.cpu_count() or 1)):
        fleet = StaticFleet([served.encoder.target], [served.decoder.target])
        await fleet.start()
        try:
            await until(lambda: len([*fleet.workers()]) == 2)
            workers = [*fleet.workers()]
            false = 0
            async with AsyncClient(served.target) as client:

                async def ask() -> None:
                    while True:
                        await reads(client, 0)

                asking = [asyncio.create_task(ask()) for _ in range(4)]
                for number in range(count):
                    role = served.roles[number % 3]
                    false += (await asked(role, "/healthz")).status != 200
                    false += not await alive(role)
                    false += any(worker.silent.is_set() for worker in workers)
                for task in asking:
                    task.cancel()
                for ended in await asyncio.gather(*asking, return_exceptions=True):
                    assert isinstance(ended, asyncio.CancelledError), ended
            served.encoder.pause()
            began = time.monotonic()
            await asyncio.wait_for(workers[0].silent.wait(), 30)
            return false, (time.monotonic() - began) / BEAT
        finally:
            await fleet.close()


@pytest.mark.timeout(240)
async def test_m71_a_slice_of_the_probes_calls_nobody_dead_and_who_stands_still_is_told(tmp_path: Path) -> None:
    false, beats = await probed(tmp_path, 60)
    assert false == 0
    assert beats < 30, "it is three, on a machine that has time to look at its clock"


if __name__ == "__main__":  # all of them: python -m tests.faults.test_health FOLDER
    import sys

    sys.stdout.write(f"{asyncio.run(probed(Path(sys.argv[1]), 10_000))}\n")
