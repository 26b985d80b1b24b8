"""What became of the units of an engine, in numbers. It knows nothing else of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineCounts:
    """Since the engine was made."""

    encoded_units: int = 0
    cached_units: int = 0
    joined_units: int = 0
    dropped_units: int = 0
    rejected_headers: int = 0
    """Of entries that were there and not what their key promises."""
    batches: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    """Units of the last thousand passes through the model."""
