"""Who holds what of both pools: pages and units that sequences share, what is promised to whom, what may be evicted.

At any time `held + promised <= total` in both pools, where what several hold counts once and what nobody holds counts
nothing: it is a cache, and whoever needs room may evict it. A sequence is promised what its timeline needs as it is
laid; what it grows to beyond that it takes of what is free, and nobody's promise. A promise shrinks by all that a
sequence comes to hold, so whoever finds what it needs leaves its room to others. All of it is counting: this module has
seen no tensor.

Sequences are changed by one thread at a time; the accounts may be asked from any.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from chiasm.attention.pages import ExtentAllocator, PageAllocator, Run
from chiasm.errors import Overloaded
from chiasm.timeline import UnitName
from decoder_service.laid import Extent, SharedPage, UnitPlace
from decoder_service.room import Room
from decoder_service.sequence import DecodeSequence
from decoder_service.sharing import Shared


class Holdings:
    """The accounts of two pools.

    Attributes:
        pages, extents: the allocators.
    """

    def __init__(self, pages: PageAllocator, extents: ExtentAllocator) -> None:
        self.pages = pages
        self.extents = extents
        self._prefixes: Shared[bytes, int] = Shared(lambda page: pages.release([page]))
        self._units: Shared[UnitPlace, tuple[Run, ...]] = Shared(extents.give_back)
        self._promised: dict[DecodeSequence, Room] = {}  # what each may come to hold, all together
        self._left: dict[DecodeSequence, tuple[int, int]] = {}  # and what it does not hold yet of that
        self._due_pages = self._due_visual = 0  # the sums of those
        self._filling = 0  # slots that are written just now; they are still part of a promise
        self._lock = threading.RLock()

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Sequences that room is promised to."""
        return len(self._promised)

    @property
    def held(self) -> Room:
        """What sequences hold, each page and each unit counted once."""
        with self._lock:
            return Room(
                self.pages.total - self.pages.free - self._prefixes.unheld_size,
                self.extents.total - self.extents.free - self._units.unheld_size - self._filling,
            )

    @property
    def kept(self) -> Room:
        """What nobody holds and everybody may find, until room is needed."""
        with self._lock:
            return Room(self._prefixes.unheld_size, self._units.unheld_size)

    @property
    def promised(self) -> Room:
        """What sequences may still come to hold."""
        return Room(self._due_pages, self._due_visual)

    @property
    def free(self) -> Room:
        """What may be promised. Less than nothing where units that were shared had to be laid elsewhere."""
        with self._lock:
            return Room(
                self._free_pages, self.extents.free + self._units.unheld_size + self._filling - self._due_visual
            )

    @property
    def _free_pages(self) -> int:
        return self.pages.free + self._prefixes.unheld_size - self._due_pages

    def _settle(self, sequence: DecodeSequence) -> None:
        """Counts anew what a sequence may still come to hold. Called whenever its promise or its holdings change."""
        room = self._promised.get(sequence)
        pages, visual = self._left.pop(sequence, (0, 0))
        self._due_pages -= pages
        self._due_visual -= visual
        if room is not None:
            pages, visual = max(room.pages - len(sequence.pages), 0), max(room.visual - sequence.attached_tokens, 0)
            self._left[sequence] = pages, visual
            self._due_pages += pages
            self._due_visual += visual

    # -- promises ------------------------------------------------------------------------------------------------------

    def admit(self, sequence: DecodeSequence, need: Room, *, spare: int = 0) -> bool:
        """Promises room for a timeline, and gives it what is here already. False, and nothing is changed, if there is
        no room: what others hold costs nothing, what nobody holds costs what it takes.

        Args:
            spare: pages that must be free beyond that, for others to grow into.
        """
        with self._lock:
            free = self.free
            missing = Room(need.pages - self._held_pages(sequence), need.visual - self._held_visual(sequence))
            if missing.pages + spare > free.pages or missing.visual > free.visual:
                return False
            self._promised[sequence] = need
            self._settle(sequence)
            for name in sequence.known_units():
                self.hold_unit(sequence, name)
            self.share(sequence)
            return True

    def promise(self, sequence: DecodeSequence) -> Room:
        """What was promised to a sequence, what it holds of it included."""
        return self._promised[sequence]

    def keep_within(self, sequence: DecodeSequence, visual: int) -> None:
        """Promises a sequence that has grown so many visual tokens, all together.

        Raises Overloaded KV_POOL_FULL if they are not free; its promise stays as it was.
        """
        with self._lock:
            pages, before = self._promised[sequence]
            free = self.free.visual
            if visual - before > max(free, 0):
                raise _full(f"{visual - before} more visual tokens", visual - before, max(free, 0), retry_after=1.0)
            self._promised[sequence] = Room(pages, max(visual, before))
            self._settle(sequence)

    def _held_visual(self, sequence: DecodeSequence) -> int:
        """Visual tokens of its units that others hold."""
        tokens = 0
        for name in sequence.known_units():
            place = sequence.place_of(name)
            lent = None if place is None else self._units.find(place)
            if lent is not None and lent.holders:
                tokens += lent.size
        return tokens

    def _held_pages(self, sequence: DecodeSequence) -> int:
        """Pages with which it begins and which others hold."""
        pages = 0
        while pages < self._findable(sequence) and (digest := sequence.page_digest(pages)) is not None:
            lent = self._prefixes.find(digest)
            if lent is None or not lent.holders:
                break
            pages += 1
        return pages

    # -- units ---------------------------------------------------------------------------------------------------------

    def hold_unit(self, sequence: DecodeSequence, name: UnitName) -> bool:
        """Gives a sequence a unit that is here at its place. False if it is not."""
        with self._lock:
            laid, place = sequence.timeline.find(name), sequence.place_of(name)
            lent = None if place is None else self._units.find(place)
            if laid is None or lent is None:
                return False
            sequence.attach(name, Extent(lent.value, laid.start, self._units.hold(lent)))
            self._settle(sequence)
            return True

    @contextmanager
    def filling(self, sequence: DecodeSequence, name: UnitName, tokens: int) -> Iterator[list[Run]]:
        """Slots for a unit that is laid, to be filled inside the block. After it the sequence has the unit and others
        find it; where the block fails the slots are given back.

        Raises Overloaded KV_POOL_FULL if sequences hold the rest; nothing is then changed.
        """
        with self._lock:
            if tokens <= self.extents.free + self._units.unheld_size:
                while self.extents.free < tokens:
                    self._units.evict()
            runs = self.extents.take(tokens)
            self._filling += tokens
        filled = False
        try:
            yield runs
            filled = True
        finally:
            with self._lock:
                self._filling -= tokens
                if filled:
                    self._add_unit(sequence, name, tuple(runs))
                else:
                    self.extents.give_back(runs)

    def _add_unit(self, sequence: DecodeSequence, name: UnitName, runs: tuple[Run, ...]) -> None:
        laid, place = sequence.timeline.find(name), sequence.place_of(name)
        assert laid is not None, f"{name} is not laid"
        extent = Extent(runs, laid.start)
        if place is not None and self._units.find(place) is None:
            extent = extent._replace(lent=self._units.add(place, runs, extent.tokens))
        sequence.attach(name, extent)
        self._settle(sequence)

    def detach_moved(self, sequence: DecodeSequence) -> list[UnitName]:
        """Takes back what a sequence holds and has no place for since it was laid anew. Returns its units among that,
        which are to be attached anew.

        Raises Overloaded KV_POOL_FULL if they were shared, so that nothing became free, and there is no room for them.
        """
        with self._lock:
            moved = sequence.detach_moved()
            for extent in moved.values():
                self._release_extent(extent)
            # Nobody writes into a shared page: from the cut on it gets pages of its own.
            kept = sequence.computed // self.pages.page_size
            if kept < len(sequence.shared):
                sequence.computed = kept * self.pages.page_size
                self._release_pages(sequence, kept)
            self._settle(sequence)
            free = self.free
            if min(free) < 0:
                raise _full("more pages and visual tokens than were shared", -min(free), 0)
            return list(moved)

    def _release_extent(self, extent: Extent) -> None:
        if extent.lent is None:
            self.extents.give_back(extent.runs)
        else:
            self._units.release(extent.lent)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def grow(self, rows: Iterable[tuple[DecodeSequence, int]]) -> None:
        """Gives sequences pages for so many rows more, out of what they were promised and of what is free. All or none:
        raises Overloaded KV_POOL_FULL if the rest is held by sequences or promised to others."""
        size = self.pages.page_size
        wanted = [
            (sequence, missing)
            for sequence, more in rows
            if (missing := -(-(sequence.computed + more) // size) - len(sequence.pages)) > 0
        ]
        if not wanted:
            return
        with self._lock:
            beyond = sum(max(missing - self._left.get(sequence, (0, 0))[0], 0) for sequence, missing in wanted)
            if beyond > self._free_pages:
                raise _full(f"{beyond} pages of {size} text tokens", beyond, max(self._free_pages, 0))
            total = sum(missing for _, missing in wanted)
            while self.pages.free < total:
                self._prefixes.evict()
            for sequence, missing in wanted:
                self.pages.grow(sequence.pages, (len(sequence.pages) + missing) * size)
                self._settle(sequence)

    def slack(self, sequence: DecodeSequence) -> int:
        """Rows that its pages hold beyond those that are computed."""
        return len(sequence.pages) * self.pages.page_size - sequence.computed

    def share(self, sequence: DecodeSequence) -> int:
        """Lets others find the full pages of a sequence, and gives it the next ones that others have computed. The
        last row laid is always left to compute: a token may be drawn from it.

        Returns how many rows it was spared.
        """
        spared = sequence.spared
        with self._lock:
            size = self.pages.page_size
            while (digest := sequence.page_digest(number := len(sequence.shared))) is not None:
                lent = self._prefixes.find(digest)
                stop = (number + 1) * size
                if sequence.computed >= stop:
                    if lent is None:
                        sequence.shared.append(SharedPage(self._prefixes.add(digest, sequence.pages[number], 1), 0))
                        continue
                elif lent is None or number >= self._findable(sequence):
                    break
                self._prefixes.hold(lent)
                self.pages.release(sequence.pages[number : number + 1])
                sequence.pages[number : number + 1] = [lent.value]
                rest = max(stop - sequence.computed, 0)
                sequence.shared.append(SharedPage(lent, rest))
                sequence.computed += rest
                sequence.spared += rest
            self._settle(sequence)
        return sequence.spared - spared

    def _findable(self, sequence: DecodeSequence) -> int:
        """Pages that a sequence may be given instead of computing them."""
        return max(len(sequence.timeline) - 1, 0) // self.pages.page_size

    def _release_pages(self, sequence: DecodeSequence, first: int) -> None:
        """From page number `first` on. The last ones go first, so that a page is evicted before those it stands on."""
        own = sequence.pages[max(first, len(sequence.shared)) :]
        self.pages.release(own)
        for page in reversed(sequence.shared[first:]):
            self._prefixes.release(page.lent)
            sequence.spared -= page.spared
        del sequence.shared[first:], sequence.pages[first:]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def release(self, sequence: DecodeSequence, *, share: bool = False) -> None:
        """Takes back everything a sequence holds. May be called twice.

        Args:
            share: others find what it has computed. Nobody sees it hold what it is given for that.
        """
        with self._lock:
            if share:
                self.share(sequence)
            self._promised.pop(sequence, None)
            self._release_pages(sequence, 0)
            for extent in sequence.detach_all():
                self._release_extent(extent)
            sequence.computed = 0
            self._settle(sequence)

    def forget(self, sequence: DecodeSequence) -> None:
        """Lets nobody find any more what a sequence holds: something went wrong over it."""
        with self._lock:
            for page in sequence.shared:
                self._prefixes.forget(page.lent)
            for extent in sequence.extents():
                if extent.lent is not None:
                    self._units.forget(extent.lent)

    def flush(self) -> None:
        """Lets nobody find anything any more, and frees what nobody holds."""
        with self._lock:
            self._prefixes.flush()
            self._units.flush()


def _full(what: str, needed: int, free: int, *, retry_after: float = 0.1) -> Overloaded:
    return Overloaded(
        "KV_POOL_FULL",
        f"{what} are needed, {free} are free",
        retry_after=retry_after,
        facts={"needed": needed, "free": free},
    )
