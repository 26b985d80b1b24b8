"""What forms of 8 bits cost and save: quantising and reading back in GB/s, the error of logits, digits that stay right.

Speed: one unit of the 8B model (12 layers, 8 heads of keys and values, 145 tokens, 128 wide) in bfloat16, against a
copy of it, in the order A B B A; gigabytes of the unit as it is computed. Error: the largest difference of any logit to
that of exact keys and values, of the largest magnitude, over text and two frames of noise: on the shipped checkpoint,
and on small random ones. Digits: drawn clips of one to eight frames, asked of the system in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks._alternate import alternate
from chiasm.allocation import keep_freed
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.form import Form
from chiasm.cache.quantised import SCHEMES, dequantise, quantise
from chiasm.chat_template import Slot
from chiasm.local import LocalSettings
from chiasm.models.forms import payloads
from chiasm.models.registry import Model, find
from chiasm.timeline import UnitName
from decoder_service.engine import DecoderEngine, Work
from decoder_service.laid import SizedSlot
from tests import checkpoints_tiny, digits
from tests.asking import question, running, video
from tests.e2e.test_digits import ask_all, drawn, share_right

UNIT = (12, 2, 8, 145, 128)

RANDOM = 8
"""Random checkpoints."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks forms", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clips", type=int, default=60)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed()
    found: dict[str, object] = {}
    for form in SCHEMES:
        found |= {f"{form.label}_{name}": value for name, value in speed(form, options.rounds).items()}
        found[f"{form.label}_logits_digits"] = max(error(Model(find("digits")), form, side=64))
        found[f"{form.label}_logits_random"] = max(max(error(model, form, side=16)) for model in random_models())
    for form in Form:
        found[f"{form.label}_digits_right"] = round(asyncio.run(right(form, options.clips)), 4)
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:32} {value}")


def speed(form: Form, rounds: int) -> dict[str, float]:
    """GB/s of quantising and reading back, and each as a share of the speed of a copy."""
    entry = torch.randn(UNIT, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    payload, copied = quantise(entry, form), torch.empty_like(entry)
    told = {}
    for name, work in (
        ("quantise", lambda: quantise(entry, form)),
        ("dequantise", lambda: dequantise(payload, form, UNIT, torch.bfloat16)),
    ):
        taken, copying = alternate(work, lambda: copied.copy_(entry), rounds)
        told[f"{name}_gb_per_s"] = round(entry.nbytes / taken / 1e9, 2)
        told[f"{name}_to_copy"] = round(copying / taken, 3)
    return told


def random_models() -> Iterator[Model]:
    for seed in range(RANDOM):
        with tempfile.TemporaryDirectory() as folder:
            yield Model(checkpoints_tiny.write(Path(folder) / "tiny", seed=seed))


def error(model: Model, form: Form, *, side: int) -> Iterator[float]:
    """Of the logits over a few pairs of frames, each to the largest of them."""
    encoder, decoder = model.encoder(dtype=torch.float32), model.decoder(dtype=torch.float32)
    patch = model.config.vision.patch_size
    grid = (side // patch, side // patch)
    rng = np.random.default_rng(5)
    for _ in range(8):
        frames = [torch.from_numpy(rng.integers(0, 256, (3, side, side), dtype=np.uint8)) for _ in range(2)]

        def logits(kept: Form, frames: Sequence[Tensor] = frames) -> Tensor:
            with torch.inference_mode():
                entries = payloads(encoder, frames, [kept] * len(frames), TorchVarlen())
            engine = DecoderEngine(decoder, model.processor, text_tokens=256, visual_tokens=512)
            sequence = engine.sequence()
            sequence.extend([[1, 2, 3]])
            for slot, entry in enumerate(entries):
                sequence.size(slot, SizedSlot([0], [grid], [0.0], final=True))
                sequence.extend([Slot(slot), [4, 5]])
                engine.attach(sequence, UnitName(slot, 0), entry, kept)
            return engine.step([Work(sequence, len(sequence.timeline), "all")])[0]

        exact = logits(Form.CROSS_KV)
        yield ((logits(form) - exact).abs().max() / exact.abs().max()).item()


async def right(form: Form, count: int) -> float:
    """The share of digits that are read right, of clips of one to eight frames."""
    rng = np.random.default_rng(20)
    requests, expected = [], []
    for i in range(count):
        frames, shown = drawn(rng, 1 + i % 8)
        requests.append(question("Read the digits.", video(digits.clip(frames))))
        expected.append(shown)
    async with running(settings=LocalSettings(form=form)) as service:
        return share_right(await ask_all(service, requests), expected)
