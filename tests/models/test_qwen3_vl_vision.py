"""Qwen3-VL's encoder half against that of transformers, over random checkpoints. A unit depends on itself alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3VLForConditionalGeneration

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.form import Form
from chiasm.layers import vit
from chiasm.layers.linear import linear, linear_gelu
from chiasm.media.patches import to_patches
from chiasm.models.qwen3_vl import vision
from chiasm.models.qwen3_vl.vision import Merger, Qwen3VLEncoder
from chiasm.models.registry import Model
from tests.checkpoints_qwen3_vl import write

BOUND = 1e-5
"""Of the largest value."""

SIZES = [(1, 64, 96), (2, 32, 32), (2, 32, 224), (1, 160, 32), (2, 96, 96), (1, 64, 96)]
"""Frames, height and width of units: images or odd last frames, and pairs; grids whose sides are no multiples
of each other or of the table's."""


def drawn(sizes: Sequence[tuple[int, int, int]] = SIZES, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (f, 3, h, w), generator=generator, dtype=torch.uint8) for f, h, w in sizes]


def ours(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3VLEncoder:
    half = Model(folder).encoder(dtype=dtype)
    assert isinstance(half, Qwen3VLEncoder)
    return half


def theirs(folder: Path, units: Sequence[Tensor], *, align_corners: bool = True) -> list[Tensor]:
    """The features of each unit, with the pixels put into patches in another way than ours."""
    tower: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).model.visual
    tower.interpolation_align_corners = align_corners
    grids, rows = [], []
    for unit in units:
        frames = (unit.double() / 255 - 0.5) / 0.5
        pair = torch.stack([frames[0], frames[-1]])
        _, _, height, width = pair.shape
        grids.append((1, height // 16, width // 16))
        for top in range(0, height, 32):
            for left in range(0, width, 32):
                for y in (top, top + 16):
                    for x in (left, left + 16):
                        rows.append(pair[:, :, y : y + 16, x : x + 16].transpose(0, 1).flatten())
    with torch.inference_mode():
        out = tower(torch.stack(rows).float(), grid_thw=torch.tensor(grids))
        features = torch.cat([out.pooler_output, *out.deepstack_features], dim=-1)
    return list(features.split([h * w // 4 for _, h, w in grids]))


def encoded(half: Qwen3VLEncoder, units: Sequence[Tensor]) -> list[Tensor]:
    with torch.inference_mode():
        return half.encode_states(units, TorchVarlen())


def apart(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, as a share of the largest value."""
    assert [one.shape for one in got] == [one.shape for one in expected]
    one, other = torch.cat(list(got)).float(), torch.cat(list(expected)).float()
    return ((one - other).abs().max() / other.abs().max()).item()


# -- against transformers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "shape"),
    [
        (0, {}),
        (1, {"deepstack_visual_indexes": [0, 1, 2]}),
        (2, {"deepstack_visual_indexes": [3, 0, 2]}),
        (3, {"deepstack_visual_indexes": []}),
        (4, {"depth": 1, "deepstack_visual_indexes": [0], "num_position_embeddings": 2304}),
        (5, {"hidden_size": 48, "num_heads": 3, "intermediate_size": 100, "num_position_embeddings": 49}),
    ],
)
def test_features_are_those_of_transformers(tmp_path: Path, seed: int, shape: Mapping[str, object]) -> None:
    folder = write(tmp_path / "tiny", seed=seed, vision=shape)
    units = drawn(seed=seed)
    half = ours(folder)
    got = encoded(half, units)
    assert apart(got, theirs(folder, units)) <= BOUND
    for entry, (_, height, width) in zip(got, SIZES, strict=True):
        assert entry.shape == half.entry_shape.of(height * width // 1024, Form.STATES)


def test_positions_are_interpolated_by_the_rule_the_checkpoint_names(tmp_path: Path) -> None:
    units = drawn()
    folder = write(tmp_path / "tiny", vision={"align_corners": False})
    got = encoded(ours(folder), units)
    assert apart(got, theirs(folder, units, align_corners=False)) <= BOUND
    assert apart(got, theirs(folder, units)) > 100 * BOUND


def test_half_precision_is_as_near_as_it_can_be(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny")
    units = drawn()
    assert apart(encoded(ours(folder, torch.bfloat16), units), theirs(folder, units)) < 0.05


# -- a unit by itself --------------------------------------------------------------------------------------------------


@pytest.fixture
def half(tmp_path: Path) -> Qwen3VLEncoder:
    return ours(write(tmp_path / "tiny"))


def test_a_unit_alone_is_the_unit_among_others(half: Qwen3VLEncoder) -> None:
    units = drawn()
    together = encoded(half, units)
    alone = [encoded(half, [unit])[0] for unit in units]
    assert apart(together, alone) <= 2e-6
    backwards = encoded(half, units[::-1])[::-1]
    assert apart(backwards, alone) <= 2e-6


def test_a_frame_that_is_alone_stands_for_both(half: Qwen3VLEncoder) -> None:
    (image,) = drawn([(1, 64, 96)])
    one, two = (encoded(half, [unit])[0] for unit in (image, torch.cat([image, image])))
    assert torch.equal(one, two)


def test_the_order_of_a_units_frames_matters(half: Qwen3VLEncoder) -> None:
    (pair,) = drawn([(2, 64, 96)])
    forth, back = (encoded(half, [unit]) for unit in (pair, pair.flip(0)))
    assert apart(forth, back) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_pixels_make_finite_features(tmp_path: Path, dtype: torch.dtype) -> None:
    half = ours(write(tmp_path / "tiny"), dtype)
    flat = [torch.full((frames, 3, 64, 96), value, dtype=torch.uint8) for frames in (1, 2) for value in (0, 255)]
    checks = torch.zeros(1, 3, 64, 96, dtype=torch.uint8)
    checks[..., ::2] = 255
    for entry in encoded(half, [*flat, checks]):
        assert entry.isfinite().all()


def test_other_patches_than_the_grids_have_are_refused_with_both_numbers(half: Qwen3VLEncoder) -> None:
    patches = torch.zeros(20, half.patch_values)
    with pytest.raises(ValueError, match=r"20 rows of patches came, the grids have 24"):
        half.encode_patches(patches, [(4, 4), (2, 4)], TorchVarlen())


def test_there_are_no_keys_and_values_apart_from_the_states(half: Qwen3VLEncoder) -> None:
    units = drawn()
    with torch.inference_mode():
        assert apart(half.encode(units, TorchVarlen()), encoded(half, units)) == 0


# -- sizes and what a graph replays ------------------------------------------------------------------------------------


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("shape", [{}, {"intermediate_size": 2000}, {"hidden_size": 640, "num_heads": 8}])
def test_no_tensor_is_larger_than_the_largest_that_is_foretold(tmp_path: Path, shape: Mapping[str, object]) -> None:
    half = ours(write(tmp_path / "tiny", vision=shape))
    units = drawn([(2, 160, 160)] * 3)
    encoded(half, units)  # what follows from the grid is kept, and may be larger
    parameters = max(parameter.numel() for parameter in half.parameters())
    with Largest() as seen:
        encoded(half, units)
    assert seen.elements <= max(half.largest_tensor(300, 3), parameters)
    assert half.largest_tensor(301, 3) >= half.largest_tensor(300, 3) <= half.largest_tensor(300, 4)


def test_a_trunk_takes_the_place_of_the_halfs_own(half: Qwen3VLEncoder) -> None:
    units = drawn()
    seen: list[tuple[int, ...]] = []

    def trunk(patches_pv: Tensor, grids: Sequence[tuple[int, int]], attention: Any) -> Tensor:
        seen.append(tuple(patches_pv.shape))
        lengths = [rows * columns for rows, columns in grids]
        return half.trunk_at(patches_pv, half.visual.places.of(grids), lengths, attention)

    with torch.inference_mode():
        got = half.encode_states(units, TorchVarlen(), trunk)
    assert seen == [(sum(h * w // 256 for _, h, w in SIZES), 1536)]
    assert apart(got, encoded(half, units)) == 0


# -- mistakes that would not be seen at once ---------------------------------------------------------------------------

Mistake = Callable[[Qwen3VLEncoder, pytest.MonkeyPatch], None]


def norms_swapped(half: Qwen3VLEncoder, patch: pytest.MonkeyPatch) -> None:
    def forward(self: Merger, x_pc: Tensor) -> Tensor:
        patches = self.width // x_pc.shape[1]
        weight, bias = self.norm.weight, self.norm.bias
        if weight.numel() == self.width:  # of a tap: each patch by itself
            normed = F.layer_norm(x_pc, x_pc.shape[1:], eps=self.norm.eps).view(-1, self.width) * weight + bias
        else:  # the main one's: what was grouped
            grouped = F.layer_norm(x_pc.view(-1, self.width), (self.width,), eps=self.norm.eps)
            normed = grouped * weight.repeat(patches) + bias.repeat(patches)
        return linear(self.linear_fc2, linear_gelu(self.linear_fc1, normed, approximate="none"))

    patch.setattr(Merger, "forward", forward)


def taps_by_value(half: Qwen3VLEncoder, patch: pytest.MonkeyPatch) -> None:
    half.taps = {block: merger for merger, block in enumerate(sorted(half.taps))}


def taps_one_block_late(half: Qwen3VLEncoder, patch: pytest.MonkeyPatch) -> None:
    half.taps = {block + 1: merger for block, merger in half.taps.items()}


def tanh_in_the_mergers(half: Qwen3VLEncoder, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vision, "linear_gelu", lambda layer, x, *, approximate: linear_gelu(layer, x, approximate="tanh"))


def exact_in_the_blocks(half: Qwen3VLEncoder, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vit, "linear_gelu", lambda layer, x, *, approximate: linear_gelu(layer, x, approximate="none"))


def corners_not_aligned(half: Qwen3VLEncoder, patch: pytest.MonkeyPatch) -> None:
    half.visual.pos_embed.align_corners = False


def time_before_channels(half: Qwen3VLEncoder, patch: pytest.MonkeyPatch) -> None:
    def turned(unit: Tensor, size: int, merge: int) -> Tensor:
        return to_patches(unit, size, merge).view(-1, 3, 2, size * size).transpose(1, 2).flatten(1)

    patch.setattr(vision, "to_patches", turned)


def one_norm_eps(half: Qwen3VLEncoder, patch: pytest.MonkeyPatch) -> None:
    for module in half.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-3


MISTAKES: list[Mistake] = [
    norms_swapped,
    taps_by_value,
    taps_one_block_late,
    tanh_in_the_mergers,
    exact_in_the_blocks,
    corners_not_aligned,
    time_before_channels,
    one_norm_eps,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_caught(tmp_path: Path, mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "tiny")
    units = drawn()
    half = ours(folder)
    mistake(half, monkeypatch)
    assert apart(encoded(half, units), theirs(folder, units)) > 3 * BOUND
