"""Attention whose result for a row depends on that row and on what it sees, bit by bit, and on nothing else.

Not on the other rows of the step, nor on how a prefill was cut, nor on where in the pools keys lie. Every product has
one of a few shapes, found to agree when the backend is made (`agreeing`); everything between the products is exact, of
one number alone, or a sum along one block of one row. A row's largest score over all of its blocks is found first,
which takes no rounding; so no block is weighed anew when a further one comes, and blocks a row does not see add zeros.

Blocks are summed in the order of their keys. All of it is computed in float32 at least, whatever the pools hold.

Shape suffixes: T items or tiles of a call, K key heads, R rows of a tile, G query heads that share a key head,
M = R * G, S = `BLOCK` keys, D head dimension; N rows of a step, H = K * G query heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from chiasm.attention.agreeing import agreeing
from chiasm.attention.backend import Step
from chiasm.attention.invariant_plan import BLOCK, Looking, Tiles, look_across, look_back, plan_tiles
from chiasm.attention.pages import Pools
from chiasm.attention.torch_backend import TorchVarlen

FOLDED = (16, 128)
"""Rows of the products, at least, over few rows and over many. With 16 and more, and `BLOCK` keys, the results of MKL
were those of 256 in float32 and float64 on 1 and 2 threads; with 3 and fewer they were not."""

ITEMS = (1, 4, 16, 64)
"""Products that are computed in one call."""

SCORES = 1 << 24
"""Scores that are kept at once, where a tile has no more: 64 MB in float32."""


class InvariantAttention(TorchVarlen):
    """`Attention` over `Pools`. Rows beyond those of the step may follow; they come out zero.

    Args:
        heads: query heads.

    Raises SettingsError where no product of fixed shape is what it should be.
    """

    def __init__(self, pools: Pools, *, heads: int) -> None:
        self._pools = pools
        self._device = pools.self_kv.device
        self._kv_heads, self._dim = pools.self_kv.shape[3:]
        self._group = heads // self._kv_heads
        self._wide = torch.promote_types(pools.self_kv.dtype, torch.float32)
        heights = sorted({-(-folded // self._group) for folded in FOLDED})
        shapes = agreeing([(height, items) for height in heights for items in ITEMS], self._problem)
        self._items = {height: [items for of, items in shapes if of == height] for height in heights}
        self._heights = [height for height in heights if 1 in self._items[height]]
        self._rows = 0
        self._written = torch.empty(0, dtype=torch.long, device=self._device)
        self._own: list[_Tiles] = []
        self._crossed: list[_Tiles] = []

    def plan(self, step: Step) -> None:
        back = look_back(step, self._pools.page_size)
        self._rows = step.rows
        slots = [torch.from_numpy(one.slots[len(one.slots) - len(one.rows) :]) for one in back]
        self._written = torch.cat([*slots, torch.empty(0, dtype=torch.long)]).to(self._device)
        heads, slots_total = self._kv_heads, self._pools.cross_kv.shape[3]
        self._own = self._planned(back, slot=heads, head=1)
        self._crossed = self._planned(look_across(step), slot=1, head=slots_total)

    def _planned(self, looking: list[Looking], *, slot: int, head: int) -> list[_Tiles]:
        """Tiles over a pool in whose rows one slot, one head further is so many rows further."""
        most = SCORES // (self._kv_heads * self._group * BLOCK)
        heads = torch.arange(self._kv_heads).unsqueeze(1) * head
        return [
            _Tiles(tiles, torch.from_numpy(tiles.slots).unsqueeze(1) * slot + heads, self._device)
            for tiles in plan_tiles(looking, self._heights, most)
        ]

    def attend_self(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, *, layer: int) -> Tensor:
        keys, values = self._pools.self_kv[layer]
        keys.index_copy_(0, self._written, k_nkd[: self._rows])
        values.index_copy_(0, self._written, v_nkd[: self._rows])
        return self._attend(q_nhd, keys, values, self._own)

    def attend_cross(self, q_nhd: Tensor, *, layer: int) -> Tensor:
        keys, values = self._pools.cross_kv[layer]
        return self._attend(q_nhd, keys, values, self._crossed)

    def _attend(self, q_nhd: Tensor, keys: Tensor, values: Tensor, planned: list[_Tiles]) -> Tensor:
        """(N, H, D) over keys and values of two layers of a pool, in the order in which it keeps slots and heads."""
        out = torch.zeros_like(q_nhd)
        for tiles in planned:
            q = q_nhd[tiles.rows.flatten()].unflatten(0, tiles.rows.shape).unflatten(2, (self._kv_heads, self._group))
            q_tkmd = self._wider(q.transpose(1, 2)).flatten(2, 3).mul_(self._dim**-0.5)
            out_tkmd = self._over(q_tkmd, keys.flatten(0, 1), values.flatten(0, 1), tiles)
            split = out_tkmd.unflatten(2, (-1, self._group)).transpose(1, 2).flatten(2, 3)  # (T, R, H, D)
            out.index_copy_(0, tiles.places, split.flatten(0, 1)[tiles.full].to(out.dtype))
        return out

    def _over(self, q_tkmd: Tensor, keys: Tensor, values: Tensor, tiles: _Tiles) -> Tensor:
        """(T, K, M, D) of tiles over the rows of a pool, each of D numbers."""
        pieces = _pieces(len(tiles.tile_of), self._items[tiles.rows.shape[1]])
        scores = q_tkmd.new_empty(len(tiles.tile_of), *q_tkmd.shape[1:3], BLOCK)
        for piece in pieces:
            scores[piece] = _scores(q_tkmd[tiles.tile_of[piece]], self._read(keys, tiles.read[piece]))
        if len(tiles.partly):
            some = scores[tiles.partly]
            some.unflatten(2, (-1, self._group)).masked_fill_(tiles.hidden[:, None, :, None], -math.inf)
            scores[tiles.partly] = some
        most = tiles.over_blocks(scores.amax(-1, keepdim=True), torch.maximum)
        totals, outs = scores.new_empty(*scores.shape[:3], 1), scores.new_empty(*scores.shape[:3], self._dim)
        for piece in pieces:
            v_tksd = self._read(values, tiles.read[piece])
            totals[piece], outs[piece] = _weighed(scores[piece], most[tiles.tile_of[piece]], v_tksd)
        return tiles.over_blocks(outs, torch.add) / tiles.over_blocks(totals, torch.add)

    def _read(self, pool: Tensor, rows_tks: Tensor) -> Tensor:
        """(T, K, S, D) of a pool's rows, each of D numbers."""
        return pool.index_select(0, rows_tks.flatten()).to(self._wide).view(*rows_tks.shape, self._dim)

    def _wider(self, tensor: Tensor) -> Tensor:
        """A copy that lies in order."""
        return torch.empty(tensor.shape, dtype=self._wide, device=self._device).copy_(tensor)

    @torch.inference_mode()
    def _problem(self, shape: tuple[int, int], draw: int) -> Tensor:
        """(rows, numbers) of as many equal rows as a call of that many rows and items has."""
        rows, items = shape
        generator = torch.Generator().manual_seed(draw)
        q, k, v = (
            torch.randn(1, self._kv_heads, 1, count, self._dim, generator=generator, dtype=torch.float64)
            for count in (self._group, BLOCK, BLOCK)
        )
        q_tkmd = self._wider(q.expand(items, -1, rows, -1, -1)).flatten(2, 3)
        k_tksd, v_tksd = (self._wider(x.squeeze(2).expand(items, -1, -1, -1)) for x in (k, v))
        scores = _scores(q_tkmd.mul_(self._dim**-0.5), k_tksd)
        total, out = _weighed(scores, scores.amax(-1, keepdim=True), v_tksd)
        results = torch.cat([scores, out, total], dim=-1).view(items, self._kv_heads, rows, -1)
        return results.transpose(1, 2).reshape(items * rows, -1)


class _Tiles:
    """`Tiles` as tensors.

    Attributes:
        rows: (T, R) places in the step, any where a tile is not full.
        full: of all rows of all tiles, the numbers of those that are there. places: where in the step they are.
        tile_of: (items,) its tile. read: (items, K, S) rows of the pool, of D numbers each.
        partly: items of which some row does not see all. hidden: (partly, R, S) what a row of them does not see.
    """

    def __init__(self, tiles: Tiles, read: Tensor, device: torch.device) -> None:
        rows = torch.from_numpy(tiles.rows)
        hidden = torch.from_numpy(tiles.hidden)
        partly = hidden.flatten(1).any(1).nonzero().squeeze(1)
        self.rows = rows.clamp(min=0).to(device)
        self.full = (rows.flatten() >= 0).nonzero().squeeze(1).to(device)
        self.places = self.rows.flatten()[self.full]
        self.depths = tiles.depths
        self.tile_of = torch.cat([torch.arange(depth) for depth in tiles.depths]).to(device)
        self.read = read.to(device)
        self.partly = partly.to(device)
        self.hidden = hidden[partly].to(device)

    def over_blocks(self, items: Tensor, function: Callable[..., Tensor]) -> Tensor:
        """(T, ...) of (items, ...): what a function of two makes of each tile's blocks, from the first on."""
        parts = items.split(self.depths)
        result: Tensor = parts[0]
        for depth, part in zip(self.depths[1:], parts[1:], strict=True):
            function(result[:depth], part, out=result[:depth])
        return result


def _pieces(total: int, sizes: Sequence[int]) -> list[slice]:
    """Pieces of `total`, the largest of the rising sizes first; the least of them is 1."""
    pieces = []
    at = 0
    for size in reversed(sizes):
        while total - at >= size:
            pieces.append(slice(at, at + size))
            at += size
    return pieces


def _scores(q_tkmd: Tensor, k_tksd: Tensor) -> Tensor:
    """(T, K, M, S) products."""
    products = torch.bmm(q_tkmd.flatten(0, 1), k_tksd.flatten(0, 1).transpose(1, 2))
    return products.view(*q_tkmd.shape[:3], -1)


def _weighed(scores_tkms: Tensor, most_tkm1: Tensor, v_tksd: Tensor) -> tuple[Tensor, Tensor]:
    """(T, K, M, 1) sums of the exponentials of scores less `most`, and (T, K, M, D) sums of values weighed by them."""
    weights = (scores_tkms - most_tkm1).exp_()
    out = torch.bmm(weights.flatten(0, 1), v_tksd.flatten(0, 1))
    return weights.sum(-1, keepdim=True), out.view(*scores_tkms.shape[:3], -1)
