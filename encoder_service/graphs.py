"""Passes as CUDA graphs: blocks and mergers are replayed for batches that fit a bucket of patches, not launched kernel
by kernel.

A bucket is a number of patches. A batch takes the smallest that holds it, whatever grids it is of: where its patches
are and where its frames end is written to where the graph reads it; what is left of the bucket is nobody's, a frame of
zeros. A batch of more patches or more frames is computed eagerly. Both give the same up to the order of sums.

The runtime stands behind `chiasm.attention.capture.Device`, the kernel behind `chiasm.attention.varlen.Kernel`;
everything else here is the same on any device.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from chiasm.attention.backend import VarlenAttention
from chiasm.attention.capture import CudaDevice, Device
from chiasm.attention.choose import varlen_fixed
from chiasm.attention.varlen import FixedVarlen, FlashVarlen, Kernel, flash
from chiasm.layers.vit_places import GridPlaces, Places
from chiasm.models.family import EncoderHalf, Grid
from chiasm.models.residence import Residence, not_captured
from chiasm.settings import SettingsError

_log = logging.getLogger(__name__)

LEAST = 256
"""Patches of the smallest bucket. A smaller pass takes the device no longer than its launch."""

FRAMES = 64
"""Frames of a batch that is replayed, at most."""


class Visual(Protocol):
    """What knows where patches are."""

    places: GridPlaces


@runtime_checkable
class Capturable(Protocol):
    """A half whose trunk can be given the places of its patches."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    patch_values: int

    @property
    def visual(self) -> Visual: ...

    def trunk(self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention) -> Tensor: ...

    def trunk_at(
        self, patches_pv: Tensor, places: Places, lengths: Sequence[int], attention: VarlenAttention
    ) -> Tensor: ...


def buckets(most: int) -> list[int]:
    """Patches of each bucket, ascending: four to a doubling from `LEAST`, so that at most a fifth is nobody's; and the
    largest itself."""
    steps = (LEAST * (4 + quarter) * 2**doubling // 4 for doubling in range(24) for quarter in range(4))
    return sorted({n for n in steps if n < most} | {most})


class GraphTrunk:
    """`Trunk` that replays passes that fit, and computes all others as the half does.

    Args:
        most_patches: of the largest bucket; a multiple of the patches of a merged token.

    Attributes:
        replayed: passes that were computed by a graph.
    """

    def __init__(self, half: Capturable, device: Device, *, most_patches: int, kernel: Kernel = flash) -> None:
        self._half = half
        self._device = device
        self._kernel = kernel
        self._sizes = buckets(most_patches)
        self._graphs: dict[int, _Bucket] = {}
        self._usable = True
        self.replayed = 0

    def __call__(self, patches_pv: Tensor, grids: Sequence[Grid], attention: VarlenAttention) -> Tensor:
        if self._usable and len(patches_pv) <= self._sizes[-1] and len(grids) <= FRAMES:
            try:
                return self._replay(patches_pv, grids)
            except _NotCaptured as error:
                self._usable = False
                self._graphs.clear()
                _log.warning("passes are not captured, and slower for it", exc_info=error.__cause__)
        return self._half.trunk(patches_pv, grids, attention)

    def prepare(self, attention: VarlenAttention) -> None:
        """Captures every graph. The largest come first: the others fit in their memory."""
        half = self._half
        for size in reversed(self._sizes):
            blank = torch.zeros(size, half.patch_values, device=half.device, dtype=half.dtype)
            self(blank, [(2, size // 2)], attention)

    def _replay(self, patches_pv: Tensor, grids: Sequence[Grid]) -> Tensor:
        places = self._half.visual.places.of(grids)
        size = self._sizes[bisect_left(self._sizes, len(patches_pv))]
        if size not in self._graphs:
            try:
                with torch.inference_mode(False):  # what a graph reads outlives the mode of this call
                    self._graphs[size] = _Bucket(self._half, size, patches_pv, places, self._kernel)
            except Exception as error:  # there may be no memory for it
                raise _NotCaptured from error
        bucket = self._graphs[size]
        self._device.wait()
        bucket.fill(patches_pv, places, [rows * columns for rows, columns in grids])
        self._device.mark()
        merged_me = bucket.launch(self._device)
        self.replayed += 1
        return merged_me[: len(merged_me) * len(patches_pv) // size].clone()


class _NotCaptured(Exception):
    """A graph, or what it reads, could not be made."""


class _Bucket:
    """The graph of one number of patches, what it reads and what it writes."""

    def __init__(self, half: Capturable, size: int, patches_pv: Tensor, places: Places, kernel: Kernel) -> None:
        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(size, *like.shape[1:], dtype=like.dtype, device=like.device)

        self._half = half
        self._patches_pv = zeros(patches_pv)
        self._places = Places(*map(zeros, places))
        self._attention = FixedVarlen(size, FRAMES, device=half.device, kernel=kernel)
        self._merged_me: Tensor | None = None
        self._graph: Callable[[], None] | None = None

    def fill(self, patches_pv: Tensor, places: Places, lengths: Sequence[int]) -> None:
        count = len(patches_pv)
        self._patches_pv[:count] = patches_pv
        self._patches_pv[count:] = 0
        for buffer, of_period in zip(self._places, places, strict=True):
            buffer[:count].unflatten(0, (-1, len(of_period))).copy_(of_period)
        self._attention.put(lengths)

    def launch(self, device: Device) -> Tensor:
        """(merged tokens of the bucket, width), until the next launch. Raises _NotCaptured if this is the first time,
        and it cannot be captured."""
        if self._graph is None:
            try:
                self._graph = device.capture(self._run)
            except Exception as error:
                raise _NotCaptured from error
        self._graph()
        assert self._merged_me is not None
        return self._merged_me

    def _run(self) -> None:
        made = self._half.trunk_at(self._patches_pv, self._places, (), self._attention)
        if self._merged_me is None:  # on the run before the capture
            with torch.inference_mode(False):
                self._merged_me = torch.empty_like(made)
        self._merged_me.copy_(made)


def captured(half: EncoderHalf, asked: bool | None, most_patches: int) -> GraphTrunk | None:
    """The graphs of a half, captured, or None where there are none to be.

    Args:
        asked: None for graphs where they can be.

    Raises SettingsError for graphs that are asked for where they cannot be.
    """
    if Residence.of(half).streams:
        if asked:
            raise not_captured()
        return None
    can = isinstance(half, Capturable) and varlen_fixed(half.device, half.dtype, head_dim=half.head_dim)
    if asked and not can:
        raise SettingsError(
            "passes are captured on a CUDA device, in 16-bit numbers, by a torch that attends to lengths on the device",
            "--cuda-graphs",
            "without it there are graphs where there can be",
        )
    if asked is False or not can:
        return None
    assert isinstance(half, Capturable)
    made = GraphTrunk(half, CudaDevice(half.device), most_patches=most_patches)
    with torch.inference_mode():
        made.prepare(FlashVarlen(half.device))
    return made
