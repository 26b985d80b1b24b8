"""What a decoder lost in the middle of an answer costs, against the first token of a question about known media.

Real processes: a router, an encoder, two decoders, one region. Each round has a clip of its own, which is encoded
beforehand. First another question about it is asked, and the time to its first token taken. Then a long answer is
drawn, and the decoder that draws it is killed (SIGKILL) behind its 16th token: the time from there to the next token of
the other decoder, which was told the prompt and the tokens so far and takes the units from the region. Both sides find
units and text of earlier rounds in the decoders' pools or not, as it comes. Medians; the ratio is of both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from chiasm.cache.region import Region
from chiasm.models.finding import SHIPPED
from chiasm.rpc.call import streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc
from tests import digits
from tests.asking import question, video
from tests.e2e.test_digits import drawn
from tests.processes import ARENA_BYTES, Role, secret

FRAMES = 8
BEFORE = 16
TOKENS = 64


class Fleet:
    """Two decoders beside what a trio has."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        region = Region.create(folder / "arena", ARENA_BYTES)
        stack.callback(region.close)
        workers, tenants = (secret(folder / name) for name in ("workers.key", "tenants.key"))
        plain = ["--http", "127.0.0.1:0", "--drain-seconds", "1"]
        told = ["--model", str(SHIPPED / "digits"), "--arena", str(region.path), "--workers-secret-file", str(workers)]

        def worker(name: str, role: str) -> tuple[str, Role]:
            at = f"unix:{folder}/{name}.sock"
            return at, Role(f"{role}_service", [*told, *plain, "--listen", at], folder)

        encoder = worker("e", "encoder")
        pair = [worker(f"d{number}", "decoder") for number in range(2)]
        self.decoders = [role for _, role in pair]
        at = ",".join(at for at, _ in pair)
        self.router = Role(
            "router",
            ["--listen", "127.0.0.1:0", *plain, "--encoders", encoder[0], "--decoders", at,
             "--tenants-secret-file", str(tenants)],
            folder,
        )  # fmt: skip
        roles = [encoder[1], *self.decoders, self.router]
        for role in roles:
            stack.callback(role.end)
            role.start()
        for role in roles:
            role.wait_for("ready")

    def kill_the_busy_one(self) -> tuple[float, float]:
        """Kills the decoder that draws, and returns when, and when it was gone; the other goes on."""
        busy = [decoder for decoder in self.decoders if decoder.counted()["chiasm_num_requests_running"]]
        assert len(busy) == 1, "one answer is drawn"
        self._killed = busy[0]
        at = time.perf_counter()
        busy[0].kill()
        return at, time.perf_counter()

    def mend(self) -> None:
        self._killed.start()
        self._killed.wait_for("ready")


async def first_token(stub: router_pb2_grpc.RouterAsyncStub, request: rpb.GenerateRequest) -> float:
    began = time.perf_counter()
    events = streamed(stub.Generate(request, timeout=60))
    first = 0.0
    async for event in events:
        if event.HasField("tokens") and not first:
            first = time.perf_counter() - began
    return first


async def seam(
    stub: router_pb2_grpc.RouterAsyncStub, request: rpb.GenerateRequest, fleet: Fleet
) -> tuple[float, float]:
    """Seconds from the signal to the first token of the other decoder, and how many of them the first one took to be
    gone."""
    killing: asyncio.Task[tuple[float, float]] | None = None
    went_on = 0.0
    async for event in streamed(stub.Generate(request, timeout=60)):
        if not event.HasField("tokens"):
            continue
        if killing is None and event.tokens.index + 1 >= BEFORE:
            killing = asyncio.create_task(asyncio.to_thread(fleet.kill_the_busy_one))
        if event.tokens.attempt == 2 and not went_on:
            went_on = time.perf_counter()
    assert killing is not None and went_on, "the decoder was killed while it drew"
    killed, gone = await killing
    return went_on - killed, gone - killed


async def measure(rounds: int) -> dict[str, float | int]:
    rng = np.random.default_rng(3)
    ttft, seams, dying = [], [], []
    with tempfile.TemporaryDirectory(prefix="chiasm-resume-") as folder, ExitStack() as stack:
        fleet = await asyncio.to_thread(Fleet, Path(folder), stack)
        async with connect(fleet.router.target) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            for number in range(rounds + 1):
                clip = digits.clip(drawn(rng, FRAMES)[0])
                await first_token(stub, question("Read.", video(clip), max_tokens=1))
                asked = question(f"Which digits are these? {number}", video(clip), max_tokens=1)
                warm = await first_token(stub, asked)
                long = question(f"Read the digits. {number}", video(clip), max_tokens=TOKENS)
                long.sampling.ignore_eos = True
                gap, died = await seam(stub, long, fleet)
                await asyncio.to_thread(fleet.mend)
                await asyncio.sleep(1.5)  # until the router knows it again
                if number:  # the first round is slow on both sides
                    ttft.append(warm)
                    seams.append(gap)
                    dying.append(died)
    warm, gap = statistics.median(ttft), statistics.median(seams)
    return {"ratio": round(gap / warm, 3), "seam_ms": round(1e3 * gap, 1), "ttft_ms": round(1e3 * warm, 1),
            "dying_ms": round(1e3 * statistics.median(dying), 1), "rounds": rounds}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks resume", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    asked = parser.parse_args(arguments)
    measured = asyncio.run(measure(asked.rounds))
    if asked.json:
        print(json.dumps(measured))
        return
    print(f"first token of known media {measured['ttft_ms']} ms")
    print(f"a decoder lost on the way  {measured['seam_ms']} ms  ({measured['ratio']} of it; limit 1.5)")


if __name__ == "__main__":
    main()
