"""Three processes on a device against one on the CPU: the same ids, question by question, and what a question takes.

The shipped model in float32, in which devices agree to the last token. A: `Client.in_process` on the CPU. B: encoder,
decoder and router as processes, workers on `--device`. Each question is asked of B a second time, when its entries are
in the store. Exits 1 if any ids differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence

from chiasm.cli.interrupts import Interrupts
from chiasm.cli.system import Options, running
from chiasm.client import AsyncClient, Content, Image, Video
from chiasm.models.finding import SHIPPED

MODEL = "digits"
TOKENS = 24


def questions() -> list[Content]:
    held_out = SHIPPED / MODEL / "held_out"
    clips = [Video(path.read_bytes()) for path in sorted(held_out.glob("clip_*.mp4"))]
    images = [Image(path.read_bytes()) for path in sorted(held_out.glob("image_*.png"))[:3]]
    asked: list[Content] = [[clip, "Read the digits."] for clip in clips]
    return [*asked, ["Which digit is at 1.0 seconds?", clips[0]], [*images, "Read the digits."]]


async def measure(device: str) -> dict[str, object]:
    options = Options(
        folder=SHIPPED / MODEL, name=MODEL, listen="127.0.0.1:0", arena_bytes=64 << 20, device=device, dtype="float32"
    )
    different: list[int] = []
    seconds: dict[str, list[float]] = {"cpu": [], "first": [], "again": []}

    async def ask(client: AsyncClient, content: Content, of: str) -> tuple[int, ...]:
        began = time.perf_counter()
        answer = await client.generate(MODEL, content, max_tokens=TOKENS)
        seconds[of].append(time.perf_counter() - began)
        return tuple(answer.ids)

    async with (
        running(options, lambda line: None, Interrupts()) as system,
        AsyncClient(system.target) as three,
        AsyncClient.in_process(MODEL) as one,
    ):
        for number, content in enumerate(questions()):
            expected = await ask(one, content, "cpu")
            if {await ask(three, content, "first"), await ask(three, content, "again")} != {expected}:
                different.append(number)
        ready = system.seconds
    medians = {f"{of}_ms": round(1000 * statistics.median(all_), 1) for of, all_ in seconds.items()}
    return {
        "device": device,
        "questions": len(seconds["cpu"]),
        "different": different,
        **medians,
        "ready_s": round(ready, 2),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks device_ids", description=__doc__)
    parser.add_argument("--device", default="cuda", help="as torch names it")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    result = asyncio.run(measure(options.device))
    if not options.json:
        print(f"{result['questions']} questions, other ids in {len(result['different'])}")  # type: ignore[arg-type]
    print(json.dumps(result))
    if result["different"]:
        sys.exit(1)
