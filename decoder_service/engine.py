"""The decoder half on its device: entries attached, steps computed, both pools accounted for.

It knows sequences, pools and the model. It knows no request and no wire. Its methods run in one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from chiasm.attention.backend import Step
from chiasm.attention.pages import ExtentAllocator, PageAllocator, Pools
from chiasm.attention.torch_backend import TorchAttention
from chiasm.models.family import DecoderHalf, Processor
from chiasm.timeline import UnitName
from decoder_service.sequence import DecodeSequence, Extent


class Work(NamedTuple):
    """A sequence's share of a step: its next `rows` rows, and which of their logits are wanted."""

    sequence: DecodeSequence
    rows: int
    logits: Literal["none", "last", "all"]


def token_bytes(half: DecoderHalf) -> tuple[int, int]:
    """Bytes of one text token in the self pool, and of one visual token in the cross pool."""
    per_layer = 2 * half.kv_heads * half.head_dim * half.dtype.itemsize
    return half.self_layers * per_layer, half.entry_shape.layers * per_layer


def pool_tokens(half: DecoderHalf, *, text: int | None, visual: int | None, most_bytes: int) -> tuple[int, int]:
    """Tokens of the self pool and of the cross pool: those asked for, else four contexts within `most_bytes` each."""
    wanted = 4 * half.max_positions
    per_text, per_visual = token_bytes(half)
    return text or min(wanted, most_bytes // per_text), visual or min(wanted, most_bytes // per_visual)


class DecoderEngine:
    """One model on one device with its two pools.

    Args:
        text_tokens: what the self pool holds, over all sequences.
        visual_tokens: what the cross pool holds.
        page_size: text tokens of a page.
    """

    def __init__(
        self,
        half: DecoderHalf,
        processor: Processor,
        *,
        text_tokens: int,
        visual_tokens: int,
        page_size: int = 16,
    ) -> None:
        self.half = half
        self.processor = processor
        pages = -(-text_tokens // page_size)
        self.pages = PageAllocator(pages, page_size)
        self.extents = ExtentAllocator(visual_tokens)
        self.pools = Pools(
            self_layers=half.self_layers,
            cross_layers=half.entry_shape.layers,
            pages=pages,
            page_size=page_size,
            slots=visual_tokens,
            kv_heads=half.kv_heads,
            head_dim=half.head_dim,
            device=half.device,
            dtype=half.dtype,
        )
        self._attention = TorchAttention(self.pools)

    def sequence(self) -> DecodeSequence:
        """A new, empty sequence of this model."""
        return DecodeSequence(self.processor.unit_layout)

    @torch.inference_mode()
    def attach(self, sequence: DecodeSequence, name: UnitName, payload: Tensor) -> None:
        """Rotates a laid unit's keys to its place and copies it into the cross pool.

        Args:
            payload: (layers, K|V, heads, tokens, dim), verified.

        Raises Overloaded if the pool has no room now; nothing is then changed.
        """
        unit = sequence.timeline.find(name)
        sized = sequence.sized(name.slot)
        assert unit is not None and sized is not None, f"{name} is not laid"
        length = unit.layout.vision_tokens
        assert payload.shape[3] == length, f"{payload.shape[3]} tokens are attached where {length} are laid"
        positions = torch.from_numpy(self.processor.key_steps(sized.grids[name.unit]) + unit.start)
        runs = self.extents.take(length)
        placed = self.half.place(payload.to(self.half.device), positions)
        at = 0
        for run in runs:
            self.pools.cross_kv[:, :, :, run.start : sum(run)] = placed[:, :, :, at : at + run.length]
            at += run.length
        sequence.attach(name, Extent(tuple(runs), unit.start))

    @torch.inference_mode()
    def step(self, batch: Sequence[Work]) -> list[Tensor]:
        """Computes the next rows of several sequences. Returns, for each, (wanted rows, vocabulary) logits in float32.

        Raises Overloaded if the self pool has no pages for all of them; nothing is then computed, and no page is taken.
        """
        self._take_pages(batch)
        step = Step([work.sequence.rows(work.rows) for work in batch])
        ids = [i for w in batch for i in w.sequence.timeline.ids(w.sequence.computed, w.sequence.computed + w.rows)]
        positions = np.concatenate(
            [w.sequence.timeline.positions(w.sequence.computed, w.sequence.computed + w.rows) for w in batch], axis=1
        )
        sees = step.sees()
        wanted, counts = _wanted(batch)
        device = self.half.device
        self._attention.plan(step)
        logits = self.half.forward(
            torch.tensor(ids, device=device),
            torch.from_numpy(positions).to(device),
            torch.from_numpy(sees).to(device) if sees.any() else None,
            torch.tensor(wanted, dtype=torch.long, device=device),
            self._attention,
        )
        for work in batch:
            work.sequence.computed += work.rows
        return list(logits.to(torch.promote_types(logits.dtype, torch.float32)).split(counts))

    def detach_moved(self, sequence: DecodeSequence) -> list[UnitName]:
        """Frees units that were laid again elsewhere; they must be attached anew. Returns their names."""
        moved = sequence.detach_moved()
        for extent in moved.values():
            self.extents.give_back(extent.runs)
        return list(moved)

    def release(self, sequence: DecodeSequence) -> None:
        """Gives back everything a sequence holds. May be called twice."""
        self.pages.release(sequence.pages)
        for extent in sequence.detach_all():
            self.extents.give_back(extent.runs)
        sequence.computed = 0

    def _take_pages(self, batch: Sequence[Work]) -> None:
        held = [len(work.sequence.pages) for work in batch]
        try:
            for work in batch:
                self.pages.grow(work.sequence.pages, work.sequence.computed + work.rows)
        except BaseException:
            for work, count in zip(batch, held, strict=True):
                taken = work.sequence.pages[count:]
                del work.sequence.pages[count:]
                self.pages.release(taken)
            raise


def _wanted(batch: Sequence[Work]) -> tuple[list[int], list[int]]:
    """Rows of the step whose logits are wanted, and how many of them belong to each sequence."""
    rows: list[int] = []
    counts: list[int] = []
    at = 0
    for work in batch:
        first = {"none": at + work.rows, "last": at + work.rows - 1, "all": at}[work.logits]
        rows.extend(range(first, at + work.rows))
        counts.append(at + work.rows - first)
        at += work.rows
    return rows, counts
