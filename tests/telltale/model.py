"""Both halves of the tell-tale model, in the places of a checkpoint's own: everything around them is the services'.

Words, template, sizes of pictures and how units lie are those of the digits' checkpoint; no weight of it is used.
Entries are keyed, sealed, kept, announced, read, verified, attached, paged, shared and scheduled as they always are,
and tokens are drawn by the sampler. Only what a transformer would compute is another function (`telling`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from chiasm.attention.backend import Attention, SequenceRows, Step, VarlenAttention
from chiasm.attention.choose import AttentionName
from chiasm.attention.pages import Pools
from chiasm.cache.form import Form
from chiasm.cache.tenant import owner
from chiasm.media.types import Rgb
from chiasm.models.family import DecoderHalf, EncoderHalf, EntryShape, MediumPlan, Overlay, Trunk
from chiasm.models.registry import SHIPPED, Model
from chiasm.models.streaming import Streaming
from decoder_service.engine import DecoderEngine
from decoder_service.forward import Forward, Ints
from encoder_service.engine import EncoderEngine
from encoder_service.flights import Unit
from tests.telltale import telling

CHECKPOINT = SHIPPED / "digits"
NAME = CHECKPOINT.name

_POSITIONS = 8192
"""Text tokens of a context."""


class TellingEncoder:
    """`EncoderHalf`. Frames carry their tenant, which `TellingEngine` has noted on them."""

    device = torch.device("cpu")
    dtype = torch.float32
    head_dim = 16

    def __init__(self, shape: EntryShape, fingerprint: str, patch: int, merge: int) -> None:
        self.entry_shape = shape
        self._fingerprint = fingerprint
        self._side = patch * merge

    def encode(self, units: Sequence[Tensor], attention: VarlenAttention, trunk: Trunk | None = None) -> list[Tensor]:
        return [self._entry(unit) for unit in units]

    def encode_states(
        self, units: Sequence[Tensor], attention: VarlenAttention, trunk: Trunk | None = None
    ) -> list[Tensor]:
        raise NotImplementedError("it makes keys and values alone")

    def largest_tensor(self, patches: int, units: int) -> int:
        return patches + units

    def _entry(self, unit: Tensor) -> Tensor:
        (frame,), tenant = unit, unit.tenant  # type: ignore[attr-defined]
        _, height, width = frame.shape
        tokens = (height // self._side) * (width // self._side) + 1
        return torch.from_numpy(
            telling.entry(frame.numpy(), self._fingerprint, tenant, self.entry_shape.of(tokens, Form.CROSS_KV))
        )


class TellingEngine(EncoderEngine):
    """The encoder's engine, which tells its half whose a frame is."""

    def _prepare(self, frames: Sequence[Rgb], plan: MediumPlan, root: bytes, form: Form) -> Unit:
        unit = super()._prepare(frames, plan, root, form)
        unit.pixels.tenant = owner(root)  # type: ignore[attr-defined]
        return unit


class TellingDecoder:
    """`DecoderHalf`, of which only `place` computes: rows are computed by `TellingForward`."""

    device = torch.device("cpu")
    dtype = torch.float32
    projects = False
    headed = True
    width = 1
    max_positions = _POSITIONS

    def __init__(
        self, shape: EntryShape, *, layers: int, heads: int, vocabulary: int, end: int, banned: Sequence[int]
    ) -> None:
        self.entry_shape = shape
        self.layers_total = layers
        self.self_layers = 1
        self.heads = heads
        self.kv_heads = shape.heads
        self.head_dim = shape.dim
        self.vocab_size = vocabulary
        self.end = end
        self.banned = banned

    def project(self, states: Tensor) -> Tensor:
        raise NotImplementedError("it takes keys and values alone")

    def place(self, entry: Tensor, positions_3t: Tensor) -> Tensor:
        placed = entry.clone()
        placed[:, 0] += torch.from_numpy(telling.shift(positions_3t.numpy(), self.head_dim))
        return placed

    def forward(
        self,
        ids_n: Tensor,
        positions_3n: Tensor,
        sees_n: Tensor | None,
        logits_at: Tensor,
        attention: Attention,
        overlay: Overlay | None = None,
    ) -> Tensor:
        raise NotImplementedError("rows are computed from the pools themselves")

    def states_after(self, layers: Sequence[int], *arguments: Any, **named: Any) -> list[Tensor]:
        raise NotImplementedError("rows are computed from the pools themselves")

    def normed(self, states_me: Tensor) -> Tensor:
        raise NotImplementedError("rows are computed from the pools themselves")

    logits = normed


class TellingForward:
    """`Forward` over the pools, read where a step says they are mapped.

    Args:
        pace: seconds of a step beyond what it takes.
    """

    def __init__(self, half: TellingDecoder, pools: Pools, pace: float) -> None:
        self._half = half
        self._page_size = pools.page_size
        self._cross = pools.cross_kv.numpy()
        numbers = telling.ROW_BYTES // pools.self_kv.element_size()
        self._rows = pools.self_kv[0, 0, :, 0, :numbers].numpy().view(np.uint8)  # (rows, ROW_BYTES)
        self._pace = pace

    def __call__(self, step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]) -> Tensor:
        if self._pace:
            time.sleep(self._pace)
        asked = iter([*wanted, -1])
        following = next(asked)
        scored: list[telling.Numbers] = []
        at = 0
        for one in step.sequences:
            places = self._places(one)
            self._compute(one, places, ids[at : at + one.rows], positions_3n[:, at : at + one.rows])
            while at <= following < at + one.rows:
                before = self._rows[places[: one.start + following - at + 1]].tobytes()
                scored.append(telling.scores(before, self._half.vocab_size, self._half.end, self._half.banned))
                following = next(asked)
            at += one.rows
        return torch.from_numpy(np.stack(scored) if scored else np.empty((0, self._half.vocab_size), np.float32))

    def states_after(
        self, layers: Sequence[int], step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]
    ) -> list[Tensor]:
        raise NotImplementedError("nobody asks it for states")

    def normed(self, states_me: Tensor) -> Tensor:
        raise NotImplementedError("nobody asks it for states")

    logits = normed

    def prepare(self) -> None:
        """Nothing."""

    def _places(self, one: SequenceRows) -> Ints:
        """Where the rows of a sequence lie in the self pool, from its first."""
        pages, size = np.array(one.pages, np.int64), self._page_size
        laid = (pages[:, None] * size + np.arange(size)).reshape(-1)
        assert len(laid) >= one.start + one.rows, f"{len(one.pages)} pages for {one.start + one.rows} rows"
        return cast(Ints, laid[: one.start + one.rows])

    def _compute(self, one: SequenceRows, places: Ints, ids: Sequence[int] | Ints, positions: Ints) -> None:
        looks = {(0, 0): telling.NOTHING}
        for number, (token, span) in enumerate(zip(ids, one.boundaries.tolist(), strict=True)):
            first, last = (0, 0) if span[0] == span[1] else span
            if (first, last) not in looks:
                looks[first, last] = telling.seen(self._cross[:, :, :, self._slots(one, first, last)])
            made = telling.row(int(token), positions[:, number].tolist(), looks[first, last])
            self._rows[places[one.start + number]] = np.frombuffer(made, np.uint8)

    def _slots(self, one: SequenceRows, first: int, last: int) -> Ints:
        """Slots of vision tokens [first, last), as far as extents name them."""
        slots = [
            np.arange(slot + max(first - at, 0), slot + min(last - at, length))
            for at, slot, length in one.extents
            if max(at, first) < min(at + length, last)
        ]
        return np.concatenate(slots) if slots else np.empty(0, np.int64)


class TellingModel(Model):
    """The digits' checkpoint with tell-tale halves."""

    def __init__(self) -> None:
        super().__init__(CHECKPOINT)

    def encoder(
        self,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        streaming: Streaming | None = None,
    ) -> EncoderHalf:
        vision = self.config.vision
        return TellingEncoder(
            self.entry_shape, self.checkpoint.fingerprint, vision.patch_size, vision.spatial_merge_size
        )

    def decoder(
        self,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        projects: bool = False,
        streaming: Streaming | None = None,
    ) -> DecoderHalf:
        text = self.config.text
        prompt = self.prompt()
        (end,) = prompt.stop_ids
        return TellingDecoder(
            self.entry_shape,
            layers=text.num_hidden_layers,
            heads=text.num_attention_heads,
            vocabulary=text.vocab_size,
            end=end,
            banned=sorted(prompt.banned_ids),
        )


def decoder_engine(*arguments: Any, pace: float = 0.0, **named: Any) -> DecoderEngine:
    """A decoder's engine over the pools of a tell-tale half. Arguments are those of `DecoderEngine`."""
    return DecoderEngine(*arguments, **named, forward=partial(_forward, pace=pace))


def _forward(
    half: DecoderHalf,
    pools: Pools,
    attention: AttentionName,
    *,
    graph_rows: int,
    compiled: bool,
    deterministic: bool,
    pace: float,
) -> Forward:
    assert isinstance(half, TellingDecoder), "it computes nothing that others would"
    return TellingForward(half, pools, pace)
