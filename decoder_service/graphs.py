"""Decode steps as CUDA graphs: a step in which every sequence adds one row is replayed, not launched kernel by kernel.

There is a graph for each *bucket* of rows, twice: with the cross layers, and without them for steps in which no row
sees anything. A step takes the smallest bucket that holds it; rows that are nobody's fill the rest. Whatever else comes
(prefill, rows whose logits nobody wants, or whose states somebody does, more rows than the largest bucket or more pages
than its tables hold) is
computed eagerly. What a step wrote to the pools is the same either way, so both may take turns.

The runtime stands behind `chiasm.attention.capture.Device`; everything else here is the same on any device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from chiasm.attention.backend import Attention, SequenceRows, Step
from chiasm.attention.capture import Device
from chiasm.attention.flashinfer_fixed import FixedAttention
from chiasm.attention.staged import Staged
from chiasm.models.family import DecoderHalf
from decoder_service.forward import Compute, Forward, Ints

_log = logging.getLogger(__name__)


def buckets(most_rows: int) -> list[int]:
    """Rows of each bucket, ascending: 1, 2, 4, 8, then every eighth, and the largest itself."""
    return sorted({n for n in (1, 2, 4, *range(8, most_rows, 8)) if n < most_rows} | {most_rows})


class GraphForward:
    """`Forward` that replays decode steps, and hands every other step on.

    Args:
        compute: what is captured, once for each bucket with the cross layers and once without.
        eager: computes what no graph can, and everything once a capture has failed.
        attention: its `most_rows` are the largest bucket's.

    Attributes:
        replayed: steps that were computed by a graph.
    """

    def __init__(
        self, half: DecoderHalf, compute: Compute, eager: Forward, attention: FixedAttention, device: Device
    ) -> None:
        self._crosses = half.entry_shape.layers > 0
        self._compute = compute
        self._eager = eager
        self._attention = attention
        self._device = device
        self._buckets = buckets(attention.most_rows)
        self._graphs: dict[int, _Bucket] = {}
        self._usable = True
        with torch.inference_mode(False):  # it outlives the mode of this call
            self._logits = torch.zeros(attention.most_rows, half.vocab_size, dtype=half.dtype, device=half.device)
        self.replayed = 0

    def __call__(self, step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]) -> Tensor:
        if self._usable and self._takes(step, wanted):
            try:
                return self._replay(step, np.asarray(ids, dtype=np.int64), positions_3n)
            except _NotCaptured as error:
                self._usable = False
                self._graphs.clear()
                _log.warning("decode steps are not captured, and slower for it", exc_info=error.__cause__)
        return self._eager(step, ids, positions_3n, wanted)

    def states_after(
        self, layers: Sequence[int], step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]
    ) -> list[Tensor]:
        # What is replayed has written its logits.
        return self._eager.states_after(layers, step, ids, positions_3n, wanted)

    def normed(self, states_me: Tensor) -> Tensor:
        return self._eager.normed(states_me)

    def logits(self, states_me: Tensor) -> Tensor:
        return self._eager.logits(states_me)

    def prepare(self) -> None:
        """Captures every graph, on rows that are nobody's. The largest come first: the others fit in their memory."""
        self._eager.prepare()
        nobody = self._attention.nobody
        span = np.array([[0, 1]])
        looking = SequenceRows(0, 1, nobody.pages, span, [(0, self._attention.nowhere, 1)])
        for rows in reversed(self._buckets):
            for sequence in (looking, nobody) if self._crosses else (nobody,):
                self(Step([sequence] * rows), [0] * rows, np.zeros((3, rows), np.int64), range(rows))

    def _takes(self, step: Step, wanted: Sequence[int]) -> bool:
        count = len(step.sequences)
        return (
            all(sequence.overlaid is None for sequence in step.sequences)
            and 0 < count <= self._buckets[-1]
            and all(sequence.rows == 1 for sequence in step.sequences)
            and len(wanted) == count
            and self._attention.fits(step)
        )

    def _replay(self, step: Step, ids: Ints, positions_3n: Ints) -> Tensor:
        count = len(step.sequences)
        rows = next(n for n in self._buckets if n >= count)
        if rows not in self._graphs:
            self._graphs[rows] = self._bucket(rows)
        bucket = self._graphs[rows]
        self._device.wait()
        crossing = bucket.fill(step, ids, positions_3n)
        self._device.mark()
        bucket.launch(self._device, crossing=crossing)
        self.replayed += 1
        logits = self._logits[:count]
        return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)

    def _bucket(self, rows: int) -> _Bucket:
        try:
            with torch.inference_mode(False):
                return _Bucket(self._compute, self._attention.bucket(rows), self._logits[:rows])
        except Exception as error:  # there may be no memory for its buffers
            raise _NotCaptured from error


class _NotCaptured(Exception):
    """A graph, or what it reads, could not be made."""


class _Bucket:
    """The graphs of one number of rows, and what they read.

    Args:
        logits_nv: where they write.
    """

    def __init__(self, compute: Compute, attention: Attention, logits_nv: Tensor) -> None:
        self._compute = compute
        self._attention = attention
        self._logits_nv = logits_nv
        self._rows = Staged(6, len(logits_nv), device=logits_nv.device, dtype=torch.long)
        self._graphs: dict[bool, Callable[[], None]] = {}

    def fill(self, step: Step, ids: Ints, positions_3n: Ints) -> bool:
        """Plans a step, and copies its rows. Returns whether any of them sees anything.

        Rows that look at the same slots are laid side by side, because the attention takes neighbours together; what
        logits they have is asked for in the order of the step.
        """
        sees = step.sees()
        crossing = bool(sees.any())
        order = sorted(range(len(ids)), key=lambda at: _look(step.sequences[at])) if crossing else list(range(len(ids)))
        count = len(order)
        rows = self._rows.numpy
        rows[:, count:] = 0  # nobody's: the first token at the first place
        rows[0, :count] = ids[order]
        rows[1:4, :count] = positions_3n[:, order]
        rows[4, order] = np.arange(count)
        rows[5, :count] = sees[order]
        self._rows.send()
        self._attention.plan(Step([step.sequences[at] for at in order]))
        return crossing

    def launch(self, device: Device, *, crossing: bool) -> None:
        """Computes what was filled in. Raises _NotCaptured if this is the first time, and it cannot be captured."""
        if crossing not in self._graphs:
            try:
                self._graphs[crossing] = device.capture(lambda: self._run(crossing))
            except Exception as error:
                raise _NotCaptured from error
        self._graphs[crossing]()

    def _run(self, crossing: bool) -> None:
        ids_n, logits_at, sees_n = (self._rows.device[at] for at in (0, 4, 5))
        positions_3n = self._rows.device[1:4]
        seeing = sees_n.bool() if crossing else None
        self._logits_nv.copy_(self._compute(ids_n, positions_3n, seeing, logits_at, self._attention))


def _look(sequence: SequenceRows) -> tuple[object, ...]:
    """Equal for rows that look at the same slots, and rarely for others; rows that see nothing come last."""
    extents = sequence.extents
    if not extents:
        return (True,)
    return (False, extents[0], extents[-1], len(extents), *sequence.boundaries[0].tolist())
