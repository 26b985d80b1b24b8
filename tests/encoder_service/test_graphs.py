"""Passes that are replayed give what eager ones give, whatever grids a batch is of; what does not fit is eager."""

from __future__ import annotations

import itertools
import logging
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.attention.varlen import FixedVarlen, FlashVarlen
from chiasm.cache.memory import MemoryStore
from chiasm.cache.store import Lease
from chiasm.models.family import Grid
from chiasm.models.moss_vl.vision import MossVLEncoder
from chiasm.models.qwen3_vl.vision import Qwen3VLEncoder
from chiasm.models.registry import Model, find
from chiasm.settings import SettingsError
from encoder_service.engine import EncoderEngine
from encoder_service.graphs import FRAMES, LEAST, Capturable, GraphTrunk, buckets, captured
from tests import checkpoints_qwen3_vl, checkpoints_tiny
from tests.decoder_service.played import Played
from tests.encoder_service.test_engine import ROOT, WORKERS, frame, payload, plan

MOST = 3 * LEAST


def masked(q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, starts: Tensor, longest: int) -> Tensor:
    """`Kernel` by a mask: operations of the same shapes whatever the lengths are, as a graph's."""
    frame = torch.searchsorted(starts, torch.arange(len(q_nhd), dtype=torch.int32), right=True)
    mask = frame.unsqueeze(0) == frame.unsqueeze(1)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_nhd, k_nhd, v_nhd))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out[0].transpose(0, 1)


Half = MossVLEncoder | Qwen3VLEncoder


@pytest.fixture(scope="module", params=[checkpoints_tiny.write, checkpoints_qwen3_vl.write], ids=["moss", "qwen3"])
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Half:
    """In float64, where the sums of another batch differ by nothing that matters."""
    model = Model(request.param(tmp_path_factory.mktemp("tiny")))
    return cast(Half, model.encoder(dtype=torch.float64))


def trunk(half: Half, device: Played | None = None) -> GraphTrunk:
    return GraphTrunk(half, device or Played(), most_patches=MOST, kernel=masked)


def patches(half: Half, grids: list[Grid], seed: int = 0) -> Tensor:
    rows = sum(a * b for a, b in grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, half.config.vision.patch_values, generator=generator, dtype=torch.float64)


def assert_equal(half: Half, replays: GraphTrunk, grids: list[Grid], seed: int = 0) -> None:
    x = patches(half, grids, seed)
    with torch.inference_mode():
        expected = half.encode_patches(x, grids, TorchVarlen())
        made = half.encode_patches(x, grids, TorchVarlen(), replays)
    for one, other in zip(made, expected, strict=True):
        assert ((one - other).abs().max() / other.abs().max()).item() < 1e-12


def test_buckets_leave_a_fifth_to_nobody_at_most() -> None:
    assert buckets(1000) == [256, 320, 384, 448, 512, 640, 768, 896, 1000]
    assert buckets(LEAST) == [LEAST]
    sizes = buckets(1 << 16)
    assert all(size % 4 == 0 for size in sizes)
    assert all((larger - size - 4) / larger <= 0.2 for size, larger in itertools.pairwise(sizes))


def test_batches_of_any_grids_are_replayed_from_a_few_graphs(half: Half) -> None:
    assert isinstance(half, Capturable)
    device = Played()
    replays = trunk(half, device)
    rng = np.random.default_rng(0)
    for seed in range(24):
        grids: list[Grid] = []
        while sum(a * b for a, b in grids) < rng.integers(40, 600):
            grid = (2 * int(rng.integers(1, 6)), 2 * int(rng.integers(1, 6)))
            grids += [grid] * int(rng.integers(1, 4))
        if seed % 4 == 0:
            grids = [grids[0]] * int(rng.integers(1, 8))
        assert_equal(half, replays, grids, seed)
    assert replays.replayed == 24
    assert device.captured <= len(buckets(MOST)), "one for each bucket"


def test_a_batch_that_fills_its_bucket_is_replayed_and_one_that_is_larger_is_not(half: Half) -> None:
    device = Played()
    replays = trunk(half, device)
    assert_equal(half, replays, [(16, 16)] * 3)
    assert replays.replayed == 1
    assert_equal(half, replays, [(16, 16)] * 3 + [(2, 2)])
    assert_equal(half, replays, [(2, 2)] * (FRAMES + 1))
    assert replays.replayed == 1 and device.captured == 1
    assert_equal(half, replays, [(2, 2)] * FRAMES)
    assert replays.replayed == 2


def test_nothing_of_a_batch_is_left_in_the_next(half: Half) -> None:
    replays = trunk(half)
    x = patches(half, [(16, 16)])
    x[:] = torch.nan
    with torch.inference_mode():
        assert replays(x, [(16, 16)], TorchVarlen()).isnan().all()
    assert_equal(half, replays, [(4, 4), (2, 6)])
    with torch.inference_mode():
        first = replays(patches(half, [(4, 4)], 1), [(4, 4)], TorchVarlen())
        before = first.clone()
        replays(patches(half, [(4, 4)], 2), [(4, 4)], TorchVarlen())
    assert torch.equal(first, before), "what one pass gave outlives the next"


def test_copies_are_done_before_the_next_pass_writes_over_them(half: Half) -> None:
    device = Played()
    replays = trunk(half, device)
    for _ in range(2):
        assert_equal(half, replays, [(4, 4)])
    assert device.log == ["wait", "mark", "capture", "replay", "wait", "mark", "replay"]


@pytest.mark.parametrize("captures", [0, 1])
def test_a_capture_that_fails_is_told_once_and_fails_no_pass(
    half: Half, captures: int, caplog: pytest.LogCaptureFixture
) -> None:
    replays = trunk(half, Played(captures))
    batches: list[list[Grid]] = [[(4, 4)], [(16, 20)], [(4, 4)], [(2, 2)]]
    with caplog.at_level(logging.WARNING):
        for grids in batches:
            assert_equal(half, replays, grids)
    (told,) = caplog.records
    assert "not captured" in told.message and told.exc_info is not None
    assert replays.replayed == captures


def test_one_call_attends_inside_frames_of_all_sizes() -> None:
    lengths = [4, 4, 12, 1, 30]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), 3, 8, generator=generator, dtype=torch.float64) for _ in "qkv")
    expected = TorchVarlen().varlen(q, k, v, lengths, causal=False)
    cpu = torch.device("cpu")
    made = FlashVarlen(cpu, masked).varlen(q, k, v, lengths, causal=False)
    torch.testing.assert_close(made, expected)
    fixed = FixedVarlen(64, 8, device=cpu, kernel=masked)
    q64, k64, v64 = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 64 - len(x))) for x in (q, k, v))
    for put in ([64], lengths):
        fixed.put(put)
        made = fixed.varlen(q64, k64, v64, (), causal=False)
    torch.testing.assert_close(made[: len(q)], expected)
    assert made.isfinite().all()


async def test_an_engine_encodes_through_the_graphs_it_is_given() -> None:
    model = Model(find("digits"))
    made = []
    for with_graphs in (False, True):
        own = cast(MossVLEncoder, model.encoder(dtype=torch.float32))
        replays = GraphTrunk(own, Played(), most_patches=MOST, kernel=masked) if with_graphs else None
        engine = EncoderEngine(
            own,
            model.processor,
            fingerprint=model.checkpoint.fingerprint,
            store=MemoryStore(1 << 24),
            workers_secret=WORKERS,
            trunk=replays,
        )
        announced = await engine.announce([frame(1)], plan(model), root=ROOT, lease=Lease.of(1))
        made.append(await payload(engine, announced.contract))
        assert replays is None or replays.replayed == 1
        await engine.close()
    eager, replayed = made
    assert torch.allclose(eager, replayed, rtol=0, atol=1e-5 * float(eager.abs().max()))


def test_all_graphs_are_captured_before_the_first_pass_where_there_can_be_any(half: Half) -> None:
    device = Played()
    replays = trunk(half, device)
    with torch.inference_mode():
        replays.prepare(TorchVarlen())
    assert device.captured == len(buckets(MOST))
    assert_equal(half, replays, [(4, 6)] * 9)
    assert device.captured == len(buckets(MOST))


def test_graphs_that_are_asked_for_where_they_cannot_be_are_refused(half: Half) -> None:
    assert captured(half, None, 4096) is None
    assert captured(half, False, 4096) is None
    with pytest.raises(SettingsError) as caught:
        captured(half, True, 4096)
    assert caught.value.where == "--cuda-graphs"
