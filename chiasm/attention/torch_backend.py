"""The attention of serving on any torch device: paged self-attention, cross-attention by row boundaries.

What is attended together is planned in `self_plan` and `cross_plan`, once per step; the products are those of
`kernel`. Here places become indices and runs become views. Masks are made where they are used and thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.attention import dense
from chiasm.attention.backend import Step
from chiasm.attention.cross_plan import Block, Runs, pieces, plan_cross
from chiasm.attention.kernel import attend, fold, merge, single, unfold
from chiasm.attention.pages import Pools, Run
from chiasm.attention.self_plan import Padded, SelfPlan, plan_self

SOME_ROWS = range(16, 128)
"""Rows for which keys are taken in pieces of `PIECE`: what the kernel prepares of a piece is then still in the core's
cache when it is used. Measured on CPU this saves up to a third from 64 to 512 folded rows and nothing elsewhere."""

PIECE = 1024
LARGE_PIECE = 16384
"""Keys of a piece for that many rows, and for fewer or more. What lies scattered is copied together up to this size."""


class TorchVarlen:
    """`VarlenAttention` on torch's own kernels."""

    def varlen(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, lengths: Sequence[int], *, causal: bool) -> Tensor:
        return dense.varlen(q_nhd, k_nkd, v_nkd, lengths, causal=causal)


class TorchAttention(TorchVarlen):
    """`Attention` over `Pools`."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._device = pools.self_kv.device
        self._kv_heads, self._dim = pools.self_kv.shape[3:]
        self._scratch = torch.empty(0, dtype=pools.self_kv.dtype, device=self._device)
        self._self = SelfPlan(np.zeros(0, dtype=np.int64))
        self._written = torch.empty(0, dtype=torch.long, device=self._device)
        self._before: list[slice | Tensor] = []
        self._viewed: list[_View] = []
        self._alone: _View | None = None
        self._padded: list[_Batch] = []
        self._cross: list[_Block] = []

    def plan(self, step: Step) -> None:
        width = self._kv_heads * self._dim
        self._self = plan_self(step, page_size=self._pools.page_size, width=width)
        self._written = torch.from_numpy(self._self.written).to(self._device)
        self._before = [_places(part.before, self._device) for part in self._self.continued]
        self._viewed = [_View(one.context, self._pools.self_kv) for one in self._self.viewed]
        self._alone = self._viewed[0] if len(self._viewed) == step.rows == 1 else None
        self._padded = [_Batch(part, self._pools.self_kv) for part in self._self.padded]
        self._cross = [_Block(block, self._device) for block in plan_cross(step)]

    def attend_self(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, *, layer: int) -> Tensor:
        if self._alone is not None:
            return self._alone.attend(q_nhd, k_nkd, v_nkd, layer)
        kv = self._pools.self_kv[layer]
        kv[0].index_copy_(0, self._written, k_nkd)
        kv[1].index_copy_(0, self._written, v_nkd)
        if len(self._padded) == 1 and self._padded[0].whole:
            return self._look_padded(q_nhd, self._padded[0], kv)
        out = torch.empty_like(q_nhd)
        for whole in self._self.fresh:
            q, k, v = (x[whole.start : whole.stop] for x in (q_nhd, k_nkd, v_nkd))
            out[whole.start : whole.stop] = dense.varlen(q, k, v, whole.lengths, causal=True)
        for part, before in zip(self._self.continued, self._before, strict=True):
            rows = slice(part.start, part.stop)
            out[rows] = self._continue(q_nhd[rows], k_nkd[rows], v_nkd[rows], kv[:, before])
        for one, view in zip(self._self.viewed, self._viewed, strict=True):
            out[one.row] = view.look(q_nhd[one.row], layer)
        for batch in self._padded:
            out[batch.rows] = self._look_padded(q_nhd[batch.rows], batch, kv)
        return out

    def attend_cross(self, q_nhd: Tensor, *, layer: int) -> Tensor:
        kv = self._pools.cross_kv[layer]
        out = torch.zeros_like(q_nhd)
        for block in self._cross:
            q = fold(q_nhd[block.rows], self._kv_heads)
            parts = [attend(q.unsqueeze(0), *_attached(kv, piece)) for piece in block.shared]
            if block.diagonal:
                k, v = _attached(kv, block.diagonal)
                hidden = torch.arange(k.shape[2], device=q.device) >= block.seen.unsqueeze(1)
                bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -math.inf)
                group = q.shape[1] // bias.shape[0]
                parts.append(attend(q.unsqueeze(0), k, v, bias=bias.repeat_interleave(group, dim=0)))
            out[block.rows] = unfold(merge(parts)[0], block.count)
        return out

    def _look_padded(self, q_bhd: Tensor, batch: _Batch, kv: Tensor) -> Tensor:
        """(B, H, D) of single rows, each over its own part of (K|V, rows, K, D)."""
        k, v = self._gather(kv, batch.slots).transpose(2, 3)
        return attend(single(q_bhd, self._kv_heads, k.shape[2]), k, v, bias=batch.bias)[0].flatten(1, 2)

    def _continue(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, before: Tensor) -> Tensor:
        """(N, H, D) of rows that see (K|V, rows, K, D) earlier ones whole, and each other causally."""
        k, v = before.transpose(1, 2).unsqueeze(1)
        out, lse = attend(fold(q_nhd, self._kv_heads).unsqueeze(0), k, v)
        rows = q_nhd.shape[0]
        earlier = unfold(out[0], rows), unfold(lse[0].unsqueeze(-1), rows).squeeze(-1)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_nhd, k_nkd, v_nkd))
        out, lse = attend(q, k, v, causal=True)
        return merge([earlier, (out[0].transpose(0, 1), lse[0].transpose(0, 1))])

    def _gather(self, kv: Tensor, slots_bs: Tensor) -> Tensor:
        """(K|V, B, S, K, D) of (B, S) rows of (K|V, rows, K, D) keys and values, in memory the next call reuses."""
        size = 2 * slots_bs.numel() * self._kv_heads * self._dim
        if self._scratch.numel() < size:
            with torch.inference_mode(False):  # it outlives the mode of this call
                self._scratch = torch.empty(size, dtype=kv.dtype, device=kv.device)
        gathered = self._scratch[:size].view(2, -1, self._kv_heads, self._dim)
        torch.index_select(kv, 1, slots_bs.flatten(), out=gathered)
        return gathered.view(2, *slots_bs.shape, *gathered.shape[2:])


class _View:
    """What a single row sees, in place, of all layers: looked up once a step, since a decode step of one row consists
    of many small calls.

    Args:
        context: its sequence's rows, itself the last.
        kv: (layers, K|V, rows, K, D).
    """

    def __init__(self, context: Run, kv: Tensor) -> None:
        end = sum(context)
        self._kv_heads, self._dim = kv.shape[3:]
        self._keys = context.length
        self._seen = kv[:, :, context.start : end].transpose(2, 3).unsqueeze(2).flatten(0, 1).unbind()
        self._own = kv[:, :, end - 1 : end].flatten(0, 1).unbind()

    def attend(self, q_1hd: Tensor, k_1kd: Tensor, v_1kd: Tensor, layer: int) -> Tensor:
        """As `TorchAttention.attend_self` for a step of this row alone."""
        at = 2 * layer
        self._own[at].copy_(k_1kd)
        self._own[at + 1].copy_(v_1kd)
        queries = single(q_1hd, self._kv_heads, self._keys)
        return attend(queries, self._seen[at], self._seen[at + 1])[0].view(1, -1, self._dim)

    def look(self, q_hd: Tensor, layer: int) -> Tensor:
        """(H, D) of the row's queries."""
        queries = single(q_hd.unsqueeze(0), self._kv_heads, self._keys)
        return attend(queries, self._seen[2 * layer], self._seen[2 * layer + 1])[0].view(q_hd.shape)


class _Batch:
    """`Padded` as tensors: places (B,), slots (B, S), and what is added to (B, 1, 1, S) scores to hide the padding."""

    def __init__(self, padded: Padded, kv: Tensor) -> None:
        self.rows = _places(padded.rows, kv.device)
        self.whole = padded.whole
        self.slots = torch.from_numpy(padded.slots).to(kv.device)
        hidden = np.arange(padded.slots.shape[1]) >= padded.lengths[:, None]
        self.bias: Tensor | None = None
        if hidden.any():
            hidden_b11s = torch.from_numpy(hidden)[:, None, None].to(kv.device)
            self.bias = torch.zeros(hidden_b11s.shape, dtype=kv.dtype, device=kv.device)
            self.bias.masked_fill_(hidden_b11s, -math.inf)


class _Block:
    """`Block` with its places as tensors."""

    def __init__(self, block: Block, device: torch.device) -> None:
        self.rows = _places(block.rows, device)
        self.count = len(block.rows)
        self.shared = pieces(block.shared, PIECE if self.count in SOME_ROWS else LARGE_PIECE)
        self.diagonal = block.diagonal
        self.seen = torch.from_numpy(block.seen).to(device)


def _places(places: Run | npt.NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """What indexes a tensor: a slice, which is a view, where the places are neighbours."""
    if isinstance(places, Run):
        return slice(places.start, sum(places))
    if (places[1:] - places[:-1] == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return torch.from_numpy(places).to(device)


def _attached(kv: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """(1, K, S, D) keys and values of a cross layer's (K|V, K, slots, D): a view if the slots are one run."""
    parts = [kv[:, :, run.start : sum(run)] for run in runs]
    both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return both[0].unsqueeze(0), both[1].unsqueeze(0)
