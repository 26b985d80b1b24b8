"""MOSS-VL's encoder half: frames to the keys and values of every cross layer, or to the states they are made of.

It holds the vision transformer, the joint merger, the separator and the key and value projections of the cross
layers; no language model. A frame's result depends on its pixels, its grid and the weights alone. Keys are normed and
not rotated: the rotation depends on the text before the frame, which is the decoder's.

Shape suffixes: P patches, C vision channels, M merged tokens, S vision tokens (merged and separators), E text width,
K kv heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from chiasm.attention.backend import VarlenAttention
from chiasm.cache.form import Form
from chiasm.layers.linear import linear, linear_gelu
from chiasm.layers.vit import VisionTransformer
from chiasm.layers.vit_places import Grid, Places
from chiasm.media.patches import normalise, to_patches
from chiasm.models.family import Trunk
from chiasm.models.moss_vl.config import Config, VisionConfig
from chiasm.models.moss_vl.crossing import Crossing


class JointMerger(nn.Module):
    """One merger for the last block and all taps: norm each, join on channels, then group 2x2 patches, then project.

    The order matters: a merged row is patch-major, with the levels side by side inside each patch. GELU is exact here.
    """

    def __init__(self, v: VisionConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        levels = 1 + len(v.deepstack_visual_indexes)
        self.width = v.hidden_size * levels * v.spatial_merge_size**2
        self.norms = nn.ModuleList(
            nn.LayerNorm(v.hidden_size, eps=v.layer_norm_eps, device=device, dtype=dtype) for _ in range(levels)
        )
        self.linear_fc1 = nn.Linear(self.width, self.width, device=device, dtype=dtype)
        self.linear_fc2 = nn.Linear(self.width, v.out_hidden_size, device=device, dtype=dtype)

    def forward(self, levels_pc: Sequence[Tensor]) -> Tensor:
        """The last block's output, then the taps by ascending block, each (P, C), to (M, E)."""
        normed = [norm(x) for norm, x in zip(self.norms, levels_pc, strict=True)]
        joined = normed[0] if len(normed) == 1 else torch.cat(normed, dim=-1)
        inner = linear_gelu(self.linear_fc1, joined.view(-1, self.width), approximate="none")
        return linear(self.linear_fc2, inner)


class MossVLEncoder(nn.Module):
    """`EncoderHalf` of MOSS-VL."""

    def __init__(self, config: Config, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        v = config.vision
        self.config = config
        self.device = device
        self.dtype = dtype
        self.taps = v.deepstack_visual_indexes
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
            device=device,
            dtype=dtype,
        )
        self.merger = JointMerger(v, device=device, dtype=dtype)
        self.separator_token = nn.Parameter(torch.empty(config.text.hidden_size, device=device, dtype=dtype))
        self.cross = Crossing(config.text, device=device, dtype=dtype)

    def largest_tensor(self, patches: int, units: int) -> int:
        """Elements of the largest tensor that so many patches of so many frames become."""
        v = self.config.vision
        # Patches as they are cut; queries, keys and values; the width inside an MLP; the levels that the merger joins.
        of_patch = max(v.patch_values, 3 * v.hidden_size, v.intermediate_size, v.hidden_size * (1 + len(self.taps)))
        tokens = patches // v.spatial_merge_size**2 + units
        of_token = max(v.out_hidden_size, math.prod(self.entry_shape.of(1, Form.CROSS_KV)))
        return max(patches * of_patch, tokens * of_token)

    def encode(self, units: Sequence[Tensor], attention: VarlenAttention, trunk: Trunk | None = None) -> list[Tensor]:
        """Units of one resized frame, uint8 RGB (1, 3, height, width) each, to an entry each:
        (cross layers, K|V, K, S, D)."""
        return self.encode_patches(*self._patches(units), attention, trunk)

    def encode_states(
        self, units: Sequence[Tensor], attention: VarlenAttention, trunk: Trunk | None = None
    ) -> list[Tensor]:
        """The same units to (S, E) states each, of which `encode` makes keys and values."""
        patches_pv, grids = self._patches(units)
        states_se = self.states(patches_pv, grids, attention, trunk)
        return list(states_se.split([self._tokens(grid) + 1 for grid in grids]))

    def encode_patches(
        self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention, trunk: Trunk | None = None
    ) -> list[Tensor]:
        """Normalised patches (P, values) of `grids`, one frame after another, to an entry per frame."""
        entries = self.cross(self.states(patches_pv, grids, attention, trunk))
        return list(entries.split([self._tokens(grid) + 1 for grid in grids], dim=3))

    def _patches(self, units: Sequence[Tensor]) -> tuple[Tensor, list[Grid]]:
        """Normalised patches of units, one after another, and their grids."""
        v = self.config.vision
        frames = [unit.squeeze(0) for unit in units]
        patches = [to_patches(normalise(f.to(self.device)), v.patch_size, v.spatial_merge_size) for f in frames]
        return torch.cat(patches), [(f.shape[1] // v.patch_size, f.shape[2] // v.patch_size) for f in frames]

    def states(
        self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention, trunk: Trunk | None = None
    ) -> Tensor:
        """(S, E) vision states of all frames: merged tokens, row by row, then the separator, frame by frame."""
        merged_me = (trunk or self.trunk)(patches_pv.to(self.device, self.dtype), grids, attention)
        return self._separated(merged_me, grids)

    def trunk(self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention) -> Tensor:
        """`Trunk`: (P, values) to (M, E)."""
        lengths = [rows * columns for rows, columns in grids]
        return self.trunk_at(patches_pv, self.visual.places.of(grids), lengths, attention)

    def trunk_at(
        self, patches_pv: Tensor, places: Places, lengths: Sequence[int], attention: VarlenAttention
    ) -> Tensor:
        """As `trunk`, with the places of the patches given, and the patches of each frame."""
        taps, last = [], None
        for i, x_pc in enumerate(self.visual.at(patches_pv, places, lengths, attention)):
            last = x_pc
            if i in self.taps:
                taps.append(x_pc)
        assert last is not None, "a vision transformer has at least one block"
        merged_me: Tensor = self.merger([last, *taps])
        return merged_me

    def _separated(self, merged_me: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(S, E): the merged tokens of each frame, then the separator. Neighbours of equal length are done as one."""
        runs, at = [], 0
        for tokens, run in groupby(self._tokens(grid) for grid in grids):
            count = len(list(run))
            frames = merged_me[at : at + tokens * count].view(count, tokens, -1)
            at += tokens * count
            runs.append(torch.cat((frames, self.separator_token.expand(count, 1, -1)), dim=1).flatten(0, 1))
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def _tokens(self, grid: Grid) -> int:
        return grid[0] * grid[1] // self.config.vision.spatial_merge_size**2
