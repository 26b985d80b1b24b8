"""Where the patches of a grid are: learned positions and rotary angles, each made once for a grid and kept.

Both follow from the grid alone, and a video is many equal grids, so a pass over known grids computes nothing here. What
is kept is bounded by patches: whoever sends grids of every shape makes work and takes no memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from chiasm.layers.rope import inverse_frequencies, turns

Grid = tuple[int, int]
"""Patches of one frame: (rows, columns)."""

KEPT_PATCHES = 1 << 15
"""Patches of what is kept at a time: 57 frames of 512x288 pixels, or 4 of 1920x1088."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """The most recently used of what was made, of so many patches together at most. A larger one is not kept.

    Used by one thread at a time.
    """

    def __init__(self, most_patches: int = KEPT_PATCHES) -> None:
        self._most = most_patches
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.patches = 0

    def of(self, key: K, patches: int, make: Callable[[], V]) -> V:
        """What was made for `key`, or what `make` makes of so many patches."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found[0]
        made = make()
        if patches <= self._most:
            self._kept[key] = (made, patches)
            self.patches += patches
            while self.patches > self._most:
                _, (_, gone) = self._kept.popitem(last=False)
                self.patches -= gone
        return made

    def clear(self) -> None:
        self._kept.clear()
        self.patches = 0


def block_order(grid: Grid, merge: int) -> Tensor:
    """(2, patches) row and column of each patch in the order of the patch sequence: by merge block, row-major, then by
    row and column inside the block."""
    rows, columns = grid
    row = torch.arange(rows).view(-1, merge, 1, 1).expand(rows // merge, merge, columns // merge, merge)
    column = torch.arange(columns).view(1, 1, -1, merge).expand(rows // merge, merge, columns // merge, merge)
    return torch.stack([axis.permute(0, 2, 1, 3).reshape(-1) for axis in (row, column)])


class PositionEmbedding(nn.Module):
    """A square table of learned positions, interpolated bilinearly to any grid.

    The four corner weights are products of float32 fractions, cast to the table's type; the corners are summed in the
    order floor-floor, floor-ceil, ceil-floor, ceil-ceil.

    Args:
        align_corners: the patches of a grid's corners lie on the table's. Otherwise patches are squares that share the
            table's area evenly, and those beyond the middle of its outermost squares take what is there.
    """

    def __init__(
        self,
        side: int,
        channels: int,
        merge: int,
        *,
        align_corners: bool = True,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.side = side
        self.merge = merge
        self.align_corners = align_corners
        self.weight = nn.Parameter(torch.empty(side * side, channels, device=device, dtype=dtype))
        self._corners: Kept[Grid, tuple[Tensor, Tensor]] = Kept()

    def forward(self, grid: Grid) -> Tensor:
        """(P, C) embedding of one grid, in patch order."""
        index_4p, share_4p = self._corners.of(grid, grid[0] * grid[1], lambda: self.corners(grid))
        parts = self.weight[index_4p] * share_4p.to(self.weight.dtype).unsqueeze(-1)
        return parts[0] + parts[1] + parts[2] + parts[3]

    def corners(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """(4, P) rows of the table, and (4, P) float32 shares of them."""
        row, column = block_order(grid, self.merge)
        lows, highs, fractions = [], [], []
        for count, which in zip(grid, (row, column), strict=True):
            at = self._at(count)
            low = at.long()
            lows.append(low[which])
            highs.append(torch.clamp(low + 1, max=self.side - 1)[which])
            fractions.append((at - low)[which])
        corners = [(a, b) for a in (0, 1) for b in (0, 1)]
        pick = (lows, highs)
        index = torch.stack([pick[a][0] * self.side + pick[b][1] for a, b in corners])
        share = torch.stack(
            [(fractions[0] if a else 1 - fractions[0]) * (fractions[1] if b else 1 - fractions[1]) for a, b in corners]
        )
        return index.to(self.weight.device), share.to(self.weight.device)

    def _at(self, count: int) -> Tensor:
        """(count,) float32: where on one axis of the table so many patches lie."""
        if self.align_corners:
            return torch.linspace(0, self.side - 1, count, dtype=torch.float32)
        middle = torch.arange(count, dtype=torch.float32) + 0.5
        return (middle * (self.side / count) - 0.5).clamp(0, self.side - 1)


class VisionRope:
    """2-D rotary angles: the first half of the frequencies turns with the row, the second with the column."""

    def __init__(self, head_dim: int, theta: float, merge: int, *, device: torch.device) -> None:
        self.inverse = inverse_frequencies(head_dim // 2, theta, device=device)
        self.merge = merge

    def turns(self, grid: Grid) -> Tensor:
        """`rope.turns`, (P, 1, D / 2) complex64, of one grid in patch order."""
        at_2p = block_order(grid, self.merge).to(self.inverse.device, torch.float32)
        angles = torch.cat([axis.unsqueeze(-1) * self.inverse for axis in at_2p], dim=-1)
        return turns(angles)


class Places(NamedTuple):
    """Of some grids, one after another, or of one of them if all are equal: then the p rows hold for every p patches.

    Attributes:
        positions_pc: (p, C) learned positions.
        turns_p1f: (p, 1, D / 2) rotations, complex64.
    """

    positions_pc: Tensor
    turns_p1f: Tensor


class GridPlaces:
    """`Places` of whatever grids go through a vision transformer together.

    They are kept while nothing is differentiated, and made anew once the learned positions have changed.
    """

    def __init__(self, embedding: PositionEmbedding, rope: VisionRope) -> None:
        self._embedding = embedding
        self._rope = rope
        self._kept: Kept[tuple[Grid, ...], Places] = Kept()
        self._made_of: tuple[object, ...] = ()

    @property
    def patches(self) -> int:
        """Patches of what is kept."""
        return self._kept.patches

    def of(self, grids: Sequence[Grid]) -> Places:
        """`Places` of these grids, which are not to be written to."""
        shown = tuple(grids[:1] if len(set(grids)) == 1 else grids)
        if torch.is_grad_enabled():
            return self._make(shown)
        weight = self._embedding.weight
        made_of = (weight.data_ptr(), weight.dtype, None if weight.is_inference() else weight._version)
        if made_of != self._made_of:
            self._kept.clear()
            self._made_of = made_of
        return self._kept.of(shown, sum(rows * columns for rows, columns in shown), lambda: self._make(shown))

    def _make(self, grids: Sequence[Grid]) -> Places:
        positions = [self._embedding(grid) for grid in grids]
        turns = [self._rope.turns(grid) for grid in grids]
        return Places(*(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (positions, turns)))
