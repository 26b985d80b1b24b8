"""`chiasm serve --ray`, as people type it."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chiasm.models.finding import SHIPPED
from router import ray_plan
from tests.cli.serving import CHIASM, Served
from tests.over_ray.clusters import OBJECT_STORE_BYTES, free_port, read_right
from tests.processes import secret
from tests.waiting import alive, gone

pytestmark = pytest.mark.timeout(200)


@contextmanager
def serving(*words: str) -> Iterator[Served]:
    """`chiasm serve`, ended with the block, ready or not."""
    made = Served(*words)
    try:
        yield made
    finally:
        made.stop()


async def test_serve_starts_a_ray_of_its_own_and_leaves_nothing_behind() -> None:
    with serving("digits", "--ray", "--listen", "127.0.0.1:0") as served:
        served.until("serve", "ready", seconds=120)
        await read_right(served.target)
        workers = [int(said["pid"]) for said in served.of("router", "worker ready")]
        ray = served.pid("ray")
        assert served.stop() == 0
    assert len(workers) == 2
    await gone(*workers, ray)


@pytest.mark.chaos
def test_serve_ends_with_what_the_worker_said_if_none_can_ever_start(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(SHIPPED / "digits", model)
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = subprocess.run(
        [*CHIASM, "serve", str(model), "--ray", "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    what, where, fix = done.stderr.splitlines()[-3:]
    assert what.startswith("error: ") and "safetensors" in what + where, done.stderr
    assert "router · " in where and ("encoder" in where or "decoder" in where), where
    assert "--model" in fix, fix


@contextmanager
def head(folder: Path, port: int, token: str) -> Iterator[None]:
    """`ray start` of a head that asks for a token, on a node that is labelled."""
    environment = {**os.environ, **ray_plan.environment("token"), "RAY_AUTH_TOKEN": token}
    words = ["start", "--head", "--block", "--port", str(port), "--num-cpus", "2", "--labels", "zone=a"]
    words += ["--include-dashboard=false", "--object-store-memory", str(OBJECT_STORE_BYTES), "--temp-dir", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
        end = time.monotonic() + 20
        while left := [pid for pid in _naming(folder) if alive(pid)]:
            assert time.monotonic() < end, f"left over: {left}"
            time.sleep(0.05)


def _naming(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.chaos
async def test_serve_at_an_address_shows_its_token_and_without_it_gets_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, port, token = secret(tmp_path / "workers.key"), free_port(), secrets.token_hex(32)
    words = ["digits", "--ray", f"127.0.0.1:{port}", "--workers-secret-file", str(key), "--listen", "127.0.0.1:0"]
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        head(Path(folder), port, token),
    ):
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        with serving(*words) as served:
            served.until("serve", "ready", seconds=120)
            await read_right(served.target)
            workers = [int(said["pid"]) for said in served.of("router", "worker ready")]
            assert served.stop() == 0
        await gone(*workers)
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with serving(*words) as strange:
            strange.until("router", "controller died", seconds=120)
            assert not strange.of("router", "placed")
