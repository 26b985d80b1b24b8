"""`python -m router`: light, ready while a pair is, and plain about what it cannot start with."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.processes import Role
from tests.router.test_member_fleet import Decoder, Encoder, serving
from tests.waiting import until


def secret(folder: Path, text: str = "0" * 64, mode: int = 0o600) -> Path:
    path = folder / "tenants.key"
    path.write_text(text, encoding="ascii")
    path.chmod(mode)
    return path


async def test_it_is_ready_while_a_pair_is_and_alive_all_the_time(tmp_path: Path) -> None:
    sockets = [f"unix:{tmp_path}/{name}" for name in "ed"]
    router = Role(
        "router",
        ["--encoders", sockets[0], "--decoders", sockets[1], "--tenants-secret-file", str(secret(tmp_path)),
         "--http", "127.0.0.1:0", "--drain-seconds", "0"],
        tmp_path,
    )  # fmt: skip
    router.start()
    try:
        await asyncio.to_thread(router.wait_for, "listening")
        assert router.event("ready") is None
        async with AsyncExitStack() as workers:
            await workers.enter_async_context(serving(Encoder(), sockets[0]))
            await workers.enter_async_context(serving(Decoder(), sockets[1]))
            await until(lambda: router.event("ready") is not None)
        loaded = await asyncio.to_thread(Path(f"/proc/{router.pid}/maps").read_text)
        assert "grpc" in loaded and "libtorch" not in loaded and "/av/" not in loaded
    finally:
        await asyncio.to_thread(router.end)
    assert router.event("stopped") is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--encoders": "nowhere"}, "HOST:PORT"),
        ({"--encoder": "127.0.0.1:1"}, "did you mean --encoders?"),
        ({"--listen": "0.0.0.0:0"}, "--insecure"),
        ({"--tenants-secret-file": "/no/such/file"}, "secret"),
        ({"--patience": "-1"}, "patience"),
    ],
)
def test_what_it_cannot_start_with_is_told_in_three_lines(tmp_path: Path, change: dict[str, str], said: str) -> None:
    flags = {
        "--encoders": "127.0.0.1:1",
        "--decoders": "127.0.0.1:1",
        "--tenants-secret-file": str(secret(tmp_path)),
        **change,
    }
    arguments = [part for flag in flags.items() for part in flag]
    done = subprocess.run(
        [sys.executable, "-m", "router", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stderr.splitlines()[-3:]
    assert done.returncode == 2, done.stderr
    assert [line.split()[0] for line in lines] == ["error:", "where", "fix"]
    assert said in done.stderr and "Traceback" not in done.stderr
