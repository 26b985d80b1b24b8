"""The timeline of a request: text tokens and visual units, positions and visibility, computed as it grows.

A timeline is append-only, and nothing appended later changes what stands before it. That is what makes overlapped
prefill, realtime growth, resuming and prefix caching exact (`docs/architecture.md`, "The timeline").

It knows counts and positions. It has seen neither a tensor nor a tokenizer nor a pixel; how one family lays a unit
(how many placeholders, which positions) is told to it as a `UnitLayout`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class UnitName(NamedTuple):
    """A unit inside one request: number `unit` of the medium in `slot`."""

    slot: int
    unit: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How one unit sits on a timeline whose counter stands at c.

    Attributes:
        placeholder_ids: token ids that stand for the unit in the text. The last of them completes it: from there on the
            unit is visible.
        placeholder_steps: per placeholder its position minus c, on the axes (time, height, width).
        advance: how far the counter moves past the unit.
        vision_tokens: keys and values the unit brings to a cross-attention layer, separator included.
    """

    placeholder_ids: tuple[int, ...]
    placeholder_steps: tuple[tuple[int, int, int], ...]
    advance: int
    vision_tokens: int


@dataclass(frozen=True, slots=True)
class LaidUnit:
    """A unit with its place: `start` is the counter c at which it was laid, `index` its first placeholder's row,
    `first` the number of vision tokens before it."""

    name: UnitName
    layout: UnitLayout
    index: int
    start: int
    first: int

    @property
    def last(self) -> int:
        """One past its last vision token."""
        return self.first + self.layout.vision_tokens

    @property
    def end_index(self) -> int:
        """One past its last placeholder's row."""
        return self.index + len(self.layout.placeholder_ids)


class Timeline:
    """Token ids with their positions, and units with theirs. Rows are token indices from 0.

    `len(timeline)` is the number of rows. All growth is O(1) per token and per unit.
    """

    def __init__(self) -> None:
        self._ids = array("q")
        self._positions = (array("q"), array("q"), array("q"))  # time, height, width
        self._visible = array("q")  # units whose placeholder is complete in rows 0..i
        self._dropped = array("q")  # units dropped before row i was laid
        self._units: list[LaidUnit] = []
        self._numbers: dict[UnitName, int] = {}  # place in _units
        self._dropped_now = 0
        self.counter = 0
        """Position the next ordinary token gets, on every axis."""

    def __len__(self) -> int:
        return len(self._ids)

    # -- growing -------------------------------------------------------------------------------------------------------

    def append_text(self, ids: Iterable[int]) -> int:
        """Lays ordinary tokens, one position each. Returns the row of the first."""
        at = len(self._ids)
        visible = len(self._units)
        for token in ids:
            self._row(token, (self.counter, self.counter, self.counter), visible)
            self.counter += 1
        return at

    def append_unit(self, name: UnitName, layout: UnitLayout) -> LaidUnit:
        """Lays a unit: its placeholders and its place among the vision tokens.

        Raises ValueError if a unit of that name is already laid.
        """
        if name in self._numbers:
            raise ValueError(f"{name} is laid already")
        first = self._units[-1].last if self._units else 0
        unit = LaidUnit(name, layout, len(self._ids), self.counter, first)
        seen = len(self._units)
        last = len(layout.placeholder_ids) - 1
        for i, (token, step) in enumerate(zip(layout.placeholder_ids, layout.placeholder_steps, strict=True)):
            t, h, w = (self.counter + s for s in step)
            self._row(token, (t, h, w), seen + (i == last))
        self._units.append(unit)
        self._numbers[name] = seen
        self.counter += layout.advance
        return unit

    def drop_units(self, count: int) -> None:
        """Hides the oldest `count` units from every row laid from now on. Rows already laid keep what they saw.

        Raises ValueError if more would be hidden than are laid.
        """
        if not 0 <= count <= len(self._units) - self._dropped_now:
            raise ValueError(f"cannot drop {count} units: {len(self._units)} laid, {self._dropped_now} dropped")
        self._dropped_now += count

    def truncate(self, rows: int) -> None:
        """Forgets every row from `rows` on, with the units laid there and the drops made behind row `rows`.

        Raises ValueError if the cut would fall inside a unit's placeholders.
        """
        kept = bisect_right([unit.end_index for unit in self._units], rows)
        if kept < len(self._units) and self._units[kept].index < rows:
            raise ValueError(f"row {rows} is inside {self._units[kept].name}")
        if rows >= len(self):
            return
        cut = self._units[kept] if kept < len(self._units) else None
        # Ordinary rows have three equal axes, so the first row cut off holds the counter, unless it opens a unit.
        self.counter = cut.start if cut and cut.index == rows else self._positions[0][rows]
        self._dropped_now = self._dropped[rows]
        for column in (self._ids, *self._positions, self._visible, self._dropped):
            del column[rows:]
        for unit in self._units[kept:]:
            del self._numbers[unit.name]
        del self._units[kept:]

    def _row(self, token: int, position: tuple[int, int, int], visible: int) -> None:
        self._ids.append(token)
        for axis, value in zip(self._positions, position, strict=True):
            axis.append(value)
        self._visible.append(visible)
        self._dropped.append(self._dropped_now)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def units(self) -> Sequence[LaidUnit]:
        """Units in the order in which they are laid, which is their order among the vision tokens."""
        return self._units

    def find(self, name: UnitName) -> LaidUnit | None:
        """Where a unit lies, None while it is not laid."""
        number = self._numbers.get(name)
        return None if number is None else self._units[number]

    @property
    def vision_tokens(self) -> int:
        """Vision tokens of all units laid, dropped ones included."""
        return self._units[-1].last if self._units else 0

    @property
    def dropped(self) -> int:
        """Units hidden from every row that is laid from now on."""
        return self._dropped_now

    @property
    def rope_delta(self) -> int:
        """Next position minus next row: what a generated token's position exceeds its index by."""
        return self.counter - len(self._ids)

    def ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Token ids of rows [start, stop)."""
        return self._ids[start:stop].tolist()

    def positions(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """(3, rows) positions on the axes time, height, width."""
        return np.array([axis[start:stop] for axis in self._positions], dtype=np.int64).reshape(3, -1)

    def visible(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """(rows,) number of units whose placeholders are complete in rows 0..i, i included."""
        return np.array(self._visible[start:stop], dtype=np.int64)

    def boundaries(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """(rows, 2) vision tokens `[first, last)` that each row may attend to. first == last where it sees none."""
        visible = self._visible[start:stop]
        dropped = self._dropped[start:stop]
        rows = [self._span(d, v) for d, v in zip(dropped, visible, strict=True)]
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    def row_bytes(self, start: int, stop: int) -> bytes:
        """Everything about rows [start, stop) but which units they are among: ids, positions, units complete, units
        dropped. Six columns of `stop - start` integers, eight bytes each."""
        columns = (self._ids, *self._positions, self._visible, self._dropped)
        return b"".join(column[start:stop].tobytes() for column in columns)

    def units_begun(self, start: int, stop: int) -> Sequence[LaidUnit]:
        """Units whose first placeholder is among rows [start, stop), in order."""
        first = bisect_left(self._units, start, key=lambda unit: unit.index)
        return self._units[first : bisect_left(self._units, stop, lo=first, key=lambda unit: unit.index)]

    def _span(self, dropped: int, visible: int) -> tuple[int, int]:
        if dropped >= visible:
            return (0, 0)
        return (self._units[dropped].first, self._units[visible - 1].last)

    def rows_before(self, unit: int) -> int:
        """Rows that need only units before number `unit`: where a prefill must stop while that unit is not ready."""
        return self._units[unit].index if unit < len(self._units) else len(self._ids)
