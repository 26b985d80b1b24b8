"""Qwen3-VL's encoder half: units of two frames to the features that a decoder lays over their placeholders.

It holds the vision transformer, its main merger and a merger for each tap; no language model and no head. A unit's
result depends on its pixels, its grid and the weights alone. A row holds what the main merger made of a merged token,
then what each tap's made of it, by ascending block: the order in which the decoder's first layers take them.

Shape suffixes: P patches, C vision channels, M merged tokens, E text width, W = E * (1 + taps).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from chiasm.attention.backend import VarlenAttention
from chiasm.layers.linear import linear, linear_gelu
from chiasm.layers.vit import VisionTransformer
from chiasm.layers.vit_places import Grid, Places
from chiasm.media.patches import normalise, to_patches
from chiasm.models.family import Trunk
from chiasm.models.qwen3_vl.config import Config, VisionConfig


class Merger(nn.Module):
    """Groups the patches of a merge block and projects them to the text's width. GELU is exact here.

    Args:
        grouped_first: the norm is over what was grouped, as of a tap; the main merger's is over each patch.
    """

    def __init__(self, v: VisionConfig, *, grouped_first: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = v.hidden_size * v.spatial_merge_size**2
        normed = self.width if grouped_first else v.hidden_size
        self.norm = nn.LayerNorm(normed, eps=v.layer_norm_eps, device=device, dtype=dtype)
        self.linear_fc1 = nn.Linear(self.width, self.width, device=device, dtype=dtype)
        self.linear_fc2 = nn.Linear(self.width, v.out_hidden_size, device=device, dtype=dtype)

    def forward(self, x_pc: Tensor) -> Tensor:
        """(P, C) to (M, E)."""
        normed = self.norm(x_pc.view(-1, *self.norm.normalized_shape))
        inner = linear_gelu(self.linear_fc1, normed.view(-1, self.width), approximate="none")
        return linear(self.linear_fc2, inner)


class Qwen3VLEncoder(nn.Module):
    """`EncoderHalf` of Qwen3-VL."""

    def __init__(self, config: Config, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        v = config.vision
        self.config = config
        self.device = device
        self.dtype = dtype
        self.entry_shape = config.entry_shape
        self.head_dim = v.head_dim
        self.patch_values = v.patch_values
        self.visual = VisionTransformer(
            values=v.patch_values,
            channels=v.hidden_size,
            intermediate=v.intermediate_size,
            heads=v.num_heads,
            depth=v.depth,
            side=v.position_grid,
            merge=v.spatial_merge_size,
            eps=v.layer_norm_eps,
            rope_theta=v.rope_theta,
            align_corners=v.align_corners,
            device=device,
            dtype=dtype,
        )
        self.merger = Merger(v, grouped_first=False, device=device, dtype=dtype)
        self.tap_mergers = nn.ModuleList(Merger(v, grouped_first=True, device=device, dtype=dtype) for _ in v.taps)
        self.taps = dict(v.taps)
        """By block, the number of its merger."""

    def largest_tensor(self, patches: int, units: int) -> int:
        """Elements of the largest tensor that so many patches of so many units become."""
        v = self.config.vision
        # Patches as they are cut; queries, keys and values; the width inside an MLP. A merged token inside a merger is
        # as wide as its patches.
        of_patch = max(v.patch_values, 3 * v.hidden_size, v.intermediate_size)
        return max(patches * of_patch, patches // v.spatial_merge_size**2 * self.entry_shape.hidden)

    def encode(self, units: Sequence[Tensor], attention: VarlenAttention, trunk: Trunk | None = None) -> list[Tensor]:
        """As `encode_states`: no layer attends to visual tokens apart, so there are no keys and values of them."""
        return self.encode_states(units, attention, trunk)

    def encode_states(
        self, units: Sequence[Tensor], attention: VarlenAttention, trunk: Trunk | None = None
    ) -> list[Tensor]:
        """Units of resized uint8 RGB frames, (1 or 2, 3, height, width) each, to (M, W) each. A frame that is alone, be
        it an image or a video's odd last one, stands for both."""
        patches = [self._patches(unit) for unit in units]
        size = self.config.vision.patch_size
        grids = [(unit.shape[2] // size, unit.shape[3] // size) for unit in units]
        return self.encode_patches(torch.cat(patches), grids, attention, trunk)

    def encode_patches(
        self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention, trunk: Trunk | None = None
    ) -> list[Tensor]:
        """Normalised patches (P, values) of `grids`, one unit after another, to (M, W) per unit. Raises ValueError with
        both numbers where there are other patches than the grids have."""
        wanted = sum(rows * columns for rows, columns in grids)
        if len(patches_pv) != wanted:
            raise ValueError(f"{len(patches_pv)} rows of patches came, the grids have {wanted}")
        merged_mw = (trunk or self.trunk)(patches_pv.to(self.device, self.dtype), grids, attention)
        block = self.config.vision.spatial_merge_size**2
        return list(merged_mw.split([rows * columns // block for rows, columns in grids]))

    def _patches(self, unit: Tensor) -> Tensor:
        """(P, values) normalised."""
        v = self.config.vision
        frames = normalise(unit.to(self.device)).expand(v.temporal_patch_size, -1, -1, -1)
        return to_patches(frames, v.patch_size, v.spatial_merge_size)

    def trunk(self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention) -> Tensor:
        """`Trunk`: (P, values) to (M, W)."""
        lengths = [rows * columns for rows, columns in grids]
        return self.trunk_at(patches_pv, self.visual.places.of(grids), lengths, attention)

    def trunk_at(
        self, patches_pv: Tensor, places: Places, lengths: Sequence[int], attention: VarlenAttention
    ) -> Tensor:
        """As `trunk`, with the places of the patches given, and the patches of each unit."""
        features, x_pc = [], None
        for i, x_pc in enumerate(self.visual.at(patches_pv, places, lengths, attention)):
            if i in self.taps:
                features.append(self.tap_mergers[self.taps[i]](x_pc))
        assert x_pc is not None, "a vision transformer has at least one block"
        return torch.cat([self.merger(x_pc), *features], dim=-1)
