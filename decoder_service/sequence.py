"""One timeline in the decoder: what is laid, what is still to be laid, what is attached, what is computed.

Pieces are laid in order, as far as the media of their slots are sized; units may be attached in any order once they
are laid; rows may be computed up to the first unit that is not attached. All of it is counting: this module has seen
no tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from chiasm.attention.backend import SequenceRows
from chiasm.attention.pages import Run
from chiasm.cache.sealed import EntryKey
from chiasm.chat_template import Piece, Slot
from chiasm.timeline import Timeline, UnitLayout, UnitName, unit_name
from decoder_service.laid import Drop, Extent, SharedPage, SizedSlot, UnitPlace
from decoder_service.prefix import Chain

_BLIND = np.zeros((1, 2), dtype=np.int64)
"""Boundaries of a row that sees no vision token."""


class DecodeSequence:
    """A growing timeline and its place in both pools.

    Args:
        unit_layout: how the family lays a unit of a grid.
        chain: of its pages; None for a sequence that shares nothing.
        overlaid: what is attached lies over the placeholders of its unit, instead of being seen by the rows behind it.

    Attributes:
        pages: of the self pool, in order. The first of them are `shared`, the rest are its own.
        computed: rows whose keys and values are in the self pool.
        spared: rows among them that were computed before, by others or for an earlier request.
        attached_tokens: visual tokens it has in the cross pool.
        apart: every row of it is computed here: it is given no page that others computed, and lends none. Units it
            shares as any other.
        coming: tokens that will be laid behind it next: its answer's, as far as it is known, or the one that is drawn;
            none where nothing is.
    """

    def __init__(
        self,
        unit_layout: Callable[[tuple[int, int]], UnitLayout],
        chain: Chain | None = None,
        *,
        overlaid: bool = False,
    ) -> None:
        self.timeline = Timeline()
        self.pages: list[int] = []
        self.shared: list[SharedPage] = []
        self.computed = 0
        self.spared = 0
        self.attached_tokens = 0
        self.coming = 1
        self.apart = False
        self._chain = chain or Chain(None, 1)
        self._unit_layout = unit_layout
        self._overlaid = overlaid
        self._pieces: list[Piece | Drop] = []
        self._rows: list[int] = []  # row at which each laid piece begins
        self._slots: dict[int, SizedSlot] = {}
        self._laid: dict[int, int] = {}  # laid slots and their pieces
        self._growing: set[int] = set()  # slots that are sized and not final
        self._keys: dict[UnitName, EntryKey] = {}
        self._extents: dict[UnitName, Extent] = {}
        self._attached = 0  # units from the first that are all attached
        self._runs: list[tuple[int, int, int]] = []  # of those, as `SequenceRows.extents`, neighbours joined
        self._look: tuple[tuple[int, int], npt.NDArray[np.int64], list[tuple[int, int, int]]] | None = None
        self._relaid = False  # something that was laid has moved, or is another unit now
        self._replaced: set[UnitName] = set()  # units that are others now

    # -- laying --------------------------------------------------------------------------------------------------------

    def extend(self, pieces: Iterable[Piece | Drop]) -> int:
        """Adds pieces at the end and lays what can be laid. Returns the number of the first, for `row_of`.

        Raises ValueError when a drop is laid that hides more units than are laid, or fewer than before.
        """
        number = len(self._pieces)
        self._pieces.extend(pieces)
        self._lay()
        return number

    def fork(self) -> DecodeSequence:
        """Another sequence with the same prompt, of which nothing is attached or computed yet."""
        chain = Chain(self._chain.domain, self._chain.page_size)
        other = DecodeSequence(self._unit_layout, chain, overlaid=self._overlaid)
        other._slots, other._keys = dict(self._slots), dict(self._keys)
        other.extend(self._pieces)
        return other

    def row_of(self, piece: int) -> int | None:
        """The row at which a piece begins. None while it is not laid, or while a slot before it may still change."""
        moving = any(self._laid.get(slot, piece) < piece for slot in self._growing)
        return None if moving or piece >= len(self._rows) else self._rows[piece]

    def size(self, slot: int, sized: SizedSlot) -> None:
        """Says which units a slot becomes, or says it anew: then everything from that medium on is laid again.

        Raises ValueError for a slot whose units were final already.
        """
        known = self._slots.get(slot)
        if known is not None and known.final:
            raise ValueError(f"the units of slot {slot} were final")
        self._slots[slot] = sized
        (self._growing.discard if sized.final else self._growing.add)(slot)
        if known is not None and (known.pieces, known.grids) != (sized.pieces, sized.grids):
            for unit, grid in enumerate(known.grids):
                if unit >= len(sized.grids) or sized.grids[unit] != grid:
                    self._replaced.add(UnitName(slot, unit))
                    self._keys.pop(UnitName(slot, unit), None)
            if slot in self._laid:
                self._take_back(slot)
        self._lay()

    def sized(self, slot: int) -> SizedSlot | None:
        return self._slots.get(slot)

    @property
    def laid_whole(self) -> bool:
        """Everything added so far is laid, and no slot will change."""
        return len(self._rows) == len(self._pieces) and not self._growing

    @property
    def due_rows(self) -> int:
        """Rows that it has once all that are coming are laid."""
        return len(self.timeline) + self.coming

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
                self.timeline.append_unit(unit_name(slot, piece), self._unit_layout(sized.grids[piece]))
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
        self._chain.truncate(cut)
        self._relaid = True
        self._forget_runs()

    # -- what it is made of ----------------------------------------------------------------------------------------

    def know(self, name: UnitName, key: EntryKey) -> None:
        """Says which entry a unit is.

        Raises ValueError if it was another one.
        """
        if self._keys.setdefault(name, key) != key:
            raise ValueError(f"{name} was another entry")

    def place_of(self, name: UnitName) -> UnitPlace | None:
        """Where others would find a laid unit. None while its entry is not known, or if nothing is shared."""
        laid, key, domain = self.timeline.find(name), self._keys.get(name), self._chain.domain
        if laid is None or key is None or domain is None:
            return None
        return UnitPlace(domain, key, None if self._overlaid else laid.start)

    def known_units(self) -> list[UnitName]:
        """Units whose entries are known."""
        return list(self._keys)

    def page_digest(self, page: int) -> bytes | None:
        """What page number `page` depends on, as `Chain.digest` has it. None for one that shares none."""
        return None if self.apart else self._chain.digest(page, self.timeline, self._keys)

    def digest(self) -> bytes | None:
        """What all of it depends on, as a page of all its rows would have it, whether or not it shares any. None while
        it is not laid whole, or while an entry in it is not known."""
        if not (self.laid_whole and len(self.timeline)):
            return None
        return Chain(self._chain.domain, len(self.timeline)).digest(0, self.timeline, self._keys)

    # -- attaching -----------------------------------------------------------------------------------------------------

    def attach(self, name: UnitName, extent: Extent) -> None:
        """Notes that a laid unit's keys and values are in the cross pool."""
        laid = self.timeline.find(name)
        assert laid is not None and laid.start == extent.start and name not in self._extents, (name, laid, extent)
        self._extents[name] = extent
        self.attached_tokens += extent.tokens

    def attached(self, name: UnitName) -> bool:
        return name in self._extents

    def attached_units(self) -> list[UnitName]:
        return list(self._extents)

    def extents(self) -> Iterable[Extent]:
        """Where the attached units are."""
        return self._extents.values()

    @property
    def relaid(self) -> bool:
        """Something was laid anew since `detach_moved`."""
        return self._relaid

    def detach_moved(self) -> dict[UnitName, Extent]:
        """Forgets the units that are no longer laid as they were when they were attached, and returns them."""
        if not self._relaid:
            return {}
        moved = {}
        for name, extent in self._extents.items():
            laid = self.timeline.find(name)
            stays = laid is not None and (laid.start, laid.layout.vision_tokens) == (extent.start, extent.tokens)
            if name in self._replaced or not stays:
                moved[name] = extent
        for name, extent in moved.items():
            del self._extents[name]
            self.attached_tokens -= extent.tokens
        self._relaid = False
        self._replaced.clear()
        self._forget_runs()
        return moved

    def detach_all(self) -> list[Extent]:
        """Forgets every extent and returns them, for the pool."""
        extents = list(self._extents.values())
        self._extents.clear()
        self.attached_tokens = 0
        self._forget_runs()
        return extents

    def _forget_runs(self) -> None:
        self._attached = 0
        self._runs.clear()
        self._look = None

    # -- computing -----------------------------------------------------------------------------------------------------

    @property
    def ready_rows(self) -> int:
        """Rows from the first that can be computed: up to the first unit that is not attached."""
        units = self.timeline.units
        while self._attached < len(units):
            unit = units[self._attached]
            extent = self._extents.get(unit.name)
            if extent is None:
                break
            at = unit.first
            for run in extent.runs:
                self._add_run(at, run)
                at += run.length
            self._attached += 1
        return self.timeline.rows_before(self._attached)

    def _add_run(self, at: int, run: Run) -> None:
        if self._runs:
            first, slot, length = self._runs[-1]
            if slot + length == run.start:
                self._runs[-1] = (first, slot, length + run.length)
                return
        self._runs.append((at, run.start, run.length))

    def rows(self, count: int) -> SequenceRows:
        """The next `count` rows, as a step wants them. `self.pages` must hold them."""
        stop, ready = self.computed + count, self.ready_rows
        assert stop <= ready, f"rows to {stop} are asked for, {ready} are ready"
        if self._overlaid:
            blind = _BLIND if count == 1 else np.zeros((count, 2), dtype=np.int64)
            return SequenceRows(self.computed, count, self.pages, blind, [], self._slots_over(stop))
        known = (len(self.timeline.units), self.timeline.dropped)
        if count == 1 and self._look is not None and self._look[0] == known:
            return SequenceRows(self.computed, 1, self.pages, *self._look[1:])
        boundaries = self.timeline.boundaries(self.computed, stop)
        spans = boundaries[boundaries[:, 1] > boundaries[:, 0]]
        first, last = (int(spans[:, 0].min()), int(spans[:, 1].max())) if len(spans) else (0, 0)
        extents = self._runs_within(first, last)
        # A drop may be laid already, behind this row.
        if count == 1 and stop == len(self.timeline) and self.timeline.dropped_from < stop:
            self._look = known, boundaries, extents  # so does every token that is drawn behind this one
        return SequenceRows(self.computed, count, self.pages, boundaries, extents)

    def _slots_over(self, stop: int) -> npt.NDArray[np.int64] | None:
        """(rows,) slot whose features lie over each row from the first that is not computed; None where none do."""
        tokens = self.timeline.overlaid(self.computed, stop)
        if tokens is None:
            return None
        slots = np.full_like(tokens, -1)
        for first, slot, length in self._runs_within(int(tokens[tokens >= 0].min()), int(tokens.max()) + 1):
            within = (tokens >= first) & (tokens < first + length)
            slots[within] = tokens[within] + (slot - first)
        return slots

    def _runs_within(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Vision tokens [first, last), as `SequenceRows.extents`."""
        runs = []
        begin = bisect_right(self._runs, first, key=lambda run: run[0]) - 1
        for at, slot, length in self._runs[max(begin, 0) :]:
            low, high = max(at, first), min(at + length, last)
            if low >= high:
                break
            runs.append((low, slot + low - at, high - low))
        return runs
