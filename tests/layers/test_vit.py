"""The vision transformer against the stock Qwen3-VL one of transformers, weights copied over.

And what makes an entry cacheable: a frame's features depend on nothing but the frame.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.layers.vit import VisionTransformer, rows_paired
from chiasm.layers.vit_places import KEPT_PATCHES, Grid, Kept, PositionEmbedding, block_order
from chiasm.media.patches import normalise, to_patches

CPU = torch.device("cpu")
CHANNELS, PATCH, MERGE, SIDE, DEPTH = 32, 4, 2, 6, 3
VALUES = 3 * PATCH * PATCH
GRIDS: list[Grid] = [(4, 6), (2, 2), (4, 4), (4, 4), (8, 2), (12, 14)]


def stock() -> Any:
    config = Qwen3VLVisionConfig(
        depth=DEPTH,
        hidden_size=CHANNELS,
        intermediate_size=56,
        num_heads=2,
        in_channels=3,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        temporal_patch_size=1,
        out_hidden_size=48,
        num_position_embeddings=SIDE**2,
        deepstack_visual_indexes=[],
        hidden_act="gelu_pytorch_tanh",
    )
    config._attn_implementation = "sdpa"
    model: Any = Qwen3VLVisionModel(config)
    model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name and name.endswith("weight") else 0.15 * noise)
    return model


def ours(theirs: Any, dtype: torch.dtype) -> VisionTransformer:
    """The same weights in this project's transformer."""
    made = VisionTransformer(
        values=VALUES,
        channels=CHANNELS,
        intermediate=56,
        heads=2,
        depth=DEPTH,
        side=SIDE,
        merge=MERGE,
        eps=1e-6,
        rope_theta=1e4,
        device=CPU,
        dtype=dtype,
    )
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if not name.startswith(("merger", "deep"))}
    weights["patch_embed.weight"] = weights.pop("patch_embed.proj.weight").flatten(1)
    weights["patch_embed.bias"] = weights.pop("patch_embed.proj.bias")
    order = list(rows_paired(CHANNELS, 2))
    made.load_state_dict({name: tensor[order] if ".qkv." in name else tensor for name, tensor in weights.items()})
    return made


def draw(grids: list[Grid], dtype: torch.dtype = torch.float32) -> Tensor:
    rows = sum(a * b for a, b in grids)
    return torch.randn(rows, VALUES, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_blocks_over_grids_of_all_shapes(dtype: torch.dtype) -> None:
    theirs = stock().to(dtype)
    mine = ours(theirs, dtype)
    x = draw(GRIDS, dtype)
    with torch.no_grad():
        out = theirs(x, grid_thw=torch.tensor([(1, *grid) for grid in GRIDS]), output_hidden_states=True)
        got = list(mine(x, GRIDS, TorchVarlen()))
    assert len(got) == DEPTH
    largest = out.last_hidden_state.abs().max()
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    assert ((got[-1] - out.last_hidden_state).abs().max() / largest).item() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_frame_alone_is_the_frame_among_others(dtype: torch.dtype) -> None:
    """What the cache rests on. Sums over another batch may be ordered otherwise: the last bits are not asked for."""
    mine = ours(stock(), dtype)
    x = draw(GRIDS, dtype)
    with torch.no_grad():
        together = list(mine(x, GRIDS, TorchVarlen()))
        rows = [a * b for a, b in GRIDS]
        for number, (frame, grid) in enumerate(zip(x.split(rows), GRIDS, strict=True)):
            alone = list(mine(frame, [grid], TorchVarlen()))
            for block, packed in zip(alone, together, strict=True):
                expected = packed.split(rows)[number]
                bound = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float64: 1e-14}[dtype]
                assert ((block - expected).abs().max() / expected.abs().max()).item() <= bound


def test_a_frame_full_of_nan_leaves_its_neighbours_alone() -> None:
    mine = ours(stock(), torch.float32)
    x = draw(GRIDS)
    spoiled = x.clone()
    spoiled[:24] = torch.nan
    with torch.no_grad():
        *_, clean = mine(x, GRIDS, TorchVarlen())
        *_, beside = mine(spoiled, GRIDS, TorchVarlen())
    assert beside[:24].isnan().all()
    assert torch.equal(beside[24:], clean[24:])


def test_equal_frames_have_equal_features_wherever_they_stand() -> None:
    mine = ours(stock(), torch.float32)
    x = draw([(4, 4)])
    with torch.no_grad():
        *_, out = mine(torch.cat([x, x, x]), [(4, 4)] * 3, TorchVarlen())
    first, second, third = out.split(16)
    assert torch.equal(first, second) and torch.equal(first, third)


def test_positions_at_the_size_of_the_table_are_the_table() -> None:
    embedding = PositionEmbedding(SIDE, 5, MERGE, device=CPU, dtype=torch.float32)
    torch.nn.init.normal_(embedding.weight, generator=torch.Generator().manual_seed(1))
    row, column = block_order((SIDE, SIDE), MERGE)
    with torch.no_grad():
        assert torch.equal(embedding((SIDE, SIDE)), embedding.weight[row * SIDE + column])


@pytest.mark.parametrize("grid", [(4, 10), (2, 2), (6, 6), (2, 40), (14, 8)])
@pytest.mark.parametrize("align_corners", [True, False])
def test_positions_are_interpolated_as_torch_does_by_either_rule(align_corners: bool, grid: Grid) -> None:
    embedding = PositionEmbedding(SIDE, 5, MERGE, align_corners=align_corners, device=CPU, dtype=torch.float32)
    torch.nn.init.normal_(embedding.weight, generator=torch.Generator().manual_seed(1))
    table = embedding.weight.detach().T.reshape(1, 5, SIDE, SIDE)
    expected = torch.nn.functional.interpolate(table, size=grid, mode="bilinear", align_corners=align_corners)[0]
    row, column = block_order(grid, MERGE)
    with torch.no_grad():
        torch.testing.assert_close(embedding(grid), expected[:, row, column].T, rtol=1e-5, atol=2e-6)


def test_patches_come_by_merge_block_with_channels_first() -> None:
    frame = torch.arange(3 * 8 * 16, dtype=torch.float32).view(3, 8, 16)
    patches = to_patches(frame, 2, 2)
    assert patches.shape == (32, 12)
    row, column = block_order((4, 8), 2)
    assert [(int(a), int(b)) for a, b in zip(row[:6], column[:6], strict=True)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (0, 2),
        (0, 3),
    ]
    for patch, a, b in zip(patches, row.tolist(), column.tolist(), strict=True):
        assert torch.equal(patch, frame[:, 2 * a : 2 * a + 2, 2 * b : 2 * b + 2].flatten())


def test_patches_go_through_the_frames_of_a_unit_inside_each_channel() -> None:
    unit = torch.arange(2 * 3 * 8 * 16, dtype=torch.float32).view(2, 3, 8, 16)
    patches = to_patches(unit, 2, 2).view(32, 3, 2, 4)
    for number, frame in enumerate(unit):
        assert torch.equal(patches[:, :, number].flatten(1), to_patches(frame, 2, 2))
    assert torch.equal(to_patches(unit[:1], 2, 2), to_patches(unit[0], 2, 2))


def test_pixels_are_centred_on_zero() -> None:
    values = normalise(torch.tensor([0, 51, 255], dtype=torch.uint8))
    assert values.tolist() == [-1.0, pytest.approx(-0.6), 1.0]


def test_places_are_made_once_and_what_is_kept_is_bounded_whatever_grids_come() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    kept: Kept[int, int] = Kept(most_patches=100)
    for number in (1, 2, 1, 3, 1):
        assert kept.of(number, 40, lambda number=number: make(number)) == number  # type: ignore[misc]
    assert made == [1, 2, 3], "the one used last stays"
    kept.of(2, 40, lambda: make(2))
    assert made == [1, 2, 3, 2] and kept.patches == 80
    kept.of(9, 101, lambda: make(9))
    kept.of(9, 101, lambda: make(9))
    assert made == [1, 2, 3, 2, 9, 9] and kept.patches == 80, "what is larger than all is not kept"


def test_hostile_mixes_of_grids_take_no_memory() -> None:
    mine = ours(stock(), torch.float32)
    with torch.inference_mode():
        for rows in range(2, 60, 2):
            for columns in (2, 64):
                list(mine(torch.zeros(rows * columns, VALUES), [(rows, columns)], TorchVarlen()))
    assert 0 < mine.places.patches <= KEPT_PATCHES


def test_positions_follow_the_weights_they_were_made_of() -> None:
    mine = ours(stock(), torch.float32)
    x = draw([(4, 6)] * 2)
    with torch.inference_mode():
        *_, before = mine(x, [(4, 6)] * 2, TorchVarlen())
    with torch.no_grad():
        mine.pos_embed.weight.mul_(3)
    with torch.inference_mode():
        *_, after = mine(x, [(4, 6)] * 2, TorchVarlen())
    assert not torch.allclose(before, after)


def test_what_is_differentiated_equals_what_is_served() -> None:
    mine = ours(stock(), torch.bfloat16)
    x = draw([(4, 6)] * 3 + [(8, 2)], torch.bfloat16)
    grids: list[Grid] = [(4, 6)] * 3 + [(8, 2)]
    *_, trained = mine(x, grids, TorchVarlen())
    trained.float().square().mean().backward()
    assert mine.pos_embed.weight.grad is not None and mine.pos_embed.weight.grad.abs().sum() > 0
    with torch.inference_mode():
        *_, served = mine(x, grids, TorchVarlen())
    assert ((served - trained.detach()).abs().max() / served.abs().max()).item() <= 3e-2
