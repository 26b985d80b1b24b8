"""What one more frame costs a timeline that has many: encoded, published, attached.

One process, the shipped model, frames of noise that no store has seen. A: the frame is the first of its timeline. B:
1,024 frames come before it. The order is A B B A; medians of each. What follows, the step that reads all frames, is
told apart (`extend_ms`); it grows with them by its nature.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from chiasm.cache import wire
from chiasm.cache.store import Lease
from chiasm.chat_template import Slot
from chiasm.local import LocalService, LocalSettings
from chiasm.media.types import Rgb
from chiasm.models.family import MediumPlan
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service import convert
from decoder_service.attaching import Attaching
from decoder_service.drawer import Drawer
from decoder_service.engine import Work
from decoder_service.entries import Entries
from decoder_service.options import read_options

BEFORE = 1024
ROOT = bytes(32)
SIDE = 64
"""Pixels of a frame's side: 4 by 4 patches, 5 visual tokens."""


class Spent(NamedTuple):
    """Seconds."""

    append: float
    extend: float


class Growing:
    """A timeline to which frames are appended, as a live one is, with nothing drawn between them."""

    def __init__(self, service: LocalService, rng: np.random.Generator) -> None:
        self._service = service
        self._rng = rng
        self._frames = 0
        model = service.decoder
        self._sequence = model.sequence(ROOT)
        self._sequence.extend([model.prompt.text("What is to be seen?")])
        self._entries = Entries(model, root=ROOT, item_of=lambda slot: None)
        drawer = Drawer(self._sequence, read_options(pb.SamplingParams(), 0, model.vocabulary))
        self._seat = model.seat(self._sequence, drawer, wake=lambda: None, tenant=ROOT, priority=0, stops=frozenset())
        model.enter(self._seat)
        assert self._seat.admitted
        self._units = Attaching(model, self._seat, self._entries)
        grid = (SIDE // 16, SIDE // 16)
        tokens = model.engine.processor.unit_layout(grid).vision_tokens
        self._plan = MediumPlan("image", 1, SIDE, SIDE, grid, tokens, upscaled=False)

    async def append(self, rgb: Rgb) -> None:
        """From pixels to attached."""
        service, slot, lease = self._service, self._frames, Lease.of(60)
        self._frames += 1
        announced = await service.encoder.announce([rgb], self._plan, root=ROOT, lease=lease)
        entry = wire.announce(announced.contract, announced.place)
        entry.lease.lease_id = lease.id
        sized = dpb.DecodeSized(slot=slot, revision=1, final=True)
        unit = sized.units.add(tokens=self._plan.tokens, grid=pb.Grid(t=1, h=self._plan.grid[0], w=self._plan.grid[1]))
        unit.frames.add().frame_offset.FromSeconds(slot)
        self._sequence.extend([Slot(slot)])
        model = service.decoder
        unit_layout = model.engine.processor.unit_layout
        self._sequence.size(slot, convert.sized_slot(sized, pb.MEDIA_KIND_FRAME, model.prompt, unit_layout))
        await service.decoder.keep_within(self._seat, grow=True)
        self._units.announced(self._entries.announce(dpb.DecodeReady(slot=slot, unit=0, entry=entry), self._sequence))
        (told,) = await self._units.attach()
        assert len(told.attached.units) == 1

    async def extend(self) -> None:
        """Computes all rows that are ready."""
        model = self._service.decoder
        rows = self._sequence.ready_rows - self._sequence.computed
        await model.run(model.engine.step, [Work(self._sequence, rows, "last")])

    async def timed(self) -> Spent:
        frame = noise(self._rng)
        began = time.perf_counter()
        await self.append(frame)
        attached = time.perf_counter()
        await self.extend()
        return Spent(attached - began, time.perf_counter() - attached)

    async def close(self) -> None:
        await self._entries.close([])
        await self._service.decoder.release(self._seat)


def noise(rng: np.random.Generator) -> Rgb:
    return rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


async def measure(rounds: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    service = await LocalService.start("digits", LocalSettings())
    spent: dict[bool, list[Spent]] = {False: [], True: []}
    try:
        long = Growing(service, rng)
        for _ in range(BEFORE):
            await long.append(noise(rng))
        await long.extend()
        for _ in range(rounds):
            for after_many in (False, True, True, False):
                timeline = long if after_many else Growing(service, rng)
                spent[after_many].append(await timeline.timed())
                if not after_many:
                    await timeline.close()
        await long.close()
    finally:
        await service.close()
    none, many = ([1000 * statistics.median(part) for part in zip(*spent[which], strict=True)] for which in spent)
    return {
        "ratio": round(many[0] / none[0], 3),
        "first_ms": round(none[0], 3),
        "after_ms": round(many[0], 3),
        "extend_ms": {"first": round(none[1], 3), "after": round(many[1], 3)},
        "before": BEFORE,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks frame_append", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = asyncio.run(measure(options.rounds))
    if not options.json:
        print(f"one frame: first {result['first_ms']} ms, after {BEFORE} {result['after_ms']} ms")
    print(json.dumps(result))
