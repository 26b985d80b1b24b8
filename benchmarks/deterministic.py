"""What it costs that a request's logits do not depend on what else is computed.

One process, a random model of about 25 M parameters in the text half, the steps of an engine alone: the next token of
one sequence and of 16 after 500 tokens each, and 512 rows of a prefill, from its first and after 1,536 others. Every
sequence sees a video of its own, 8 frames of 145 tokens. A: the usual mode. B: the deterministic one. The order is
A B B A; medians of each, in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

from benchmarks._alternate import alternate
from benchmarks.follow_up import checkpoint
from chiasm.chat_template import Slot
from chiasm.models.registry import Model
from decoder_service.engine import DecoderEngine, Work
from decoder_service.fixed_rows import FixedRows
from decoder_service.laid import SizedSlot
from decoder_service.sequence import DecodeSequence

FRAMES, GRID = 8, (24, 24)
CONTEXT, ROWS, BEFORE = 500, 512, 1536
PIECE = 256
"""Rows in which what goes before is computed."""


class Side:
    """An engine with one sequence for each thing that is measured."""

    def __init__(self, model: Model, dtype: torch.dtype, *, deterministic: bool) -> None:
        self.engine = DecoderEngine(
            model.decoder(dtype=dtype),
            model.processor,
            text_tokens=16 * 1024 + 4096,
            visual_tokens=18 * FRAMES * 145,
            deterministic=deterministic,
        )
        self._single = [self._computed(CONTEXT, 1) for _ in range(16)]
        self._fresh, self._continued = self._computed(0, ROWS), self._computed(BEFORE, ROWS)
        self.steps: dict[str, Callable[[], object]] = {
            "decode_1": lambda: self._again([(self._single[0], 1)]),
            "decode_16": lambda: self._again([(one, 1) for one in self._single]),
            "prefill": lambda: self._again([(self._fresh, ROWS)]),
            "prefill_continued": lambda: self._again([(self._continued, ROWS)]),
        }

    def _computed(self, before: int, rows: int) -> DecodeSequence:
        """A sequence of a video and text, all rows but the last computed."""
        sequence = self.engine.sequence()
        frames: list[Sequence[int] | int] = [*range(FRAMES)]
        sequence.size(0, SizedSlot(frames, [GRID] * FRAMES, [float(i) for i in range(FRAMES)], final=True))
        sequence.extend([Slot(0)])
        sequence.extend([[1 + i % 400 for i in range(before + rows - len(sequence.timeline))]])
        shape = self.engine.half.entry_shape
        random = torch.Generator().manual_seed(0)
        for unit in sequence.timeline.units:
            payload = torch.randn(shape.of(unit.layout.vision_tokens), generator=random).to(self.engine.half.dtype)
            self.engine.attach(sequence, unit.name, payload)
        for start in range(0, before, PIECE):
            self.engine.step([Work(sequence, min(PIECE, before - start), "none")])
        return sequence

    def _again(self, rows: Sequence[tuple[DecodeSequence, int]]) -> None:
        """The same step once more."""
        self.engine.step([Work(sequence, count, "last") for sequence, count in rows])
        for sequence, count in rows:
            sequence.computed -= count


def measure(model: Model, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    usual, fixed = (Side(model, dtype, deterministic=deterministic) for deterministic in (False, True))
    result: dict[str, object] = {"sizes": [*cast(FixedRows, fixed.engine._forward).sizes]}
    for name, step in usual.steps.items():
        a, b = alternate(step, fixed.steps[name], rounds)
        result[name] = {"ratio": round(b / a, 2), "usual_ms": round(1000 * a, 2), "fixed_ms": round(1000 * b, 2)}
    return result


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks deterministic", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Model(checkpoint(Path(folder)))
        result = {
            str(dtype).removeprefix("torch."): measure(model, dtype, options.rounds)
            for dtype in (torch.float32, torch.bfloat16)
        }
    if not options.json:
        print("fixed against usual, by step")
    print(json.dumps(result))
