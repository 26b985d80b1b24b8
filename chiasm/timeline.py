"""The timeline of a request: text tokens and visual units, positions and visibility, computed as it grows.

A timeline is append-only, and nothing appended later changes what stands before it. That is what makes overlapped
prefill, realtime growth, resuming and prefix caching exact (`docs/architecture.md`, "The timeline").

It knows counts and positions. It has seen neither a tensor nor a tokenizer nor a pixel; how one family lays a unit
(how many placeholders, which positions) is told to it as a `UnitLayout`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt


class UnitName(NamedTuple):
    """A unit inside one request: number `unit` of the medium in `slot`."""

    slot: int
    unit: int


@lru_cache(maxsize=1 << 14)
def unit_name(slot: int, unit: int) -> UnitName:
    """The name, one object for all requests: what is kept by name is kept for many."""
    return UnitName(slot, unit)


@dataclass(frozen=True, slots=True, eq=False)
class UnitLayout:
    """How one unit sits on a timeline whose counter stands at c. Columns, as every timeline keeps one for each of its
    units and a unit may have thousands of placeholders.

    Attributes:
        placeholder_ids: token ids that stand for the unit in the text. The last of them completes it: from there on the
            unit is visible.
        placeholder_steps: (3, placeholders) their positions minus c, on the axes time, height, width.
        advance: how far the counter moves past the unit.
        vision_tokens: keys and values the unit brings to a cross-attention layer, separator included.
    """

    placeholder_ids: Sequence[int]
    placeholder_steps: npt.NDArray[np.int32]
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


class _Units(Sequence[LaidUnit]):
    """Laid units by column: a tenth of what they take one by one, and many timelines only wait.

    Attributes:
        names, layouts, indices, starts, firsts: of each, as `LaidUnit` has them.
        ends: `LaidUnit.end_index` of each.
        numbers: of units, by name.
    """

    def __init__(self) -> None:
        self.names: list[UnitName] = []
        self.layouts: list[UnitLayout] = []
        self.indices = array("i")
        self.starts = array("i")
        self.firsts = array("i")
        self.ends = array("i")
        self.numbers: dict[UnitName, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> LaidUnit: ...
    @overload
    def __getitem__(self, number: slice) -> list[LaidUnit]: ...
    def __getitem__(self, number: int | slice) -> LaidUnit | list[LaidUnit]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        return LaidUnit(
            self.names[number],
            self.layouts[number],
            self.indices[number],
            self.starts[number],
            self.firsts[number],
        )

    def append(self, unit: LaidUnit) -> None:
        self.numbers[unit.name] = len(self)
        self.names.append(unit.name)
        self.layouts.append(unit.layout)
        self.indices.append(unit.index)
        self.starts.append(unit.start)
        self.firsts.append(unit.first)
        self.ends.append(unit.end_index)

    def cut(self, kept: int) -> None:
        """Forgets all units but the first `kept`."""
        for name in self.names[kept:]:
            del self.numbers[name]
        for column in (self.names, self.layouts, self.indices, self.starts, self.firsts, self.ends):
            del column[kept:]


class _Stretch(NamedTuple):
    """Rows [start, stop) of ordinary tokens, or of one unit's placeholders.

    Attributes:
        unit: number of the unit whose placeholders they are; None for ordinary tokens.
        shift: position minus row, of ordinary tokens.
        complete: units that are complete before them.
    """

    start: int
    stop: int
    unit: int | None
    shift: int
    complete: int


class Timeline:
    """Token ids with their positions, and units with theirs. Rows are token indices from 0.

    `len(timeline)` is the number of rows. All growth is O(1) per token and per unit. Kept are the ids and the units;
    everything else about a row follows from the units before it.
    """

    def __init__(self) -> None:
        self._ids = array("i")
        self._units = _Units()
        self._drops: list[tuple[int, int]] = []  # (row, units dropped before rows from there on), both ascending
        self.counter = 0
        """Position the next ordinary token gets, on every axis."""

    def __len__(self) -> int:
        return len(self._ids)

    # -- growing -------------------------------------------------------------------------------------------------------

    def append_text(self, ids: Sequence[int]) -> int:
        """Lays ordinary tokens, one position each. Returns the row of the first."""
        at = len(self._ids)
        self._ids.extend(ids)
        self.counter += len(ids)
        return at

    def append_token(self, token: int) -> None:
        """Lays one ordinary token."""
        self._ids.append(token)
        self.counter += 1

    def append_unit(self, name: UnitName, layout: UnitLayout) -> LaidUnit:
        """Lays a unit: its placeholders and its place among the vision tokens.

        Raises ValueError if a unit of that name is already laid.
        """
        if name in self._units.numbers:
            raise ValueError(f"{name} is laid already")
        unit = LaidUnit(name, layout, len(self._ids), self.counter, self.vision_tokens)
        self._ids.extend(layout.placeholder_ids)
        self._units.append(unit)
        self.counter += layout.advance
        return unit

    def drop_units(self, count: int) -> None:
        """Hides the oldest `count` units from every row laid from now on. Rows already laid keep what they saw.

        Raises ValueError if more would be hidden than are laid.
        """
        if not 0 <= count <= len(self._units) - self.dropped:
            raise ValueError(f"cannot drop {count} units: {len(self._units)} laid, {self.dropped} dropped")
        if count:
            self._drops.append((len(self), self.dropped + count))

    def truncate(self, rows: int) -> None:
        """Forgets every row from `rows` on, with the units laid there and the drops made behind row `rows`.

        Raises ValueError if the cut would fall inside a unit's placeholders.
        """
        kept = self._complete(rows)
        if kept < len(self._units) and self._units.indices[kept] < rows:
            raise ValueError(f"row {rows} is inside {self._units[kept].name}")
        if rows >= len(self):
            return
        self.counter = rows + self._shift(kept)
        del self._drops[bisect_right(self._drops, rows, key=lambda drop: drop[0]) :]
        del self._ids[rows:]
        self._units.cut(kept)

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def units(self) -> Sequence[LaidUnit]:
        """Units in the order in which they are laid, which is their order among the vision tokens."""
        return self._units

    def find(self, name: UnitName) -> LaidUnit | None:
        """Where a unit lies, None while it is not laid."""
        number = self._units.numbers.get(name)
        return None if number is None else self._units[number]

    @property
    def vision_tokens(self) -> int:
        """Vision tokens of all units laid, dropped ones included."""
        units = self._units
        return units.firsts[-1] + units.layouts[-1].vision_tokens if units else 0

    @property
    def dropped(self) -> int:
        """Units hidden from every row that is laid from now on."""
        return self._drops[-1][1] if self._drops else 0

    @property
    def dropped_from(self) -> int:
        """The first row that `dropped` units are hidden from; 0 where none are."""
        return self._drops[-1][0] if self._drops else 0

    @property
    def rope_delta(self) -> int:
        """Next position minus next row: what a generated token's position exceeds its index by."""
        return self.counter - len(self._ids)

    def ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Token ids of rows [start, stop)."""
        return self._ids[start:stop].tolist()

    def positions(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """(3, rows) positions on the axes time, height, width."""
        start, stop, _ = slice(start, stop).indices(len(self))
        made = np.empty((3, max(stop - start, 0)), dtype=np.int64)
        for part in self._stretches(start, stop):
            rows = slice(part.start - start, part.stop - start)
            if part.unit is None:
                made[:, rows] = np.arange(part.start + part.shift, part.stop + part.shift)
            else:
                units, at = self._units, self._units.indices[part.unit]
                steps = units.layouts[part.unit].placeholder_steps[:, part.start - at : part.stop - at]
                made[:, rows] = steps
                made[:, rows] += units.starts[part.unit]
        return made

    def ordinary(self, row: int) -> tuple[int, int] | None:
        """Id and position of a row behind all units, without making an array of it; None for any other row."""
        if self._units and row < self._units[-1].end_index:
            return None
        return self._ids[row], row + self.rope_delta

    def visible(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """(rows,) number of units whose placeholders are complete in rows 0..i, i included."""
        start, stop, _ = slice(start, stop).indices(len(self))
        made = np.empty(max(stop - start, 0), dtype=np.int64)
        for part in self._stretches(start, stop):
            made[part.start - start : part.stop - start] = part.complete
            if part.unit is not None and part.stop == self._units.ends[part.unit]:
                made[part.stop - start - 1] += 1
        return made

    def boundaries(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """(rows, 2) vision tokens `[first, last)` that each row may attend to. first == last where it sees none."""
        start, stop, _ = slice(start, stop).indices(len(self))
        dropped, visible = self._dropped(start, stop), self.visible(start, stop)
        low, high = (int(dropped[0]), int(visible[-1])) if len(visible) else (0, 0)
        # Vision tokens before each unit from number `low` to number `high`.
        edges = np.array(self._units.firsts[low : high + 1], dtype=np.int64)
        if high == len(self._units):
            edges = np.append(edges, self.vision_tokens)
        made = np.zeros((len(visible), 2), dtype=np.int64)
        seeing = np.flatnonzero(visible > dropped)
        made[seeing, 0] = edges[dropped[seeing] - low]
        made[seeing, 1] = edges[visible[seeing] - low]
        return made

    def overlaid(self, start: int, stop: int) -> npt.NDArray[np.int64] | None:
        """(rows,) for units that lie over their placeholders, token by token: the vision token over each row, -1 over
        ordinary ones. None where all are ordinary."""
        if not self._units or start >= self._units.ends[-1]:
            return None
        made = np.full(max(stop - start, 0), -1, dtype=np.int64)
        for part in self._stretches(start, stop):
            if part.unit is not None:
                shift = self._units.firsts[part.unit] - self._units.indices[part.unit]
                made[part.start - start : part.stop - start] = np.arange(part.start + shift, part.stop + shift)
        return made if (made >= 0).any() else None

    def row_bytes(self, start: int, stop: int) -> bytes:
        """Everything about rows [start, stop) but which units they are among: ids, positions, units complete, units
        dropped. Six columns of `stop - start` integers, eight bytes each."""
        ids = np.array(self._ids[start:stop], dtype=np.int64)
        columns = (ids, self.positions(start, stop), self.visible(start, stop), self._dropped(start, stop))
        return b"".join(column.tobytes() for column in columns)

    def units_begun(self, start: int, stop: int) -> Sequence[LaidUnit]:
        """Units whose first placeholder is among rows [start, stop), in order."""
        first = bisect_left(self._units.indices, start)
        return self._units[first : bisect_left(self._units.indices, stop, lo=first)]

    def rows_before(self, unit: int) -> int:
        """Rows that need only units before number `unit`: where a prefill must stop while that unit is not ready."""
        return self._units.indices[unit] if unit < len(self._units) else len(self._ids)

    # -- what follows from the units -----------------------------------------------------------------------------------

    def _complete(self, row: int) -> int:
        """Units that are complete before a row."""
        return bisect_right(self._units.ends, row)

    def _shift(self, complete: int) -> int:
        """Position minus row of the ordinary tokens behind so many units."""
        if not complete:
            return 0
        units, last = self._units, complete - 1
        return units.starts[last] + units.layouts[last].advance - units.ends[last]

    def _stretches(self, start: int, stop: int) -> Iterator[_Stretch]:
        """Rows [start, stop) in order."""
        units, number = self._units, self._complete(start)
        while start < stop:
            index = units.indices[number] if number < len(units) else stop
            if start < index:
                end = min(index, stop)
                yield _Stretch(start, end, None, self._shift(number), number)
            else:
                end = min(units.ends[number], stop)
                yield _Stretch(start, end, number, 0, number)
                number += 1
            start = end

    def _dropped(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """(rows,) units dropped before each of rows [start, stop) was laid."""
        known = bisect_right(self._drops, start, key=lambda drop: drop[0])
        made = np.full(max(stop - start, 0), self._drops[known - 1][1] if known else 0, dtype=np.int64)
        for row, total in self._drops[known:]:
            if row >= stop:
                break
            made[row - start :] = total
        return made
