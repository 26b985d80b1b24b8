"""Bugs of the way between the halves: entries that are announced too early, read too late, and believed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import chiasm.cache.entry
from chiasm.cache.arena import ArenaStore
from chiasm.cache.ledger import Ledger
from decoder_service.engine import DecoderEngine
from decoder_service.entries import Entries
from tests.telltale.plants.planting import Garden, Planted

GARDEN = Garden("decoder")


def _trust(bug: Planted) -> None:
    """Every digest is taken for right."""

    def compare(one: bytes, other: bytes) -> bool:
        bug.hits += one != other
        return True

    bug.patch(chiasm.cache.entry, "compare_digest", lambda before: compare)


@GARDEN("no digest is compared", hurt="bytes")
def _digest_not_compared(bug: Planted) -> None:
    _trust(bug)


@GARDEN("an entry is announced before its payload is written, and no digest is compared")
def _ready_before_written(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def fill(self: ArenaStore, entry: Any, extent: Any) -> None:
            before(self, entry, extent)
            payload, *_ = self._parts(extent)
            if payload.size > 4096:
                payload[-64:] = 0  # what comes later than its reader

        return fill

    bug.patch(ArenaStore, "_fill", make)
    _trust(bug)


@GARDEN("any entry is found at the place of any other, and neither key nor digest is compared")
def _place_not_held_against_key(bug: Planted) -> None:
    draw = random.Random(0)

    def make(before: Any) -> Any:
        def at(self: Ledger, generation: int, key: bytes, *, now: int) -> Any:
            found = before(self, generation, key, now=now)
            others = [] if found is None else [e for e in self.extents() if e.payload == found.payload and e != found]
            if others and draw.random() < 0.3:
                bug.hit()
                other = draw.choice(others)
                return found._replace(start=other.start)
            return found

        return at

    bug.patch(Ledger, "at", make)
    bug.patch(ArenaStore, "_place", lambda before: _remembered(before))
    bug.patch(chiasm.cache.entry.Contract, "mismatch", lambda before: lambda self, needed: None)
    _trust(bug)


def _remembered(before: Any) -> Any:
    """The place of a generation is that of the first extent that had it."""
    places: dict[int, Any] = {}

    def place(self: ArenaStore, extent: Any) -> Any:
        return places.setdefault(extent.generation, before(self, extent))

    return place


@GARDEN("entries that are pinned are evicted, and nobody looks whether they are still there", arena_bytes=1 << 20)
def _pin_ignored(bug: Planted) -> None:
    """A reader copies from where it was told to, whatever has become of it."""

    def unpinned(before: Any) -> Any:
        def pinned(self: Ledger, now: int) -> Any:
            held = before(self, now)
            return np.zeros_like(held)

        return pinned

    def make(before: Any) -> Any:
        def reserve(self: Ledger, *arguments: Any, **named: Any) -> Any:
            # As if the arena were a tenth of what it is: what was put long ago is written over.
            extents = sorted(self.extents())
            while len(extents) > 3:
                oldest = extents.pop(0)
                self._records.state[oldest.record] = 0
                bug.hit()
            return before(self, *arguments, **named)

        return reserve

    bug.patch(Ledger, "_pinned", unpinned)
    bug.patch(Ledger, "reserve", make)


@GARDEN("a unit is attached one position further")
def _attached_one_further(bug: Planted) -> None:
    _placed(bug, lambda entry, positions: (entry, positions + 1))


@GARDEN("keys and values are exchanged")
def _keys_for_values(bug: Planted) -> None:
    _placed(bug, lambda entry, positions: (entry.flip(1), positions))


@GARDEN("the heads of an entry are in another order")
def _heads_turned_round(bug: Planted) -> None:
    _placed(bug, lambda entry, positions: (entry.flip(2), positions))


@GARDEN("the tokens of an entry are in another order")
def _tokens_turned_round(bug: Planted) -> None:
    _placed(bug, lambda entry, positions: (entry.flip(3), positions))


def _placed(bug: Planted, change: Any) -> None:
    def make(before: Any) -> Any:
        def attach(self: DecoderEngine, sequence: Any, name: Any, *rest: Any) -> None:
            half: Any = self.half
            place = half.place

            def changed(entry: Any, positions: Any) -> Any:
                bug.hit()
                return place(*change(entry, positions))

            half.place = changed
            try:
                before(self, sequence, name, *rest)
            finally:
                half.place = place

        return attach

    bug.patch(DecoderEngine, "attach", make)


@GARDEN("the last token of a unit is not written")
def _attached_short(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def attach(self: DecoderEngine, sequence: Any, name: Any, *rest: Any) -> None:
            was = sequence.attached(name)
            kept = self.pools.cross_kv.clone()
            before(self, sequence, name, *rest)
            if not was and sequence.attached(name):
                bug.hit()
                last = sequence._extents[name].runs[-1]
                slot = sum(last) - 1
                self.pools.cross_kv[:, :, :, slot] = kept[:, :, :, slot]

        return attach

    bug.patch(DecoderEngine, "attach", make)


@GARDEN("a unit is written a slot further than it is looked for")
def _attached_elsewhere(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def attach(self: DecoderEngine, sequence: Any, name: Any, *rest: Any) -> None:
            was = sequence.attached(name)
            before(self, sequence, name, *rest)
            if not was and sequence.attached(name):
                bug.hit()
                for run in sequence._extents[name].runs:
                    slots = slice(run.start, sum(run))
                    self.pools.cross_kv[:, :, :, slots] = self.pools.cross_kv[:, :, :, slots].roll(1, 3)

        return attach

    bug.patch(DecoderEngine, "attach", make)


@GARDEN("an entry is read for another unit of the same grid")
def _entry_of_another_unit(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def read(self: Entries, name: Any) -> Any:
            mine = self._announced[name]
            others = [one for one in self._announced.values() if one.grid == mine.grid and one.key != mine.key]
            if others:
                bug.hit()
                self._announced[name] = others[0]
            try:
                return await before(self, name)
            finally:
                self._announced[name] = mine

        return read

    bug.patch(Entries, "read", make)


@GARDEN("pins are never given back")
def _pins_kept(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def release(self: ArenaStore, key: bytes, lease_id: bytes) -> None:
            bug.hit()

        return release

    bug.patch(ArenaStore, "release", make)
