"""Every mistake that an implementation of MOSS-VL is known to make, planted once: the comparison must see it.

A mistake replaces one function of the product while a test runs; that is what a mistake in the product would be. Each
names the tensor in which it first shows, so that a failure of the comparison can be read backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from chiasm.attention.backend import Attention
from chiasm.layers import rope
from chiasm.layers.norm import RMSNorm
from chiasm.layers.rope import MultimodalRope, rotate
from chiasm.layers.vit import VisionMLP
from chiasm.layers.vit_places import Grid, PositionEmbedding, VisionRope, block_order
from chiasm.models.moss_vl.crossing import CrossingLayer
from chiasm.models.moss_vl.processing import MossVLProcessor
from chiasm.models.moss_vl.text import CrossAttention, CrossLayer, MossVLDecoder
from chiasm.models.moss_vl.vision import JointMerger
from chiasm.timeline import Timeline, UnitLayout
from tests.oracles.moss_vl import CHECKPOINT, DATA
from tests.oracles.moss_vl.compare import compare

Plant = Callable[[pytest.MonkeyPatch], None]
Boundaries = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded folder cut down to the one case with text, two images and a video."""
    folder = tmp_path_factory.mktemp("mixed")
    for file in ("inputs.safetensors", "expected.safetensors"):
        held = {name: tensor for name, tensor in load_file(DATA / file).items() if name.startswith("mixed.")}
        save_file({name: tensor for name, tensor in held.items() if ".bf16." not in name}, folder / file)
    return folder


# -- the mistakes ------------------------------------------------------------------------------------------------------


def rope_theta(theta: float, patch: pytest.MonkeyPatch) -> None:
    made = MultimodalRope.__init__

    def init(self: MultimodalRope, dim: int, _: float, section: Sequence[int], *, device: torch.device) -> None:
        made(self, dim, theta, section, device=device)

    patch.setattr(MultimodalRope, "__init__", init)


def chunked_mrope(patch: pytest.MonkeyPatch) -> None:
    made = MultimodalRope.__init__

    def init(self: MultimodalRope, dim: int, theta: float, section: Sequence[int], *, device: torch.device) -> None:
        made(self, dim, theta, section, device=device)
        self.axis = torch.arange(3).repeat_interleave(torch.tensor(section))

    patch.setattr(MultimodalRope, "__init__", init)


def boundaries(change: Callable[[Boundaries, Timeline], Boundaries], patch: pytest.MonkeyPatch) -> None:
    """`change` gets what every row of a timeline sees, and says what it should see instead."""
    right = Timeline.boundaries

    def wrong(self: Timeline, start: int = 0, stop: int | None = None) -> Boundaries:
        return change(right(self), self)[start:stop]

    patch.setattr(Timeline, "boundaries", wrong)


def all_see_all(spans: Boundaries, timeline: Timeline) -> Boundaries:
    return np.tile(np.array([0, timeline.vision_tokens]), (len(spans), 1))


def whoever_sees_sees_all(spans: Boundaries, timeline: Timeline) -> Boundaries:
    return np.where(spans[:, 1:] > spans[:, :1], np.array([0, timeline.vision_tokens]), 0)


def one_token_late(spans: Boundaries, timeline: Timeline) -> Boundaries:
    return np.concatenate([np.zeros((1, 2), dtype=np.int64), spans[:-1]])


def one_token_early(spans: Boundaries, timeline: Timeline) -> Boundaries:
    return np.concatenate([spans[1:], spans[-1:]])


def grouped_before_joined(patch: pytest.MonkeyPatch) -> None:
    def forward(self: JointMerger, levels: Sequence[Tensor]) -> Tensor:
        blocks = self.width // len(levels)
        joined = torch.cat([norm(x).view(-1, blocks) for norm, x in zip(self.norms, levels, strict=True)], dim=-1)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(joined)))
        return out

    patch.setattr(JointMerger, "forward", forward)


def taps_reversed(patch: pytest.MonkeyPatch) -> None:
    right = JointMerger.forward
    patch.setattr(JointMerger, "forward", lambda self, levels: right(self, [levels[0], *reversed(levels[1:])]))


def tanh_gelu_in_merger(patch: pytest.MonkeyPatch) -> None:
    def forward(self: JointMerger, levels: Sequence[Tensor]) -> Tensor:
        joined = torch.cat([norm(x) for norm, x in zip(self.norms, levels, strict=True)], dim=-1)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(joined.view(-1, self.width)), approximate="tanh"))
        return out

    patch.setattr(JointMerger, "forward", forward)


def exact_gelu_in_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VisionMLP, "forward", lambda self, x: self.linear_fc2(F.gelu(self.linear_fc1(x))))


def attention_branch_gated_only(patch: pytest.MonkeyPatch) -> None:
    def forward(self: CrossLayer, h: Tensor, sees: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        crossed = self.cross_attn(self.input_layernorm(h), cos, sin, attention)
        h = h + self.cross_attn_attn_gate.tanh() * sees * crossed
        fed: Tensor = self.mlp(self.post_attention_layernorm(h))
        return h + self.cross_attn_mlp_gate.tanh() * fed

    patch.setattr(CrossLayer, "forward", forward)


def pad_at_its_start(patch: pytest.MonkeyPatch) -> None:
    right = MossVLProcessor.unit_layout

    def unit_layout(self: MossVLProcessor, grid: Grid) -> UnitLayout:
        layout = right(self, grid)
        return replace(layout, placeholder_steps=np.zeros((3, 1), dtype=np.int32))

    patch.setattr(MossVLProcessor, "unit_layout", unit_layout)


def separator_moved(by: int, patch: pytest.MonkeyPatch) -> None:
    right = MossVLProcessor.key_steps

    def key_steps(self: MossVLProcessor, grid: Grid) -> npt.NDArray[np.int64]:
        steps = right(self, grid).copy()
        steps[:, -1] += by
        return steps

    patch.setattr(MossVLProcessor, "key_steps", key_steps)


def keys_restart_at_zero(patch: pytest.MonkeyPatch) -> None:
    right = MossVLDecoder.place
    patch.setattr(MossVLDecoder, "place", lambda self, entry, at: right(self, entry, at - at[0, 0]))


def corners_not_aligned(patch: pytest.MonkeyPatch) -> None:
    def forward(self: PositionEmbedding, grid: Grid) -> Tensor:
        table = self.weight.T.reshape(1, -1, self.side, self.side)
        row, column = block_order(grid, self.merge)
        return F.interpolate(table, size=grid, mode="bilinear", align_corners=False)[0, :, row, column].T

    patch.setattr(PositionEmbedding, "forward", forward)


def row_major_vision_rotary(patch: pytest.MonkeyPatch) -> None:
    def turns(self: VisionRope, grid: Grid) -> Tensor:
        at = torch.arange(grid[0] * grid[1])
        axes = torch.stack((at // grid[1], at % grid[1])).float()
        return rope.turns(torch.cat([axis.unsqueeze(-1) * self.inverse for axis in axes], dim=-1))

    patch.setattr(VisionRope, "turns", turns)


def keys_not_normed(patch: pytest.MonkeyPatch) -> None:
    def forward(self: CrossingLayer, states: Tensor) -> Tensor:
        both = (self.k_proj(states), self.v_proj(states))
        return torch.stack([x.view(states.shape[0], -1, self.head_dim) for x in both]).transpose(1, 2)

    patch.setattr(CrossingLayer, "forward", forward)


def query_rotated(when: Callable[[int], bool], patch: pytest.MonkeyPatch) -> None:
    """`when` tells by the number of rows of a step whether the query of a cross layer is rotated in it."""

    def forward(self: CrossAttention, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        rows = x.shape[0]
        q = self.q_norm(self.q_proj(x).view(rows, -1, self.head_dim))
        q = rotate(q, cos, sin) if when(rows) else q
        out: Tensor = self.o_proj(attention.attend_cross(q, layer=self.layer).reshape(rows, -1))
        return out

    patch.setattr(CrossAttention, "forward", forward)


def layer_norm_eps(patch: pytest.MonkeyPatch) -> None:
    made = nn.LayerNorm.__init__

    def init(self: nn.LayerNorm, size: int, **options: Any) -> None:
        made(self, size, **(options | {"eps": 1e-5}))

    patch.setattr(nn.LayerNorm, "__init__", init)


def rms_norm_eps(patch: pytest.MonkeyPatch) -> None:
    made = RMSNorm.__init__

    def init(self: RMSNorm, size: int, eps: float, **options: Any) -> None:
        made(self, size, 1e-5, **options)

    patch.setattr(RMSNorm, "__init__", init)


# -- the test ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """How to plant it, the first tensor it spoils, and the logits it spoils."""

    plant: Plant
    first: str
    logits: str = "mixed.prefill_logits"


MISTAKES = {
    "rope_theta_10000": Mistake(partial(rope_theta, 1e4), "mixed.layer1.k_post_rope"),
    "rope_theta_1000000": Mistake(partial(rope_theta, 1e6), "mixed.layer1.k_post_rope"),
    "neither_frame_mask_nor_row_gating": Mistake(partial(boundaries, all_see_all), "mixed.row_visible"),
    "grouped_before_joined_on_channels": Mistake(grouped_before_joined, "mixed.vision.merged"),
    "deepstack_taps_reversed": Mistake(taps_reversed, "mixed.vision.merged"),
    "row_gating_on_the_attention_branch_only": Mistake(attention_branch_gated_only, "mixed.layer1.out"),
    "pad_token_at_the_start_of_its_frame": Mistake(pad_at_its_start, "mixed.text_position_ids"),
    "position_embedding_without_aligned_corners": Mistake(corners_not_aligned, "mixed.vision.pos_embed"),
    "visible_one_token_late": Mistake(partial(boundaries, one_token_late), "mixed.row_visible"),
    "visible_one_token_early": Mistake(partial(boundaries, one_token_early), "mixed.row_visible"),
    "vision_rotary_row_major": Mistake(row_major_vision_rotary, "mixed.vision.block0"),
    "cross_keys_not_normed": Mistake(keys_not_normed, "mixed.layer1.k_pre_rope"),
    "cross_query_never_rotated": Mistake(partial(query_rotated, lambda rows: False), "mixed.layer1.cross_attn_out"),
    "cross_query_unrotated_in_decode": Mistake(
        partial(query_rotated, lambda rows: rows > 1), "mixed.greedy.rotated.ids", "mixed.greedy.rotated.logits"
    ),
    "keys_restart_at_zero_per_frame": Mistake(keys_restart_at_zero, "mixed.layer1.k_post_rope"),
    "frame_mask_ignored_row_gating_kept": Mistake(
        partial(boundaries, whoever_sees_sees_all), "mixed.layer1.cross_attn_out"
    ),
    "separator_one_too_high": Mistake(partial(separator_moved, 1), "mixed.vision_position_ids"),
    "separator_one_too_low": Mistake(partial(separator_moved, -1), "mixed.vision_position_ids"),
    "mrope_in_chunks": Mistake(chunked_mrope, "mixed.layer1.k_post_rope"),
    "exact_gelu_in_vision_blocks": Mistake(exact_gelu_in_blocks, "mixed.vision.block0"),
    "tanh_gelu_in_merger": Mistake(tanh_gelu_in_merger, "mixed.vision.merged"),
    "layer_norm_eps": Mistake(layer_norm_eps, "mixed.vision.block0"),
    "rms_norm_eps": Mistake(rms_norm_eps, "mixed.prefill_logits"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen_where_it_is_made_and_in_the_logits(
    name: str, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = MISTAKES[name]
    mistake.plant(monkeypatch)
    report = compare(CHECKPOINT, CHECKPOINT, mixed)
    assert not report.ok
    assert not report.faults, "it is seen in the numbers, not by a crash"
    assert next(iter(report.failed)) == mistake.first, "findings stand in the order in which tensors come to be"
    assert mistake.logits in report.failed


def test_without_a_mistake_the_same_comparison_passes(mixed: Path) -> None:
    report = compare(CHECKPOINT, CHECKPOINT, mixed)
    assert report.ok, report.as_table()
    expected = load_file(mixed / "expected.safetensors")
    assert set(report.findings) == {name for name in expected if ".hf." not in name}
