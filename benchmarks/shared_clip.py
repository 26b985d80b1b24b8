"""How much sooner the first token comes of a clip of which nine frames in ten were seen in another clip.

One process, clips of 40 frames of 448 × 448 as lossless H.264, so that a frame decodes to the same pixels in either
file, a vision transformer of width 256 and depth 8, a decoder of four layers. A: nothing is kept. B: another clip was
asked about before, which has 36 of the frames in common; the clip itself is unknown, so both sides open and decode it.
The order is A B B A; medians of each. `encoded_units` is what B encodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import _seeing
from chiasm.local import LocalService, LocalSettings

FRAMES, NEW = 40, 4

TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "cross_attention_layers": [2],
    "vocab_size": 447,
    "max_position_embeddings": 8192,
    "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
}


async def measure(folder: Path, rounds: int) -> dict[str, object]:
    service = await LocalService.start(str(_seeing.checkpoint(folder, TEXT)), LocalSettings())
    seen, new = _seeing.frames(FRAMES, 0), _seeing.frames(NEW, 1)
    place = FRAMES // NEW
    mixed = [new[i // place] if i % place == 0 else frame for i, frame in enumerate(seen)]
    taken: dict[bool, list[float]] = {False: [], True: []}
    encoded: set[int] = set()
    try:
        first = await _seeing.upload(service, _seeing.lossless(seen), 1)
        clip = await _seeing.upload(service, _seeing.lossless(mixed), 2)
        await _seeing.ask(service, [clip, "What is to be seen?"])
        for _ in range(rounds):
            for shared in (False, True, True, False):
                service.decoder.flush()
                await service.store.flush()
                if shared:
                    await _seeing.ask(service, [first, "What is to be seen?"])
                    service.decoder.flush()
                before = service.encoder.counts.encoded_units
                taken[shared].append((await _seeing.ask(service, [clip, "What is to be seen?"])).seconds)
                if shared:
                    encoded.add(service.encoder.counts.encoded_units - before)
    finally:
        await service.close()
    cold, shared_ = (statistics.median(taken[shared]) for shared in (False, True))
    return {
        "ratio": round(cold / shared_, 3),
        "encoded_units": max(encoded),
        "units": FRAMES,
        "cold_ms": round(1000 * cold, 2),
        "shared_ms": round(1000 * shared_, 2),
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks shared_clip", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), options.rounds))
    if not options.json:
        print(f"first token: unseen {result['cold_ms']} ms, nine in ten frames seen {result['shared_ms']} ms")
    print(json.dumps(result))
