"""What a decoder measures to choose between keys and values and states, at the size of the 8B model.

The link is read out of a region in shared memory, as workers of a node do: copied out, verified, brought to the device.
The projections have the shapes of that model (12 layers, 8 heads of 128, hidden width 4096). Absolute figures, because
the choice is one between absolute rates: run it on the machine that is to be known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from chiasm.cache.arena import ArenaStore
from chiasm.cache.region import Region
from chiasm.models import shipping
from chiasm.models.family import EntryShape

SHAPE = EntryShape(layers=12, heads=8, dim=128, hidden=4096)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks shipping", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--parent", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    options = parser.parse_args(argv)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    with tempfile.TemporaryDirectory(dir=options.parent) as folder:
        region = Region.create(Path(folder) / "arena", 16 << 20)
        try:
            rates = asyncio.run(shipping.measured(ArenaStore(region), SHAPE, device=device, dtype=dtype))
        finally:
            region.close()
    found = {
        "link_gb_per_s": round(rates.link / 1e9, 3),
        "gflop_per_s": round(rates.flops / 1e9, 1),
        "break_even_gb_per_s": round(shipping.break_even(SHAPE, dtype, rates.flops) / 1e9, 3),
        "form": shipping.choose(SHAPE, dtype, rates).label,
    }
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:20} {value}")
