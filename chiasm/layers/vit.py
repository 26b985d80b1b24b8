"""The vision transformer of the Qwen3-VL kind: patches in, patch features out, attention inside one grid only.

Everything here depends on pixels, grid and weights alone, which is why a unit can be encoded once and shared.
Shape suffixes: P patches of all grids of a call, C channels, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chiasm.attention.backend import VarlenAttention
from chiasm.layers.rope import inverse_frequencies, rotate, tables

Grid = tuple[int, int]
"""Patches of one frame: (rows, columns)."""


def block_order(grid: Grid, merge: int) -> Tensor:
    """(2, patches) row and column of each patch in the order of the patch sequence: by merge block, row-major, then by
    row and column inside the block."""
    rows, columns = grid
    row = torch.arange(rows).view(-1, merge, 1, 1).expand(rows // merge, merge, columns // merge, merge)
    column = torch.arange(columns).view(1, 1, -1, merge).expand(rows // merge, merge, columns // merge, merge)
    return torch.stack([axis.permute(0, 2, 1, 3).reshape(-1) for axis in (row, column)])


class PositionEmbedding(nn.Module):
    """A square table of learned positions, interpolated bilinearly with aligned corners to any grid.

    The four corner weights are products of float32 fractions, cast to the table's type; the corners are summed in the
    order floor-floor, floor-ceil, ceil-floor, ceil-ceil.
    """

    def __init__(self, side: int, channels: int, merge: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.side = side
        self.merge = merge
        self.weight = nn.Parameter(torch.empty(side * side, channels, device=device, dtype=dtype))
        self._corners: dict[Grid, tuple[Tensor, Tensor]] = {}

    def forward(self, grid: Grid) -> Tensor:
        """(P, C) embedding of one grid, in patch order."""
        index_4p, share_4p = self._corners_of(grid)
        parts = self.weight[index_4p] * share_4p.to(self.weight.dtype).unsqueeze(-1)
        return parts[0] + parts[1] + parts[2] + parts[3]

    def _corners_of(self, grid: Grid) -> tuple[Tensor, Tensor]:
        if grid not in self._corners:
            row, column = block_order(grid, self.merge)
            lows, highs, fractions = [], [], []
            for count, which in zip(grid, (row, column), strict=True):
                at = torch.linspace(0, self.side - 1, count, dtype=torch.float32)
                low = at.long()
                lows.append(low[which])
                highs.append(torch.clamp(low + 1, max=self.side - 1)[which])
                fractions.append((at - low)[which])
            corners = [(a, b) for a in (0, 1) for b in (0, 1)]
            pick = (lows, highs)
            index = torch.stack([pick[a][0] * self.side + pick[b][1] for a, b in corners])
            share = torch.stack(
                [
                    (fractions[0] if a else 1 - fractions[0]) * (fractions[1] if b else 1 - fractions[1])
                    for a, b in corners
                ]
            )
            self._corners[grid] = (index.to(self.weight.device), share.to(self.weight.device))
        return self._corners[grid]


class VisionRope:
    """2-D rotary angles: the first half of the frequencies turns with the row, the second with the column."""

    def __init__(self, head_dim: int, theta: float, merge: int, *, device: torch.device) -> None:
        self.inverse = inverse_frequencies(head_dim // 2, theta, device=device)
        self.merge = merge
        self._tables: dict[Grid, tuple[Tensor, Tensor]] = {}

    def tables(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """cos and sin of `rope.tables`, each (P, 1, D) float32, of one grid in patch order."""
        if grid not in self._tables:
            at_2p = block_order(grid, self.merge).to(self.inverse.device, torch.float32)
            angles = torch.cat([axis.unsqueeze(-1) * self.inverse for axis in at_2p], dim=-1)
            self._tables[grid] = tables(angles, torch.float32)
        return self._tables[grid]


class VisionAttention(nn.Module):
    """Attention among the patches of one grid. q, k and v come from one product; rotation in float32."""

    def __init__(self, channels: int, heads: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels, device=device, dtype=dtype)
        self.proj = nn.Linear(channels, channels, device=device, dtype=dtype)

    def forward(
        self, x_pc: Tensor, cos_p1d: Tensor, sin_p1d: Tensor, lengths: Sequence[int], attention: VarlenAttention
    ) -> Tensor:
        """(P, C) to (P, C); `lengths` are the patches of each grid."""
        q_phd, k_phd, v_phd = self.qkv(x_pc).view(x_pc.shape[0], 3, self.heads, -1).unbind(1)
        wide = torch.promote_types(x_pc.dtype, torch.float32)
        q_phd = rotate(q_phd.to(wide), cos_p1d, sin_p1d).to(x_pc.dtype)
        k_phd = rotate(k_phd.to(wide), cos_p1d, sin_p1d).to(x_pc.dtype)
        mixed = attention.varlen(q_phd, k_phd, v_phd, lengths, causal=False)
        out: Tensor = self.proj(mixed.reshape(x_pc.shape))
        return out


class VisionMLP(nn.Module):
    """fc2(gelu(fc1(x))) with the tanh form of GELU."""

    def __init__(self, channels: int, intermediate: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(channels, intermediate, device=device, dtype=dtype)
        self.linear_fc2 = nn.Linear(intermediate, channels, device=device, dtype=dtype)

    def forward(self, x_pc: Tensor) -> Tensor:
        """(P, C) to (P, C)."""
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x_pc), approximate="tanh"))
        return out


class VisionBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(
        self, channels: int, intermediate: int, heads: int, *, eps: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels, eps=eps, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(channels, eps=eps, device=device, dtype=dtype)
        self.attn = VisionAttention(channels, heads, device=device, dtype=dtype)
        self.mlp = VisionMLP(channels, intermediate, device=device, dtype=dtype)

    def forward(
        self, x_pc: Tensor, cos_p1d: Tensor, sin_p1d: Tensor, lengths: Sequence[int], attention: VarlenAttention
    ) -> Tensor:
        """(P, C) to (P, C); (P, D) rotary tables, and the patches of each grid in `lengths`."""
        x_pc = x_pc + self.attn(self.norm1(x_pc), cos_p1d, sin_p1d, lengths, attention)
        out: Tensor = x_pc + self.mlp(self.norm2(x_pc))
        return out


class VisionTransformer(nn.Module):
    """Patch embedding, positions and blocks.

    Args:
        values: numbers of one patch: channels * time * height * width of the kernel.
        side: side of the square table of learned positions.
        merge: side of a merge block, which fixes the order of the patches.
    """

    def __init__(
        self,
        *,
        values: int,
        channels: int,
        intermediate: int,
        heads: int,
        depth: int,
        side: int,
        merge: int,
        eps: float,
        rope_theta: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(values, channels, device=device, dtype=dtype)
        self.pos_embed = PositionEmbedding(side, channels, merge, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            VisionBlock(channels, intermediate, heads, eps=eps, device=device, dtype=dtype) for _ in range(depth)
        )
        self.rope = VisionRope(channels // heads, rope_theta, merge, device=device)

    def forward(self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention) -> Iterator[Tensor]:
        """Yields the (P, C) output of every block in turn, for (P, values) patches of `grids`, one after another.

        A generator, so that a caller keeps the taps it wants and no others.
        """
        x_pc: Tensor = self.patch_embed(patches_pv) + torch.cat([self.pos_embed(grid) for grid in grids])
        tables = [self.rope.tables(grid) for grid in grids]
        cos_p1d = torch.cat([cos for cos, _ in tables])
        sin_p1d = torch.cat([sin for _, sin in tables])
        lengths = [rows * columns for rows, columns in grids]
        for block in self.blocks:
            x_pc = block(x_pc, cos_p1d, sin_p1d, lengths, attention)
            yield x_pc
