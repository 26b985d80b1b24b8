"""How much sooner the first token comes when frames are encoded while they are uploaded.

One process (what `Client.in_process` talks to), one server for both sides, a random model with a vision transformer of
width 256 and depth 8, 16 JPEG frames of 256x256 in a list, other pixels in every run. Frames are uploaded one by one,
so that the last has come after the time that encoding all of them takes: what a question about frames that are all
there takes, less one whose entries are there too, measured anew in each round. A: the question is asked when the upload
begins. B: when it has ended. Both are timed from the beginning of the upload. The order is A B B A; of each such round
the ratio is taken, and of all rounds the median. Where the machine does something else meanwhile, encoding takes longer
than the upload or not as long; such rounds are left out, and `even` is false where there were no others.

`limit` is what one gains at most where the last frame's encoding and the prefill cannot be hidden: (U + E + P) /
(max(U, E) + E / frames + P).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from chiasm.local import LocalService
from chiasm.models.finding import SHIPPED
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests import checkpoints_tiny

VISION = {"hidden_size": 256, "intermediate_size": 768, "num_heads": 4, "depth": 8, "patch_size": 16}
FRAMES, SIDE = 16, 256


def checkpoint(folder: Path) -> Path:
    """A random model with the tokenizer and the decoder's shape of the shipped one."""
    digits = SHIPPED / "digits"
    shipped = json.loads((digits / "config.json").read_text())
    ids = {name: value for name, value in shipped.items() if name.endswith("_token_id")}
    data = checkpoints_tiny.config(shipped["text_config"], {**shipped["vision_config"], **VISION}, **ids)
    made = checkpoints_tiny.write(folder / "random", data)
    shutil.copy(digits / "tokenizer.json", made)
    return made


def pictures(seed: int) -> list[bytes]:
    """JPEG files of smooth noise."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(FRAMES):
        file = io.BytesIO()
        small = Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8))
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


async def paced(upload_id: bytes, frames: Sequence[bytes], seconds: float) -> AsyncIterator[rpb.UploadRequest]:
    """An upload whose frames come evenly, the last of them after so many seconds."""
    media = pb.MediaHeader(kind=pb.MEDIA_KIND_VIDEO)
    media.frames.frames.extend(pb.FrameHeader() for _ in frames)
    media.frames.fps = 1
    yield rpb.UploadRequest(header=rpb.UploadHeader(upload_id=upload_id, media=media))
    began = time.perf_counter()
    for number, data in enumerate(frames):
        await asyncio.sleep(max(0.0, began + seconds * (number + 1) / len(frames) - time.perf_counter()))
        chunk = pb.MediaChunk(frame=number, data=data, ends_frame=True, last=number == len(frames) - 1)
        yield rpb.UploadRequest(chunk=chunk)


async def first_token(service: LocalService, frames: Sequence[bytes], seconds: float, *, overlapped: bool) -> float:
    """Seconds from the beginning of the upload to the first token."""
    upload_id = secrets.token_bytes(16)
    request = rpb.GenerateRequest(model=service.name)
    turn = request.prompt.conversation.turns.add(role=pb.ROLE_USER)
    turn.parts.add(slot=0)
    turn.parts.add(text="What is to be seen?")
    request.media.add(kind=pb.MEDIA_KIND_VIDEO, handle=upload_id.hex())
    request.sampling.max_tokens = 1
    began, taken = time.perf_counter(), None
    uploading = asyncio.create_task(service.upload(paced(upload_id, frames, seconds)))
    if not overlapped:
        await uploading
    async with aclosing(service.generate(request)) as events:
        async for event in events:
            if event.HasField("tokens"):
                taken = time.perf_counter() - began
    await uploading
    assert taken is not None, "an answer has a token"
    return taken


class Round(NamedTuple):
    """Seconds: to the first token, both ways, medians of two; and those that uploading, and a hit, took.

    Attributes:
        even: encoding took as long as the upload, within 20 %, whenever it could be told.
    """

    overlapped: float
    serial: float
    upload: float
    hit: float
    even: bool


async def a_round(service: LocalService, seeds: Iterator[int]) -> Round:
    frames = pictures(next(seeds))
    cold = await first_token(service, frames, 0.0, overlapped=False)
    service.decoder.flush()
    hit = await first_token(service, frames, 0.0, overlapped=False)
    upload = cold - hit
    taken: dict[bool, list[float]] = {True: [], False: []}
    for overlapped in (True, False, False, True):
        taken[overlapped].append(await first_token(service, pictures(next(seeds)), upload, overlapped=overlapped))
    await service.store.flush()
    even = all(abs(seconds - upload - hit - upload) < 0.2 * upload for seconds in taken[False])
    return Round(statistics.median(taken[True]), statistics.median(taken[False]), upload, hit, even)


async def measure(folder: Path, rounds: int) -> dict[str, object]:
    service = await LocalService.start(str(checkpoint(folder)))
    seeds = itertools.count()
    done: list[Round] = []
    try:
        await first_token(service, pictures(next(seeds)), 0.0, overlapped=False)
        while sum(one.even for one in done) < rounds and len(done) < 2 * rounds:
            done.append(await a_round(service, seeds))
    finally:
        await service.close()
    even = [one for one in done if one.even] or done
    ratios = [one.serial / one.overlapped for one in even]
    overlapped, serial, upload, hit = (statistics.median(column) for column in list(zip(*even, strict=True))[:4])
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_most": round(max(ratios), 3),
        "limit": round((2 * upload + hit) / (upload + upload / FRAMES + hit), 3),
        "overlapped_ms": round(1000 * overlapped, 1),
        "serial_ms": round(1000 * serial, 1),
        "upload_ms": round(1000 * upload, 1),
        "hit_ms": round(1000 * hit, 1),
        "frames": FRAMES,
        "rounds": len(even),
        "even": all(one.even for one in even),
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks overlap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), options.rounds))
    if not options.json:
        print(f"first token: serial {result['serial_ms']} ms, overlapped {result['overlapped_ms']} ms")
    print(json.dumps(result))
