"""What a second encoder brings to one video: its units shared out over two processes, against one.

Encoders are processes of one thread each, over one region; a video of 448 x 448 goes to them through the router's own
code (`router.encoding`), without a decoder, every time under another tenant, so that nothing is known. A: one encoder.
B: two (`--fan-out 2`). The order is A B B A; medians. Beside it, in turn with them, the bare machine: one process that
only multiplies matrices of that width and type, against two at once. Two cores that share caches, memory and clock do
not do twice of anything, and no encoders can do better than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from chiasm.cache.region import Region
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.encoding import Encoding
from router.fleet import DecoderCalls, DecoderWorker, EncoderCalls, EncoderWorker, Reach, Served, Worker
from router.media import Inline
from router.remote import RemoteEncoder
from router.spread import Spread
from router.work import Work
from tests import checkpoints_tiny
from tests.processes import Role
from tools.train_digits.held_out import mp4

FRAMES, SIDE = 32, 448
VISION = {
    "hidden_size": 256,
    "depth": 8,
    "intermediate_size": 1024,
    "num_heads": 4,
    "patch_size": 16,
    "out_hidden_size": 256,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [2, 5],
}
TEXT = {"hidden_size": 256}

_MULTIPLY = """
import sys, time, torch
torch.set_num_threads(1)
a, b = torch.randn(784, 256).bfloat16(), torch.randn(256, 1024).bfloat16()
for line in sys.stdin:
    began = time.perf_counter()
    for _ in range(int(line)):
        a @ b
    print(time.perf_counter() - began, flush=True)
"""
_PRODUCTS = 3000


class _Fleet:
    """Encoders by rank, and no decoder."""

    def __init__(self, encoders: Sequence[EncoderWorker]) -> None:
        self._encoders = encoders

    def count_encoders(self, model: Served, decoder: DecoderWorker) -> int:
        return len(self._encoders)

    async def encoder(self, model: Served, decoder: DecoderWorker, *, hint: bytes, rank: int = 0) -> EncoderWorker:
        return self._encoders[rank]

    def lost(self, worker: EncoderWorker | DecoderWorker) -> None:
        raise AssertionError("an encoder was lost")


class _Reading(Work):
    """A request that wants every unit of one medium, and takes it as attached when it is announced."""

    def __init__(self, fleet: _Fleet, model: Served, clip: bytes, spread: Spread, reach: Reach) -> None:
        asked = pb.Media(kind=pb.MEDIA_KIND_VIDEO, data=clip)
        asked.sampling.min_frames = asked.sampling.max_frames = FRAMES
        root = secrets.token_bytes(32)
        super().__init__(
            fleet,  # type: ignore[arg-type]  # it is asked for encoders only
            model,
            [asked],
            [Inline(asked)],
            ["clip"],
            tenant_root=root,
            deadline=None,
            credit=1 << 30,
            spread=spread,
        )
        self.decoder = Worker[DecoderCalls](b"", _nobody(), reach=reach)
        self._done = asyncio.Event()
        self._error: Exception | None = None

    async def run(self) -> float:
        """Seconds until every unit is announced."""
        began = time.perf_counter()
        self.start(self.media[0].run)
        await self._done.wait()
        taken = time.perf_counter() - began
        await self.media[0].accounted.wait()
        await self.end()
        if self._error is not None:
            raise self._error
        assert len(self.media[0].announced) == FRAMES, len(self.media[0].announced)
        return taken

    async def failed(self, error: Exception) -> None:
        self._error = error
        self._done.set()
        self.media[0].accounted.set()

    def on_sized(self, encoding: Encoding) -> None:
        if encoding.sized is not None and encoding.sized.revision == 1:
            encoding.go([])
        self._look(encoding)

    def on_ready(self, encoding: Encoding, ready: epb.EncodeReady) -> None:
        encoding.attached(ready.unit)
        self._look(encoding)

    def _look(self, encoding: Encoding) -> None:
        if encoding.all_announced:
            self._done.set()


def _nobody() -> DecoderCalls:
    class Nobody:
        async def reach(self) -> None: ...

    return Nobody()  # type: ignore[return-value]  # it is never asked


class _Bare:
    """Processes that multiply matrices, one thread each."""

    def __init__(self) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", _MULTIPLY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        self(2)  # they have started

    def __call__(self, count: int) -> float:
        """Seconds for `_PRODUCTS` products in each of `count` processes at once."""
        chosen = self._processes[:count]
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(f"{_PRODUCTS}\n")
            process.stdin.flush()
        return max(float(process.stdout.readline()) for process in chosen if process.stdout is not None)

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait(10)
            process.stdout.close()


@asynccontextmanager
async def _encoders(folder: Path, model: Path) -> AsyncIterator[tuple[list[EncoderWorker], Served]]:
    """Two encoder processes that answer."""
    async with AsyncExitStack() as stack:
        region = Region.create(folder / "arena", 1 << 30)
        stack.callback(region.close)
        secret = folder / "workers.key"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32), encoding="ascii")
        told = ["--model", str(model), "--arena", str(region.path), "--workers-secret-file", str(secret)]
        told += ["--dtype", "bfloat16", "--media-workers", "1"]
        workers = []
        served: Served | None = None
        for number in range(2):
            at = f"unix:{folder}/{number}.sock"
            role = Role("encoder_service", [*told, "--listen", at], folder)
            stack.callback(role.end)
            role.start()
            role.wait_for("ready")
            remote = RemoteEncoder(at)
            stack.push_async_callback(remote.close)
            info = await remote.info(timeout=10)
            reach = Reach(info.replica.arena_id)
            workers.append(Worker[EncoderCalls](info.replica.replica_id, remote, reach=reach))
            served = Served(info.models[0].name, info.models[0].fingerprint, info.models[0].family, 1, 1)
        assert served is not None
        yield workers, served


def _clip() -> bytes:
    """Slow waves, so that decoding costs what decoding of pictures costs and no noise has to be stored."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    frames = []
    for at in range(FRAMES):
        waves = [np.sin(2 * np.pi * (3 * x + c * y + at / 16)) + np.cos(2 * np.pi * (y - at / 9)) for c in (1, 2, 3)]
        frames.append((np.stack(waves, -1) * 60 + 127).astype(np.uint8))
    return mp4(frames, 1.0)


async def measure(rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        model = checkpoints_tiny.write(folder / "model", checkpoints_tiny.config(TEXT, VISION), seed=3)
        clip = await asyncio.to_thread(_clip)
        bare = _Bare()
        taken: dict[int, list[float]] = {1: [], 2: []}
        products: dict[int, list[float]] = {1: [], 2: []}
        try:
            async with _encoders(folder, model) as (workers, served):
                for turn in [0, *range(1, rounds + 1)]:
                    for count in (1, 2, 2, 1):
                        reading = _Reading(_Fleet(workers), served, clip, Spread(encoders=count), workers[0].reach)
                        seconds = await reading.run()
                        multiplied = await asyncio.to_thread(bare, count)
                        if turn:
                            taken[count].append(seconds)
                            products[count].append(multiplied)
        finally:
            bare.close()
    ratio = statistics.median(taken[1]) / statistics.median(taken[2])
    bare_ratio = 2 * statistics.median(products[1]) / statistics.median(products[2])
    return {
        "ratio": round(ratio, 3),
        "ratio_to_bare": round(ratio / bare_ratio, 3),
        "bare_ratio": round(bare_ratio, 3),
        "frames_per_second": round(FRAMES / statistics.median(taken[1]), 2),
        "rounds": rounds,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks encoder_scaling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    result = asyncio.run(measure(options.rounds))
    if not options.json:
        print(f"two encoders make {result['ratio']} of what one makes; bare products {result['bare_ratio']}")
    print(json.dumps(result))
