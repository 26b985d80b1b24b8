"""The rows of a step in blocks of fixed sizes, so that no row depends on the others.

In a block of fixed size every product outside attention has a fixed shape, and is computed in one fixed order. A step
is cut into such blocks, one after another: each is a step of its own, and finds what those before it have stored. Which
sizes may stand for each other is found out when the half is made ready (`agreeing`), for each shape of a linear layer;
whatever else a half computes, it computes row by row or number by number. It knows no sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chiasm.attention.agreeing import agreeing
from chiasm.attention.backend import Attention, SequenceRows, Step
from chiasm.layers.linear import Linear
from chiasm.layers.mlp import keep_steady
from chiasm.models.family import DecoderHalf, Overlay
from decoder_service.forward import Ints, overlay_of, widened

SIZES = (16, 32, 64, 128, 256)
"""Rows of a block. Products of 3 rows and fewer, in larger layers of 8 and fewer, give other float32 results than those
of 16; those of 16 to 128 mostly agree. In bfloat16 those of 16 and 32 do, and larger ones in some layers (torch 2.13
with MKL and oneDNN, AVX-512 and AMX). Smaller ones would be faster for single rows, and agree with none of these."""


class FixedRows:
    """`Forward` in blocks of fixed sizes.

    Args:
        attention: takes rows beyond those of the step, and its results for a row depend on no other.
        features: of the pool, that lie over rows.

    Raises SettingsError where rows of a block depend on their place in it.

    Attributes:
        sizes: rows of a block, those of `SIZES` that agree.
    """

    def __init__(self, half: DecoderHalf, attention: Attention, features: Tensor) -> None:
        assert isinstance(half, nn.Module), "its layers are looked at"
        keep_steady(half)
        linear = [one for one in half.modules() if isinstance(one, nn.Linear)]
        shapes = {(*one.weight.shape, _no_bias(one) is None): one for one in linear}
        self._linear = [*shapes.values()]
        self._half: DecoderHalf = half
        self._attention = attention
        self._features = features
        self.sizes = agreeing(SIZES, self._products)

    def __call__(self, step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]) -> Tensor:
        made = [self._half.forward(*block)[:count] for block, count in self._blocks(step, ids, positions_3n, wanted)]
        return widened(torch.cat(made))

    def states_after(
        self, layers: Sequence[int], step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]
    ) -> list[Tensor]:
        made = [
            [states[:count] for states in self._half.states_after(layers, *block)]
            for block, count in self._blocks(step, ids, positions_3n, wanted)
        ]
        return [torch.cat(of_layer) for of_layer in zip(*made, strict=True)]

    def normed(self, states_me: Tensor) -> Tensor:
        return self._padded(self._half.normed, states_me)

    def logits(self, states_me: Tensor) -> Tensor:
        return widened(self._padded(self._half.logits, states_me))

    def prepare(self) -> None:
        """Nothing."""

    def _padded(self, compute: Callable[[Tensor], Tensor], states_me: Tensor) -> Tensor:
        """(M, numbers) of (M, width), computed in blocks of fixed sizes."""
        made = []
        for some in states_me.split(self.sizes[-1]):
            padded = torch.cat([some, some[:1].expand(self._enough(len(some)) - len(some), -1)])
            made.append(compute(padded)[: len(some)])
        return torch.cat(made)

    def _blocks(
        self, step: Step, ids: Sequence[int] | Ints, positions_3n: Ints, wanted: Sequence[int]
    ) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor | None, Tensor, Attention, Overlay | None], int]]:
        """What the half is given of each block, which is planned, and how many of the rows wanted are in it: what it
        makes of more is padding."""
        overlaid = step.overlaid()
        for start, stop, size in blocks(step.rows, self.sizes):
            part = rows_of(step, start, stop)
            # Padding repeats a row; it is stored nowhere and attends to nothing.
            at = np.minimum(np.arange(start, start + size), stop - 1)
            seen = step.sees()[at]
            here = [row - start for row in wanted if start <= row < stop]
            padded = [*here, *[0] * (self._enough(len(here)) - len(here))]
            device = self._half.device
            self._attention.plan(part)
            arguments = (
                torch.tensor([ids[row] for row in at], device=device),
                torch.from_numpy(positions_3n[:, at]).to(device),
                torch.from_numpy(seen).to(device) if seen.any() else None,
                torch.tensor(padded, dtype=torch.long, device=device),
                self._attention,
                overlay_of(None if overlaid is None else overlaid[at], self._features),
            )
            yield arguments, len(here)

    def _enough(self, count: int) -> int:
        """The size that so many rows are padded to."""
        return next(size for size in self.sizes if size >= count) if count else 0

    @torch.inference_mode()
    def _products(self, size: int, draw: int) -> Tensor:
        """(size, numbers) products of equal rows with a matrix of every shape that the half multiplies with."""
        made = []
        for layer in self._linear:
            x, w = _cancelling(layer, torch.Generator().manual_seed(draw))
            x = x.expand(size, -1).contiguous()
            if isinstance(layer, Linear):
                w = layer.laid(w)
                made.append(layer.product(x, w))
                made.append(layer.columns(x.t().contiguous(), w).t() if layer.from_left(size) else made[-1])
            else:
                made.append(F.linear(x, w, _no_bias(layer)))
        return torch.cat(made, dim=1)


def _cancelling(layer: nn.Linear, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A row and a matrix in the shape of a layer's. But for rounding their product is zero.

    So in every number it tells the order of the sums and nothing else. An ordinary product rounds most of that away, in
    bfloat16 all but one number in ten thousand.
    """
    width, dtype = layer.in_features // 2, layer.weight.dtype
    order = torch.randperm(width, generator=generator)
    x, w = (torch.randn(rows, width, generator=generator).to(dtype) for rows in (1, min(layer.out_features, 128)))
    rest = torch.zeros(1, layer.in_features % 2, dtype=dtype)
    x = torch.cat([x, -x[:, order], rest], dim=1)
    w = torch.cat([w, w[:, order], rest.expand(len(w), -1)], dim=1)
    w = w.repeat(-(-layer.out_features // len(w)), 1)[: layer.out_features]
    return x.to(layer.weight.device), w.contiguous().to(layer.weight.device)


def _no_bias(layer: nn.Linear) -> Tensor | None:
    """A bias that adds nothing, where the layer has one: then another product is called."""
    bias: Tensor | None = layer.bias
    return None if bias is None else torch.zeros_like(bias)


def blocks(rows: int, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, stop, size) of blocks of so many rows: of each the largest of the rising sizes that is at least half
    full, and else the least."""
    made = []
    start = 0
    while start < rows:
        left = rows - start
        size = next((size for size in reversed(sizes) if size <= 2 * left), sizes[0])
        stop = min(rows, start + size)
        made.append((start, stop, size))
        start = stop
    return made


def rows_of(step: Step, start: int, stop: int) -> Step:
    """Rows [start, stop) of a step, as a step of their own."""
    parts = []
    at = 0
    for one in step.sequences:
        low, high = max(start - at, 0), min(stop - at, one.rows)
        if low < high:
            over = None if one.overlaid is None else one.overlaid[low:high]
            spans = one.boundaries[low:high]
            parts.append(SequenceRows(one.start + low, high - low, one.pages, spans, one.extents, over))
        at += one.rows
    return Step(parts)
