"""The encoder on a CUDA device: entries as the CPU makes them, from eager passes and from graphs, through copies that
run beside the passes.
"""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np
import pytest
import torch

from chiasm.attention.choose import varlen
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.entry import open_entry, tag_secret
from chiasm.cache.memory import MemoryStore
from chiasm.cache.store import Lease
from chiasm.models.family import Grid
from chiasm.models.moss_vl.vision import MossVLEncoder
from chiasm.models.registry import Model, find
from encoder_service.engine import EncoderEngine
from encoder_service.graphs import GraphTrunk, captured
from tests.encoder_service.test_engine import ROOT, WORKERS, frame, plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CUDA = torch.device("cuda")
CLOSE = 0.05
"""Of the largest number: rounding to bfloat16 in every block, in another order."""


def halves() -> tuple[MossVLEncoder, MossVLEncoder, GraphTrunk]:
    """On the CPU in float32, on the device in bfloat16, and the graphs of the latter."""
    model = Model(find("digits"))
    cpu = cast(MossVLEncoder, model.encoder(dtype=torch.float32))
    cuda = cast(MossVLEncoder, model.encoder(device=CUDA, dtype=torch.bfloat16))
    graphs = captured(cuda, True, 1024)
    assert graphs is not None
    return cpu, cuda, graphs


def assert_close(made: torch.Tensor, expected: torch.Tensor) -> None:
    apart = (made.float().cpu() - expected.float().cpu()).abs().max() / expected.abs().max()
    assert apart.item() <= CLOSE


def test_batches_of_all_grids_from_graphs_and_eager_are_those_of_the_cpu() -> None:
    cpu, cuda, graphs = halves()
    attention = varlen(CUDA, torch.bfloat16, head_dim=cuda.head_dim)
    rng = np.random.default_rng(0)
    replayed = graphs.replayed
    with torch.inference_mode():
        for seed in range(20):
            grids: list[Grid] = [
                (2 * int(rng.integers(1, 9)), 2 * int(rng.integers(1, 9))) for _ in range(rng.integers(1, 9))
            ]
            rows = sum(a * b for a, b in grids)
            x = torch.randn(rows, cpu.patch_values, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1)
            expected = cpu.encode_patches(x, grids, TorchVarlen())
            for trunk in (None, graphs):
                for one, other in zip(cuda.encode_patches(x, grids, attention, trunk), expected, strict=True):
                    assert_close(one, other)
    assert graphs.replayed > replayed


async def test_entries_of_many_passes_come_to_the_host_whole() -> None:
    model = Model(find("digits"))
    _, cuda, graphs = halves()
    engines = [
        EncoderEngine(
            half,
            model.processor,
            fingerprint=model.checkpoint.fingerprint,
            store=MemoryStore(1 << 28),
            workers_secret=WORKERS,
            max_units=5,
            trunk=trunk,
        )
        for half, trunk in ((model.encoder(dtype=torch.float32), None), (cuda, None), (cuda, graphs))
    ]
    kept = []
    for engine in engines:
        sizes = [(64, 64 + 32 * (seed % 3)) for seed in range(60)]
        told = await asyncio.gather(
            *(
                engine.announce([frame(seed, *size)], plan(model, *size), root=ROOT, lease=Lease.of(60))
                for seed, size in enumerate(sizes)
            )
        )
        entries = []
        for announced in told:
            sealed = await engine.store.get(announced.contract.key)
            assert sealed is not None
            opened = open_entry(sealed, announced.contract, tag_secret(WORKERS, ROOT))
            assert isinstance(opened, torch.Tensor)
            entries.append(opened)
        kept.append(entries)
        await engine.close()
    for expected, *others in zip(*kept, strict=True):
        for other in others:
            assert_close(other, expected)
