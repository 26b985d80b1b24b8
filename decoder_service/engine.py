"""The decoder half on its device: entries attached, steps computed, both pools accounted for.

It knows sequences, pools and the model; who holds what of the pools is `Holdings`. It knows no request and no wire.
`attach`, `step`, `offload` and `load` run in one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.attention.backend import Step
from chiasm.attention.choose import AttentionName
from chiasm.attention.pages import ExtentAllocator, PageAllocator, Pools, Run
from chiasm.cache.form import Form
from chiasm.models.family import DecoderHalf, Processor
from chiasm.models.forms import CODECS
from chiasm.models.offloading import captured, offloaded
from chiasm.models.residence import Residence
from chiasm.timeline import UnitName
from decoder_service.computing import MakeForward, make_forward
from decoder_service.forward import widened
from decoder_service.graphs import GraphForward
from decoder_service.holdings import Holdings
from decoder_service.prefix import Chain
from decoder_service.sequence import DecodeSequence


class Work(NamedTuple):
    """A sequence's share of a step: its next `rows` rows, and what is wanted of them.

    Attributes:
        wanted: the rows of which something is.
        states: it is their normed states, and not their logits.
        layers: it is their states after these layers, ascending, as the half computes them. Its rows need not be
            computed any further.
    """

    sequence: DecodeSequence
    rows: int
    wanted: Literal["none", "last", "all"]
    states: bool = False
    layers: tuple[int, ...] = ()


def token_bytes(half: DecoderHalf) -> tuple[int, int]:
    """Bytes of one text token in the self pool, and of one visual token in the visual pool."""
    per_layer, shape = 2 * half.kv_heads * half.head_dim * half.dtype.itemsize, half.entry_shape
    visual = shape.hidden * half.dtype.itemsize if shape.overlaid else shape.layers * per_layer
    return half.self_layers * per_layer, visual


def pool_tokens(half: DecoderHalf, *, text: int | None, visual: int | None, most_bytes: int) -> tuple[int, int]:
    """Tokens of the self pool and of the visual pool: those asked for, else four contexts within `most_bytes` each."""
    wanted = 4 * half.max_positions
    per_text, per_visual = token_bytes(half)
    return text or min(wanted, most_bytes // per_text), visual or min(wanted, most_bytes // per_visual)


class DecoderEngine:
    """One model on one device with its two pools.

    Args:
        text_tokens: what the self pool holds, over all sequences.
        visual_tokens: what the pool of keys and values, or of features, of visual tokens holds.
        page_size: text tokens of a page.
        attention: raises SettingsError for `flashinfer` where that cannot serve.
        graph_rows: the most rows of a step that may be a CUDA graph (`computing.make_forward`); 0 for none.
        compiled: torch compiles the half's arithmetic when a step of a kind first comes.
        forward: what makes that which computes the steps.
        deterministic: logits are the same, bit by bit, whatever else is computed, however a prefill is cut and wherever
            the pools keep what a row sees. For this device, number type and number of threads. Raises SettingsError
            where products of fixed shape do not give that.

    Attributes:
        holdings: who holds what of the two pools.
        deterministic: as it was asked for.
    """

    def __init__(
        self,
        half: DecoderHalf,
        processor: Processor,
        *,
        text_tokens: int,
        visual_tokens: int,
        page_size: int = 16,
        attention: AttentionName = "auto",
        graph_rows: int = 0,
        compiled: bool = False,
        deterministic: bool = False,
        forward: MakeForward = make_forward,
    ) -> None:
        self.half = half
        self.deterministic = deterministic
        self.residence = Residence.of(half)
        self.processor = processor
        pages = -(-text_tokens // page_size)
        self.pages = PageAllocator(pages, page_size)
        self.extents = ExtentAllocator(visual_tokens)
        self.holdings = Holdings(self.pages, self.extents)
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
            feature_width=half.entry_shape.hidden if half.entry_shape.overlaid else 0,
            spare=graph_rows > 0,
        )
        self._forward = forward(
            half, self.pools, attention, graph_rows=graph_rows, compiled=compiled, deterministic=deterministic
        )

    @property
    def captured(self) -> bool:
        """Whether steps are CUDA graphs, which read weights where they were: the weights must stay there."""
        return isinstance(self._forward, GraphForward)

    def offload(self) -> None:
        """Takes the weights off the device, between two steps. What the pools hold stays. Raises Unsupported
        OFFLOAD_CAPTURED where steps are CUDA graphs, and as `Residence.offload`."""
        if self.captured:
            raise captured()
        self.residence.offload()

    def load(self) -> None:
        """Brings them back. Raises as `Residence.load`."""
        self.residence.load()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Does what would else make the first steps wait. Takes nothing of the pools."""
        self._forward.prepare()

    def sequence(self, domain: bytes | None = None) -> DecodeSequence:
        """A new, empty sequence of this model.

        Args:
            domain: within which it shares what it holds (`prefix.domain_of`); None for one that shares nothing.
        """
        chain, overlaid = Chain(domain, self.pages.page_size), self.half.entry_shape.overlaid
        return DecodeSequence(self.processor.unit_layout, chain, overlaid=overlaid)

    @torch.inference_mode()
    def attach(self, sequence: DecodeSequence, name: UnitName, payload: Tensor, form: Form = Form.CROSS_KV) -> None:
        """Makes of a laid unit's entry what the steps read, and copies it into the visual pool, unless it is there:
        keys and values, the keys rotated to its place, or the features that lie over its placeholders.

        Args:
            payload: of the entry, verified, as its form has it.

        Raises Overloaded if the pool has no room now, Unavailable OFFLOADED if the weights are not on the device;
        nothing is then changed.
        """
        self._check()
        unit = sequence.timeline.find(name)
        sized = sequence.sized(name.slot)
        assert unit is not None and sized is not None, f"{name} is not laid"
        length = unit.layout.vision_tokens
        if not form.quantised:
            expected = self.half.entry_shape.of(length, form)
            assert tuple(payload.shape) == expected, f"{tuple(payload.shape)} is attached where {expected} is laid"
        if self.holdings.hold_unit(sequence, name):
            return  # another has attached it meanwhile
        with self.holdings.filling(sequence, name, length) as runs:
            entry = CODECS[form].decode(payload.to(self.half.device), self.half, length)
            if self.half.entry_shape.overlaid:
                _fill(self.pools.features, 0, runs, entry)
            else:
                positions = torch.from_numpy(self.processor.key_steps(sized.grids[name.unit]) + unit.start)
                _fill(self.pools.cross_kv, 3, runs, self.half.place(entry, positions))

    @torch.inference_mode()
    def step(self, batch: Sequence[Work]) -> list[Tensor]:
        """Computes the next rows of several sequences. Returns, for each, (wanted rows, vocabulary) logits, or (wanted
        rows, width) states, in float32 at least; or (layers, wanted rows, width) states as they were computed.

        Raises Overloaded if the self pool has no pages for all of them, Unavailable OFFLOADED if the weights are not on
        the device; nothing is then computed, and no page is taken.
        """
        self._check()
        self.holdings.grow((work.sequence, work.rows) for work in batch)
        step = Step([work.sequence.rows(work.rows) for work in batch])
        ids, positions = _rows(batch)
        wanted, counts = _wanted(batch)
        if any(work.states or work.layers for work in batch):
            found = self._untold(batch, step, ids, positions, wanted, counts)
        else:
            found = list(self._forward(step, ids, positions, wanted).split(counts))
        for work in batch:
            work.sequence.computed += work.rows
        return found

    def _untold(
        self,
        batch: Sequence[Work],
        step: Step,
        ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        wanted: Sequence[int],
        counts: Sequence[int],
    ) -> list[Tensor]:
        """What is wanted of a step of which not only logits are. The layers compute once for all, the norm and the head
        once for all who want them; behind the last layer that anybody needs nothing is computed."""
        depth = self.half.layers_total
        numbers = {number for work in batch for number in work.layers or (depth,)}
        layers = sorted(numbers)
        states = self._forward.states_after(layers, step, ids, positions, wanted)
        after = {number: one.split(counts) for number, one in zip(layers, states, strict=True)}
        finals = iter(self._normed([after[depth][i] for i, work in enumerate(batch) if not work.layers]))
        found = [
            torch.stack([after[number][i] for number in work.layers]) if work.layers else next(finals)
            for i, work in enumerate(batch)
        ]
        heads = iter(self._headed([one for one, work in zip(found, batch, strict=True) if _told(work)]))
        return [
            next(heads) if _told(work) else one if work.layers else widened(one)
            for one, work in zip(found, batch, strict=True)
        ]

    def _normed(self, states: Sequence[Tensor]) -> Sequence[Tensor]:
        """(rows, width) after the last layer of several sequences, normed."""
        if not any(map(len, states)):
            return states
        return [*self._forward.normed(torch.cat([*states])).split([*map(len, states)])]

    def _headed(self, states: Sequence[Tensor]) -> Sequence[Tensor]:
        """(rows, vocabulary) logits of (rows, width) normed states of several sequences."""
        if not any(map(len, states)):
            return [torch.empty(0, self.half.vocab_size) for _ in states]
        return [*self._forward.logits(torch.cat([*states])).split([*map(len, states)])]

    def _check(self) -> None:
        if not self.residence.here:
            raise offloaded()

    def detach_moved(self, sequence: DecodeSequence) -> list[UnitName]:
        """Frees what is laid elsewhere now. Returns the units among it, which are to be attached anew. Raises as
        `Holdings.detach_moved`."""
        return self.holdings.detach_moved(sequence)

    def release(self, sequence: DecodeSequence) -> None:
        """Gives back everything a sequence holds. May be called twice. Not while it is in a step."""
        self.holdings.release(sequence)


def _told(work: Work) -> bool:
    """Logits are wanted of it, if anything is."""
    return not (work.states or work.layers)


def _fill(pool: Tensor, axis: int, runs: Sequence[Run], tokens: Tensor) -> None:
    """Copies tokens into the slots of a pool, which are numbered along an axis of both."""
    at = 0
    for run in runs:
        pool.narrow(axis, run.start, run.length).copy_(tokens.narrow(axis, at, run.length))
        at += run.length


def _rows(batch: Sequence[Work]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(rows,) ids and (3, rows) positions of a step. Most rows of most steps are one token each: no array is made for
    one of those."""
    rows = sum(work.rows for work in batch)
    ids, positions = np.empty(rows, dtype=np.int64), np.empty((3, rows), dtype=np.int64)
    places: list[int] = []
    tokens: list[tuple[int, int]] = []
    at = 0
    for sequence, count, *_ in batch:
        start, stop = sequence.computed, sequence.computed + count
        token = sequence.timeline.ordinary(start) if count == 1 else None
        if token is not None:
            places.append(at)
            tokens.append(token)
        else:
            ids[at : at + count] = sequence.timeline.ids(start, stop)
            positions[:, at : at + count] = sequence.timeline.positions(start, stop)
        at += count
    if tokens:
        ids[places], positions[:, places] = np.array(tokens, dtype=np.int64).T
    return ids, positions


def _wanted(batch: Sequence[Work]) -> tuple[list[int], list[int]]:
    """Rows of the step of which anything is wanted, and how many of them belong to each sequence."""
    rows: list[int] = []
    counts: list[int] = []
    at = 0
    for work in batch:
        first = {"none": at + work.rows, "last": at + work.rows - 1, "all": at}[work.wanted]
        rows.extend(range(first, at + work.rows))
        counts.append(at + work.rows - first)
        at += work.rows
    return rows, counts
