"""Processes that run out of files, and a disk that is full: what runs goes on, what cannot be is refused or waits,
nothing spins, and with the cause its effects are gone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from chiasm import AsyncClient
from chiasm.errors import ChiasmError
from tests.faults.clips import unseen
from tests.faults.injectors import injected
from tests.faults.injectors.disk import FullDisk
from tests.faults.injectors.limits import FewFiles
from tests.mounts import tmpfs
from tests.processes import Trio, trio


def busy(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_router_without_files_takes_no_connection_serves_those_it_has_and_does_not_spin(
    pair: Trio, quiet: AsyncClient
) -> None:
    """M45, router"""
    router = pair.router.pid
    content = unseen()
    truth = await quiet.generate("digits", content, max_tokens=24)
    async with AsyncClient(pair.target) as early, AsyncClient(pair.target, max_retries=0) as late:
        await early.list_models()
        async with injected(FewFiles(router)) as files:
            waiting = [
                asyncio.create_task(late.generate("digits", content, max_tokens=24, timeout=60)) for _ in range(4)
            ]
            answer = await early.generate("digits", content, max_tokens=24, timeout=60)
            assert answer.ids == truth.ids
            assert files.exhausted()
            before = busy(router)
            await asyncio.sleep(2.0)
            assert busy(router) - before < 1.0, "it spins"
            assert pair.router.code is None
        # Who was kept waiting is served, or was told that nobody answered; whoever comes now is served.
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, ChiasmError) or outcome.ids == truth.ids, outcome  # type: ignore[union-attr]
    async with AsyncClient(pair.target) as new:
        assert (await new.generate("digits", content, max_tokens=24, timeout=60)).ids == truth.ids
    assert pair.router.pid == router


@pytest.mark.chaos
async def test_encoders_without_files_cost_answers_at_most_a_refusal_and_recover(
    pair: Trio, quiet: AsyncClient
) -> None:
    """M45, encoders"""
    pids = [encoder.pid for encoder in pair.encoders]
    async with AsyncClient(pair.target, max_retries=0) as client:
        async with injected(FewFiles(pids[0])), injected(FewFiles(pids[1])):
            contents = [unseen() for _ in range(3)]
            outcomes = await asyncio.gather(
                *(client.generate("digits", content, max_tokens=24, timeout=20) for content in contents),
                return_exceptions=True,
            )
        for content, outcome in zip(contents, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, ChiasmError) and outcome.code not in ("UNKNOWN", "INVALID_ARGUMENT"), outcome
            else:
                assert outcome.ids == (await quiet.generate("digits", content, max_tokens=24)).ids
        content = unseen()
        answer = await client.generate("digits", content, max_tokens=24, timeout=60)
        assert answer.ids == (await quiet.generate("digits", content, max_tokens=24)).ids
    assert [encoder.pid for encoder in pair.encoders] == pids
    assert [encoder.code for encoder in pair.encoders] == [None, None]
    await pair.settled()


@pytest.mark.chaos
async def test_with_the_disk_of_logs_and_scratch_files_full_requests_are_answered(
    tmp_path: Path, quiet: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M44"""
    with tmpfs(tmp_path / "disk", "24m") as disk:
        (scratch := disk / "scratch").mkdir()
        monkeypatch.setenv("TMPDIR", str(scratch))
        with trio(disk, arena_bytes=12 << 20) as served:
            target = served.target
            async with AsyncClient(target) as client:
                await client.list_models()
                logged = [len(role.events()) for role in served.roles]
                async with injected(FullDisk(disk)) as full:
                    for _ in range(3):
                        content = unseen()
                        answer = await client.generate("digits", content, max_tokens=24, timeout=60)
                        assert answer.ids == (await quiet.generate("digits", content, max_tokens=24)).ids
                    assert served.router.counted()["chiasm_requests_total:generate:OK"] == 3
                    full.verify()
                await client.generate("digits", unseen(), max_tokens=4, timeout=60)
            await served.settled()
            assert all(role.code is None for role in served.roles)
            assert any(len(role.events()) > before for role, before in zip(served.roles, logged, strict=True)), (
                "it logs again"
            )
