"""The attention of serving on any torch device: paged self-attention, cross-attention by row boundaries.

A row's mask is two integers. Rows in a row with equal boundaries form a segment that attends to one unmasked slice of
the visual tokens, so no mask over rows and keys is ever built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chiasm.attention import dense
from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.pages import Pools


class TorchVarlen:
    """`VarlenAttention` on torch's own kernels."""

    def varlen(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, lengths: Sequence[int], *, causal: bool) -> Tensor:
        return dense.varlen(q_nhd, k_nkd, v_nkd, lengths, causal=causal)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows [start, stop) of the step that see vision tokens [first, last) of their sequence."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Planned:
    """One sequence's share of the plan: its rows [start, stop) of the step, its rows in the self pool, its mask."""

    start: int
    stop: int
    slots: Tensor  # (context,) rows of the self pool, in order, the new ones last
    mask: Tensor | None  # (new rows, context), only where new rows attend causally to each other and to older ones
    base: int  # vision token with which the extents begin; no row of the step sees one before it
    extents: list[tuple[int, int]]  # (slot, length) runs of the cross pool
    segments: list[_Segment]


class TorchAttention(TorchVarlen):
    """`Attention` over `Pools`."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._planned: list[_Planned] = []
        self._written = torch.empty(0, dtype=torch.long)

    def plan(self, step: Step) -> None:
        planned, written = [], []
        at = 0
        for sequence in step.sequences:
            slots = self._slots(sequence)
            base, extents = _merge_extents(sequence.extents)
            segments = _segments(sequence, at)
            attached = base + sum(length for _, length in extents)
            assert all(base <= s.first and s.last <= attached for s in segments), "a row sees what is not attached"
            written.append(slots[sequence.start :])
            planned.append(
                _Planned(
                    start=at,
                    stop=at + sequence.rows,
                    slots=slots,
                    mask=self._causal_mask(sequence, slots.device),
                    base=base,
                    extents=extents,
                    segments=segments,
                )
            )
            at += sequence.rows
        self._planned = planned
        self._written = torch.cat(written) if written else torch.empty(0, dtype=torch.long)

    def attend_self(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, *, layer: int) -> Tensor:
        keys, values = self._pools.self_kv[layer]
        keys[self._written] = k_nkd
        values[self._written] = v_nkd
        out = torch.empty_like(q_nhd)
        for part in self._planned:
            q, k, v = (
                x.transpose(0, 1).unsqueeze(0)
                for x in (q_nhd[part.start : part.stop], keys[part.slots], values[part.slots])
            )
            fresh = part.mask is None and part.stop - part.start > 1
            mixed = dense.grouped_attention(q, k, v, mask=part.mask, causal=fresh)
            out[part.start : part.stop] = mixed[0].transpose(0, 1)
        return out

    def attend_cross(self, q_nhd: Tensor, *, layer: int) -> Tensor:
        out = torch.zeros_like(q_nhd)
        for part in self._planned:
            if not part.segments:
                continue
            k_ksd, v_ksd = self._attached(part.extents, layer)
            for segment in part.segments:
                q = q_nhd[segment.start : segment.stop].transpose(0, 1).unsqueeze(0)
                k, v = (x[:, segment.first - part.base : segment.last - part.base].unsqueeze(0) for x in (k_ksd, v_ksd))
                out[segment.start : segment.stop] = dense.grouped_attention(q, k, v)[0].transpose(0, 1)
        return out

    def _attached(self, extents: list[tuple[int, int]], layer: int) -> tuple[Tensor, Tensor]:
        """(kv heads, vision tokens, dim) keys and values of a sequence: a view where its units lie side by side."""
        parts = [self._pools.cross_kv[layer, :, :, slot : slot + length] for slot, length in extents]
        both = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return both[0], both[1]

    def _slots(self, sequence: SequenceRows) -> Tensor:
        size = self._pools.page_size
        rows = np.arange(sequence.start + sequence.rows)
        slots = np.asarray(sequence.pages, dtype=np.int64)[rows // size] * size + rows % size
        return torch.from_numpy(slots).to(self._pools.self_kv.device)

    @staticmethod
    def _causal_mask(sequence: SequenceRows, device: torch.device) -> Tensor | None:
        """None where the kernel's own causal flag says it (a whole prefill) or nothing is hidden (a single row)."""
        if sequence.start == 0 or sequence.rows == 1:
            return None
        row = torch.arange(sequence.rows, device=device).unsqueeze(1) + sequence.start
        return torch.arange(sequence.start + sequence.rows, device=device) <= row


def _merge_extents(extents: Sequence[tuple[int, int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """The first vision token, and (slot, length) runs: extents that are neighbours in the pool as well are joined."""
    merged: list[tuple[int, int]] = []
    base = expected = extents[0][0] if extents else 0
    for first, slot, length in extents:
        assert first == expected, f"vision tokens {expected} to {first} are not attached"
        expected += length
        if merged and sum(merged[-1]) == slot:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((slot, length))
    return base, merged


def _segments(sequence: SequenceRows, at: int) -> list[_Segment]:
    """Runs of rows with equal boundaries; rows that see nothing are in none."""
    spans = sequence.boundaries
    if not len(spans):
        return []
    cuts = np.flatnonzero(np.any(spans[1:] != spans[:-1], axis=1)) + 1
    starts = [0, *cuts.tolist()]
    stops = [*cuts.tolist(), len(spans)]
    return [
        _Segment(at + start, at + stop, int(spans[start, 0]), int(spans[start, 1]))
        for start, stop in zip(starts, stops, strict=True)
        if spans[start, 1] > spans[start, 0]
    ]
