"""What the router adds to a stream of tokens: a decoder without a model called directly, and through the router.

The decoder is a process that streams `Tokens` 20 ms apart; the same client code reads them from `Decode` and from
`Generate`, over the same kind of socket. Direct and routed alternate A B B A. `itl_ratio_N` divides the 99th
percentiles of the time between two tokens with N streams at once; `cpu_us_per_token_N` is what the router's process
computes for a token. `unpaced_ratio_N` divides the times of streams that come as fast as they can: there each hop costs
what it costs, and a proxy that only hands on bytes takes 2.5 to 3.4 times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from benchmarks._null_decoder import FINGERPRINT, MODEL
from chiasm.rpc.channel import connect
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc, router_pb2_grpc
from chiasm.rpc.v1 import router_pb2 as rpb

PACE = 20_000
"""Microseconds between two tokens."""

STREAMS = (1, 64)
UNPACED = 2_000
"""Tokens of the stream without a pace."""

Ask = Callable[[int, int], AsyncIterator[Any]]
"""Gives the messages of a stream of so many tokens, so many microseconds apart."""


@contextmanager
def started(*arguments: str, log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m …` while the block runs. It ends with its standard input."""
    with log.open("wb") if log else open(os.devnull, "wb") as errors:
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stderr=errors)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.terminate()
        process.wait(20)


def direct(channel: grpc.aio.Channel) -> Ask:
    stub = decoder_pb2_grpc.DecoderStub(channel)

    def ask(tokens: int, pace: int) -> AsyncIterator[Any]:
        async def requests() -> AsyncIterator[dpb.DecodeRequest]:
            sampling = pb.SamplingParams(max_tokens=tokens)
            opened = dpb.DecodeOpen(model=MODEL, fingerprint=FINGERPRINT, seed=pace, sampling=sampling, attempt=1)
            yield dpb.DecodeRequest(open=opened)
            yield dpb.DecodeRequest(close=dpb.DecodeClose())

        return aiter(stub.Decode(requests()))

    return ask


def routed(channel: grpc.aio.Channel) -> Ask:
    stub = router_pb2_grpc.RouterStub(channel)

    def ask(tokens: int, pace: int) -> AsyncIterator[Any]:
        request = rpb.GenerateRequest(model=MODEL, sampling=pb.SamplingParams(max_tokens=tokens, seed=pace))
        request.prompt.conversation.turns.add(role=pb.ROLE_USER).parts.add(text="what comes next?")
        return aiter(stub.Generate(request))

    return ask


async def arrivals(ask: Ask, tokens: int, pace: int, after: float = 0.0) -> list[float]:
    """When each token of one stream came, in seconds."""
    await asyncio.sleep(after)
    came = []
    async for message in ask(tokens, pace):
        if message.HasField("tokens"):
            came.append(time.perf_counter())
    assert len(came) == tokens, "every token came"
    return came


async def p99(ask: Ask, streams: int, tokens: int) -> float:
    """The 99th percentile of the seconds between two tokens of a stream. Streams begin one after another, as those of
    strangers do."""
    starts = (number * PACE / 1e6 / streams for number in range(streams))
    all_ = await asyncio.gather(*(arrivals(ask, tokens, PACE, start) for start in starts))
    return float(np.percentile(np.concatenate([np.diff(came) for came in all_]), 99))


async def fast(ask: Ask, streams: int) -> float:
    """Seconds a token without a pace."""
    began = time.perf_counter()
    await asyncio.gather(*(arrivals(ask, UNPACED // streams, 0) for _ in range(streams)))
    return (time.perf_counter() - began) / (UNPACED // streams * streams)


def cpu(pid: int) -> float:
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def until_ready(channel: grpc.aio.Channel) -> None:
    stub = router_pb2_grpc.RouterStub(channel)
    while True:
        models = await stub.ListModels(rpb.ListModelsRequest(), wait_for_ready=True, timeout=60)
        if any(model.ready for model in models.models):
            return
        await asyncio.sleep(0.05)


async def measure(rounds: int, seconds: float) -> dict[str, object]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hop-")))
        worker, front, secret = f"unix:{folder}/worker.sock", f"unix:{folder}/router.sock", folder / "tenants.key"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        stack.enter_context(started("benchmarks._null_decoder", worker))
        flags = ["--listen", front, "--encoders", worker, "--decoders", worker, "--tenants-secret-file", str(secret)]
        router = stack.enter_context(started("router", *flags, "--supervised", log=folder / "router.log"))
        async with connect(worker) as near, connect(front) as far:
            await until_ready(far)
            asks = {"direct": direct(near), "routed": routed(far)}
            for ask in asks.values():
                await arrivals(ask, 100, 0)
            result: dict[str, object] = {}
            tokens = max(2, round(seconds * 1e6 / PACE))
            for streams in STREAMS:
                spent = drawn = 0.0

                async def paced(name: str, streams: int = streams) -> float:
                    nonlocal spent, drawn
                    before = cpu(router.pid)
                    value = await p99(asks[name], streams, tokens)
                    if name == "routed":
                        spent, drawn = spent + cpu(router.pid) - before, drawn + streams * tokens
                    return value

                times = await in_turn(paced, rounds)
                result[f"itl_ratio_{streams}"] = round(times["routed"] / times["direct"], 3)
                result[f"p99_ms_{streams}"] = {name: round(1000 * value, 2) for name, value in times.items()}
                result[f"cpu_us_per_token_{streams}"] = round(1e6 * spent / drawn, 1)
            for streams in STREAMS:

                async def unpaced(name: str, streams: int = streams) -> float:
                    return await fast(asks[name], streams)

                times = await in_turn(unpaced, rounds)
                result[f"unpaced_ratio_{streams}"] = round(times["routed"] / times["direct"], 2)
                result[f"unpaced_us_{streams}"] = {name: round(1e6 * value, 1) for name, value in times.items()}
    return result


async def in_turn(once: Callable[[str], Awaitable[float]], rounds: int) -> dict[str, float]:
    """Medians of both sides, taken A B B A."""
    taken: dict[str, list[float]] = {"direct": [], "routed": []}
    for _ in range(rounds):
        for name in ("direct", "routed", "routed", "direct"):
            taken[name].append(await once(name))
    return {name: statistics.median(values) for name, values in taken.items()}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks router_hop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one paced run")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    result = asyncio.run(measure(options.rounds, options.seconds))
    if not options.json:
        computed = result["cpu_us_per_token_64"]
        print(f"p99 at 64 streams: {result['p99_ms_64']}; the router computes {computed} µs for a token")
    print(json.dumps(result))
