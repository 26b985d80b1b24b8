"""Forms of an entry: what its payload holds, and so what a decoder has left to do with it. No torch.

A form says how the numbers of an entry are laid out, not whose they are: which forms a worker makes or takes is told
by the worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

SCALE_BYTES: Final = 4
"""Of a scale of a quantised form: one float32 behind the numbers for each layer, K or V, head and channel."""


class Form(IntEnum):
    """What a payload holds. The numbers are those of the wire and never change.

    Attributes:
        CROSS_KV: (layers, K|V, heads, tokens, width), keys normed and not rotated.
        STATES: (tokens, width) merged states, the separator last; whoever reads them projects them.
        CROSS_KV_INT8, CROSS_KV_FP8: as CROSS_KV in 8 bits, the scales behind the numbers.
    """

    CROSS_KV = 1
    STATES = 2
    CROSS_KV_INT8 = 4
    CROSS_KV_FP8 = 5

    @property
    def label(self) -> str:
        """Its name in settings and in messages."""
        return self.name.lower()

    @property
    def quantised(self) -> bool:
        """Whether its numbers differ from those that were computed, within the error it states."""
        return self in (Form.CROSS_KV_INT8, Form.CROSS_KV_FP8)

    @property
    def source(self) -> Form:
        """What a model's half makes or takes, of which this form is a way to store it."""
        return Form.STATES if self is Form.STATES else Form.CROSS_KV

    @property
    def axes(self) -> tuple[str, ...]:
        """What its axes count, in order."""
        return ("tokens", "width") if self is Form.STATES else ("layers", "K|V", "heads", "tokens", "width")

    def tokens(self, shape: Sequence[int]) -> int:
        """Vision tokens of an entry of that shape."""
        return shape[self.axes.index("tokens")]

    def scales(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales of an entry of that shape: one for all tokens of a channel. Empty for exact forms."""
        return (*shape[:3], shape[4]) if self.quantised else ()

    def payload_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Bytes of a payload: numbers of `itemsize` bytes, in a quantised form of one, and scales."""
        if not self.quantised:
            return math.prod(shape) * itemsize
        return math.prod(shape) + SCALE_BYTES * math.prod(self.scales(shape))


def form_named(label: str) -> Form:
    """The form of that label. Raises KeyError."""
    return Form[label.upper()]
