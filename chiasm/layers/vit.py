"""The vision transformer of the Qwen3-VL kind: patches in, patch features out, attention inside one grid only.

Everything here depends on pixels, grid and weights alone, which is why a unit can be encoded once and shared.
Shape suffixes: P patches of all grids of a call, p patches after which their places repeat, C channels, H heads,
D head dimension, F = D / 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from chiasm.attention.backend import VarlenAttention
from chiasm.layers.linear import linear, linear_gelu
from chiasm.layers.rope import paired, turn, turn_
from chiasm.layers.stack import Stack
from chiasm.layers.vit_places import Grid, GridPlaces, Places, PositionEmbedding, VisionRope

PIECE = 1 << 16
"""Numbers that are rotated at a time on a CPU."""


def rows_paired(channels: int, heads: int) -> tuple[int, ...]:
    """Which row of a checkpoint's q, k and v each row of `VisionAttention.qkv` is: in queries and keys the numbers that
    are rotated against each other lie side by side. A score is a sum over them, in whatever order."""
    dim = channels // heads
    within = paired(dim)
    both = (head * dim + number for head in range(2 * heads) for number in within)
    return (*both, *range(2 * channels, 3 * channels))


class VisionAttention(nn.Module):
    """Attention among the patches of one grid. q, k and v come from one product, whose rows are in the order of
    `rows_paired`; rotation in float32."""

    def __init__(self, channels: int, heads: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels, device=device, dtype=dtype)
        self.proj = nn.Linear(channels, channels, device=device, dtype=dtype)
        self._wide = torch.promote_types(dtype, torch.float32)

    def forward(self, x_pc: Tensor, turns_p1f: Tensor, lengths: Sequence[int], attention: VarlenAttention) -> Tensor:
        """(P, C) to (P, C); rotations as `Places` has them, `lengths` are the patches of each grid."""
        patches, channels = x_pc.shape
        both = 2 * self.heads
        qkv_phd = linear(self.qkv, x_pc).view(patches, both + self.heads, -1)
        qk_phd = self._rotated(qkv_phd[:, :both], turns_p1f)
        q_phd, k_phd = qk_phd.split_with_sizes((self.heads, self.heads), dim=1)
        mixed = attention.varlen(q_phd, k_phd, qkv_phd[:, both:], lengths, causal=False)
        return linear(self.proj, mixed.reshape(patches, channels))

    def _rotated(self, qk_phd: Tensor, turns_p1f: Tensor) -> Tensor:
        """(P, 2 H, D): queries and keys as one; the rotations of equal grids are one for all of them."""
        period = len(turns_p1f)
        qk = qk_phd.unflatten(0, (-1, period))
        if torch.is_grad_enabled() or not qk.is_cpu:
            return turn(qk.to(self._wide), turns_p1f).to(qk.dtype).flatten(0, 1)
        # Piece by piece what is wide stays in the core's cache: a third of the time at the released width.
        rotated = torch.empty(qk.shape, dtype=qk.dtype)
        rows = max(1, PIECE // qk[0, 0].numel())
        frames = max(1, rows // period)
        for at in range(0, period, rows):
            here = slice(at, at + rows)
            turns = turns_p1f[here]
            if frames > 1:  # used so often that a table for every head, which is read in one go, is soon paid for
                turns = turns.expand(-1, qk.shape[2], -1).contiguous()
            for some, out in zip(qk.split(frames), rotated.split(frames), strict=True):
                out[:, here] = turn_(some[:, here].to(self._wide, copy=True), turns)
        return rotated.flatten(0, 1)


class VisionMLP(nn.Module):
    """fc2(gelu(fc1(x))) with the tanh form of GELU."""

    def __init__(self, channels: int, intermediate: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(channels, intermediate, device=device, dtype=dtype)
        self.linear_fc2 = nn.Linear(intermediate, channels, device=device, dtype=dtype)

    def forward(self, x_pc: Tensor) -> Tensor:
        """(P, C) to (P, C)."""
        return linear(self.linear_fc2, linear_gelu(self.linear_fc1, x_pc, approximate="tanh"))


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

    def forward(self, x_pc: Tensor, turns_p1f: Tensor, lengths: Sequence[int], attention: VarlenAttention) -> Tensor:
        """(P, C) to (P, C); rotations as `Places` has them, and the patches of each grid in `lengths`."""
        # Into what was just made: the input may be a tap, which its owner keeps.
        x_pc = self.attn(self.norm1(x_pc), turns_p1f, lengths, attention).add_(x_pc)
        out: Tensor = self.mlp(self.norm2(x_pc)).add_(x_pc)
        return out


class VisionTransformer(nn.Module):
    """Patch embedding, positions and blocks.

    Args:
        values: numbers of one patch: channels * time * height * width of the kernel.
        side: side of the square table of learned positions.
        merge: side of a merge block, which fixes the order of the patches.
        align_corners: as of `PositionEmbedding`.
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
        align_corners: bool = True,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(values, channels, device=device, dtype=dtype)
        self.pos_embed = PositionEmbedding(
            side, channels, merge, align_corners=align_corners, device=device, dtype=dtype
        )
        self.blocks = Stack(
            VisionBlock(channels, intermediate, heads, eps=eps, device=device, dtype=dtype) for _ in range(depth)
        )
        self.rope = VisionRope(channels // heads, rope_theta, merge, device=device)
        self.places = GridPlaces(self.pos_embed, self.rope)

    def forward(self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention) -> Iterator[Tensor]:
        """Yields the (P, C) output of every block in turn, for (P, values) patches of `grids`, one after another.

        A generator, so that a caller keeps the taps it wants and no others.
        """
        lengths = [rows * columns for rows, columns in grids]
        yield from self.at(patches_pv, self.places.of(grids), lengths, attention)

    def at(
        self, patches_pv: Tensor, places: Places, lengths: Sequence[int], attention: VarlenAttention
    ) -> Iterator[Tensor]:
        """As `forward`, with the places of the patches given."""
        embedded = linear(self.patch_embed, patches_pv).unflatten(0, (-1, len(places.positions_pc)))
        x_pc: Tensor = embedded.add_(places.positions_pc).flatten(0, 1)
        for block in self.blocks:
            x_pc = block(x_pc, places.turns_p1f, lengths, attention)
            yield x_pc
