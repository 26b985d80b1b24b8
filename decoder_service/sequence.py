"""One timeline in the decoder: what is laid, what is still to be laid, what is attached, what is computed.

Pieces are laid in order, as far as the media of their slots are sized; units may be attached in any order once they
are laid; rows may be computed up to the first unit that is not attached. All of it is counting: this module has seen
no tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chiasm.attention.backend import SequenceRows
from chiasm.attention.pages import Run
from chiasm.chat_template import Piece, Slot
from chiasm.timeline import Timeline, UnitLayout, UnitName


@dataclass(frozen=True, slots=True)
class SizedSlot:
    """The units of one medium.

    Attributes:
        pieces: token ids around the units, and unit numbers where they lie (`Prompt.medium`).
        grids: patches of each unit.
        offsets: seconds at which each unit is shown.
        final: they will not change any more.
    """

    pieces: Sequence[Sequence[int] | int]
    grids: Sequence[tuple[int, int]]
    offsets: Sequence[float]
    final: bool


class Drop(NamedTuple):
    """Hides the oldest units from what is laid after it: those before unit number `first`."""

    first: int


class Extent(NamedTuple):
    """A unit in the cross pool: its runs of slots, and the position `start` its keys are rotated for."""

    runs: tuple[Run, ...]
    start: int


class DecodeSequence:
    """A growing timeline and its place in both pools.

    Args:
        unit_layout: how the family lays a unit of a grid.
    """

    def __init__(self, unit_layout: Callable[[tuple[int, int]], UnitLayout]) -> None:
        self.timeline = Timeline()
        self.pages: list[int] = []
        self.computed = 0
        """Rows whose keys and values are in the self pool."""
        self._unit_layout = unit_layout
        self._pieces: list[Piece | Drop] = []
        self._rows: list[int] = []  # row at which each laid piece begins
        self._slots: dict[int, SizedSlot] = {}
        self._laid: dict[int, int] = {}  # laid slots and their pieces
        self._extents: dict[UnitName, Extent] = {}
        self._attached = 0  # units from the first that are all attached

    # -- laying --------------------------------------------------------------------------------------------------------

    def extend(self, pieces: Iterable[Piece | Drop]) -> int:
        """Adds pieces at the end and lays what can be laid. Returns the number of the first, for `row_of`.

        Raises ValueError when a drop is laid that hides more units than are laid, or fewer than before.
        """
        number = len(self._pieces)
        self._pieces.extend(pieces)
        self._lay()
        return number

    def row_of(self, piece: int) -> int | None:
        """The row at which a piece begins. None while it is not laid, or while a slot before it may still change."""
        moving = any(at < piece and not self._slots[slot].final for slot, at in self._laid.items())
        return None if moving or piece >= len(self._rows) else self._rows[piece]

    def size(self, slot: int, sized: SizedSlot) -> None:
        """Says which units a slot becomes, or says it anew: then everything from that medium on is laid again.

        Raises ValueError for a slot whose units were final already.
        """
        known = self._slots.get(slot)
        if known is not None and known.final:
            raise ValueError(f"the units of slot {slot} were final")
        self._slots[slot] = sized
        if known is not None and slot in self._laid and (known.pieces, known.grids) != (sized.pieces, sized.grids):
            self._take_back(slot)
        self._lay()

    def sized(self, slot: int) -> SizedSlot | None:
        return self._slots.get(slot)

    @property
    def laid_whole(self) -> bool:
        """Everything added so far is laid, and no slot will change."""
        return len(self._rows) == len(self._pieces) and all(sized.final for sized in self._slots.values())

    def _lay(self) -> None:
        while len(self._rows) < len(self._pieces):
            piece = self._pieces[len(self._rows)]
            row = len(self.timeline)
            if isinstance(piece, Drop):
                self.timeline.drop_units(piece.first - self.timeline.dropped)
            elif not isinstance(piece, Slot):
                self.timeline.append_text(piece)
            elif piece.index in self._slots:
                self._laid[piece.index] = len(self._rows)
                self._lay_medium(piece.index, self._slots[piece.index])
            else:
                return
            self._rows.append(row)

    def _lay_medium(self, slot: int, sized: SizedSlot) -> None:
        for piece in sized.pieces:
            if isinstance(piece, int):
                self.timeline.append_unit(UnitName(slot, piece), self._unit_layout(sized.grids[piece]))
            else:
                self.timeline.append_text(piece)

    def _take_back(self, slot: int) -> None:
        """Unlays everything from a medium on; rows computed there are computed again."""
        first = self._laid[slot]
        cut = self._rows[first]
        del self._rows[first:]
        self.timeline.truncate(cut)
        self.computed = min(self.computed, cut)
        self._laid = {s: piece for s, piece in self._laid.items() if piece < first}
        self._attached = min(self._attached, len(self.timeline.units))

    # -- attaching -----------------------------------------------------------------------------------------------------

    def attach(self, name: UnitName, extent: Extent) -> None:
        """Notes that a laid unit's keys and values are in the cross pool."""
        laid = self.timeline.find(name)
        assert laid is not None and laid.start == extent.start and name not in self._extents, (name, laid, extent)
        self._extents[name] = extent

    def attached(self, name: UnitName) -> bool:
        return name in self._extents

    def detach_moved(self) -> dict[UnitName, Extent]:
        """Forgets the units that are no longer laid as they were when they were attached, and returns them."""
        moved = {}
        for name, extent in self._extents.items():
            laid = self.timeline.find(name)
            held = sum(run.length for run in extent.runs)
            if laid is None or (laid.start, laid.layout.vision_tokens) != (extent.start, held):
                moved[name] = extent
        for name in moved:
            del self._extents[name]
        if moved:
            self._attached = 0
        return moved

    def detach_all(self) -> list[Extent]:
        """Forgets every extent and returns them, for the pool."""
        extents = list(self._extents.values())
        self._extents.clear()
        self._attached = 0
        return extents

    # -- computing -----------------------------------------------------------------------------------------------------

    @property
    def ready_rows(self) -> int:
        """Rows from the first that can be computed: up to the first unit that is not attached."""
        units = self.timeline.units
        while self._attached < len(units) and units[self._attached].name in self._extents:
            self._attached += 1
        return self.timeline.rows_before(self._attached)

    def rows(self, count: int) -> SequenceRows:
        """The next `count` rows, as a step wants them. `self.pages` must hold them."""
        stop = self.computed + count
        assert stop <= self.ready_rows, f"rows to {stop} are asked for, {self.ready_rows} are ready"
        boundaries = self.timeline.boundaries(self.computed, stop)
        spans = boundaries[boundaries[:, 1] > boundaries[:, 0]]
        first, last = (int(spans[:, 0].min()), int(spans[:, 1].max())) if len(spans) else (0, 0)
        extents = []
        units = self.timeline.units
        begin = bisect_left(units, first, key=lambda unit: unit.first)
        for unit in units[begin : bisect_left(units, last, key=lambda unit: unit.first)]:
            at = unit.first
            for run in self._extents[unit.name].runs:
                extents.append((at, run.start, run.length))
                at += run.length
        return SequenceRows(self.computed, count, self.pages, boundaries, extents)
