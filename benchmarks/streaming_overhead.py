"""How much longer a half takes on a CPU whose blocks are streamed, than one that is resident.

One process, one thread, a random Qwen3-VL of 8 text layers and 8 vision blocks in float32, twice: resident, and with
two blocks of each stack on the device at a time (`--layerwise-offload`). `ratio` is of a decode step of one row behind
256 tokens: it reads every weight once, so it is what streaming slows down most. `prefill_ratio` is of a step of 256
rows, `encode_ratio` of a pass over two units of 512x288 pixels. The order is A B B A, medians.

Before anything is timed both are given the same, and must answer the same bits. `here_mib` is what of the text layers'
file is in this process's memory after a step, of `blocks_mib`. The file is in the system's cache meanwhile: how fast a
disk is does not show here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._alternate import alternate
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.models.registry import Model
from chiasm.models.residence import Residence
from chiasm.models.streaming import LEAST, Streaming
from decoder_service.engine import DecoderEngine, Work
from tests import checkpoints_qwen3_vl
from tests.mapped import mapped_here

CONTEXT = 256
TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [16, 8, 8],
        "mrope_interleaved": True,
    },
}
VISION = {"depth": 8, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "out_hidden_size": 1024}


class Side:
    """Both halves, computed with as they were loaded."""

    def __init__(self, model: Model, streaming: Streaming | None) -> None:
        self._encoder = model.encoder(streaming=streaming)
        half = model.decoder(streaming=streaming)
        self.residence = Residence.of(half)
        self._engine = DecoderEngine(half, model.processor, text_tokens=1 << 14, visual_tokens=64)
        self._sequence = self._engine.sequence()
        self._ids = torch.randint(16, 256, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
        self._units = torch.randint(
            0, 256, (2, 2, 3, 288, 512), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
        )
        self.step(CONTEXT)

    def step(self, rows: int = 1) -> Tensor:
        """(vocabulary,) logits behind so many more tokens."""
        self._sequence.extend([self._ids[:rows]])
        (logits,) = self._engine.step([Work(self._sequence, rows, "last")])
        return logits[-1]

    def prefill(self) -> Tensor:
        """(vocabulary,) logits behind a prompt of its own."""
        sequence = self._engine.sequence()
        sequence.extend([self._ids])
        (logits,) = self._engine.step([Work(sequence, CONTEXT, "last")])
        self._engine.release(sequence)
        return logits[-1]

    @torch.inference_mode()
    def encode(self) -> Tensor:
        """(tokens, width) of both units."""
        return torch.cat(self._encoder.encode_states([*self._units], TorchVarlen()))


def measure(rounds: int, blocks: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(checkpoints_qwen3_vl.write(Path(folder) / "tiny", text=TEXT, vision=VISION))
        resident, streamed = Side(model, None), Side(model, Streaming(resident_blocks=blocks))
        ratios = {}
        for name, repeats in (("step", rounds), ("prefill", max(1, rounds // 10)), ("encode", max(1, rounds // 10))):
            one, other = getattr(resident, name), getattr(streamed, name)
            assert torch.equal(one(), other()), f"{name}: streamed blocks compute something else"
            a, b = alternate(one, other, repeats)
            ratios[name] = {"ratio": round(b / a, 3), "resident_ms": round(1e3 * a, 2), "ms": round(1e3 * b, 2)}
        (layers,) = streamed.residence.streamed
        here = sum(mapped_here(kept) for kept in layers.kept)
    return {
        **ratios["step"],
        "prefill_ratio": ratios["prefill"]["ratio"],
        "encode_ratio": ratios["encode"]["ratio"],
        "here_mib": round(here / 2**20, 1),
        "blocks_mib": round(sum(kept.nbytes for kept in layers.kept) / 2**20, 1),
        "resident_blocks": blocks,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks streaming_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--resident-blocks", type=int, default=LEAST)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = measure(options.rounds, options.resident_blocks)
    if not options.json:
        print(f"a step: {result['ms']} ms streamed, {result['resident_ms']} ms resident")
    print(json.dumps(result))
