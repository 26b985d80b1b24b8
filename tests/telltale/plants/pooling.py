"""Bugs of what a decoder keeps: units and pages that are taken for others, freed too early, or looked for elsewhere."""

from __future__ import annotations

from typing import Any

import decoder_service.model
import encoder_service.engine
from chiasm.attention.pages import ExtentAllocator, PageAllocator
from chiasm.timeline import Timeline
from decoder_service.branch import Branch
from decoder_service.laid import UnitPlace
from decoder_service.prefix import Chain
from decoder_service.sequence import DecodeSequence
from decoder_service.sharing import Shared
from tests.telltale.plants.planting import Garden, Planted

GARDEN = Garden("decoder")

_ROOMY: dict[str, Any] = {"text_tokens": 1 << 14, "visual_tokens": 4096}


def _alike(bug: Planted, change: Any) -> None:
    """Units are found by less than they are."""

    def make(before: Any) -> Any:
        def find(self: Shared[Any, Any], key: Any) -> Any:
            found = before(self, key)
            if found is None and isinstance(key, UnitPlace):
                for other, lent in self._found.items():
                    if change(other) == change(key):
                        bug.hit()
                        return lent
            return found

        return find

    bug.patch(Shared, "find", make)


@GARDEN("a unit is found at any position", **_ROOMY)
def _unit_wherever_it_lies(bug: Planted) -> None:
    _alike(bug, lambda place: place._replace(start=0))


@GARDEN("a unit is found whatever its entry is", **_ROOMY)
def _unit_whatever_it_is(bug: Planted) -> None:
    _alike(bug, lambda place: place._replace(key=b""))


@GARDEN("a unit is found whosever it is", **_ROOMY)
def _unit_of_another_tenant(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def unit_key(root: bytes, *arguments: Any, **named: Any) -> Any:
            return before(bytes(32), *arguments, **named)

        return unit_key

    bug.patch(encoder_service.engine, "unit_key", make)
    _alike(bug, lambda place: place._replace(domain=b""))


@GARDEN("pages of text are shared between tenants", **_ROOMY)
def _pages_of_another_tenant(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def domain(root: bytes, *rest: Any) -> Any:
            bug.hit()
            return before(bytes(32), *rest)

        return domain

    bug.patch(decoder_service.model, "domain_of", make)


@GARDEN("a page is found whatever was seen before it", **_ROOMY)
def _page_of_other_units(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def link(self: Chain, page: int, timeline: Any, keys: Any) -> Any:
            bug.hit()
            return before(self, page, timeline, dict.fromkeys(keys, bytes(32)))

        return link

    bug.patch(Chain, "_link", make)


@GARDEN("a page is found whatever stands before it", **_ROOMY)
def _page_of_another_prompt(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def link(self: Chain, page: int, timeline: Any, keys: Any) -> Any:
            bug.hit()
            kept, self._digests = self._digests, [self.domain or b""] * len(self._digests)
            try:
                return before(self, page, timeline, keys)
            finally:
                self._digests = kept

        return link

    bug.patch(Chain, "_link", make)


@GARDEN("a page is found by the ids of its rows alone", **_ROOMY)
def _page_by_its_words(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def link(self: Chain, page: int, timeline: Any, keys: Any) -> Any:
            start, stop = page * self.page_size, (page + 1) * self.page_size
            if stop > len(timeline):
                return None
            bug.hit()
            return (str(timeline.ids(start, stop)).encode() * 32)[-64:] + (self.domain or b"")

        return link

    bug.patch(Chain, "_link", make)


def _freed_early(bug: Planted, kind: type) -> None:
    """What several hold goes when the first lets go of it."""

    def make(before: Any) -> Any:
        def hold(self: Shared[Any, Any], lent: Any) -> Any:
            before(self, lent)
            if isinstance(lent.key, kind) and lent.holders > 1:
                bug.hit()
                lent.holders -= 1
            return lent

        return hold

    bug.patch(Shared, "hold", make)


@GARDEN("a unit that several see is freed by the first who leaves")
def _unit_freed_early(bug: Planted) -> None:
    _freed_early(bug, UnitPlace)


@GARDEN("a page that several have is freed by the first who leaves", text_tokens=512)
def _page_freed_early(bug: Planted) -> None:
    _freed_early(bug, bytes)


@GARDEN("the slots of a unit are handed out again while it is there")
def _slots_handed_out_twice(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def take(self: ExtentAllocator, tokens: int) -> Any:
            runs = before(self, tokens)
            last = self.__dict__.get("_planted")
            if last is not None and sum(run.length for run in last) == tokens:
                bug.hit()
                self.give_back(runs)
                return before(self, tokens) and last
            self.__dict__["_planted"] = [*runs]
            return runs

        return take

    bug.patch(ExtentAllocator, "take", make)


@GARDEN("two sequences are given the same page")
def _page_handed_out_twice(bug: Planted) -> None:
    last: list[int] = []

    def make(before: Any) -> Any:
        def grow(self: PageAllocator, pages: list[int], tokens: int) -> None:
            count = len(pages)
            before(self, pages, tokens)
            if last and len(pages) > count and last[0] not in pages:
                bug.hit()
                pages[-1] = last.pop()
            elif len(pages) > count:
                last[:] = pages[-1:]

        return grow

    bug.patch(PageAllocator, "grow", make)


@GARDEN("rows see a visual token less")
def _visible_one_less(bug: Planted) -> None:
    _boundaries(bug, lambda made: made[:, 1].__isub__(made[:, 1] > made[:, 0]))


@GARDEN("rows do not see the first visual token")
def _first_token_unseen(bug: Planted) -> None:
    _boundaries(bug, lambda made: made[:, 0].__iadd__(made[:, 1] > made[:, 0]))


def _boundaries(bug: Planted, change: Any) -> None:
    def make(before: Any) -> Any:
        def boundaries(self: Timeline, start: int = 0, stop: int | None = None) -> Any:
            made = before(self, start, stop)
            bug.hits += bool((made[:, 1] > made[:, 0]).any())
            change(made)
            return made

        return boundaries

    bug.patch(Timeline, "boundaries", make)


@GARDEN("a unit is seen a row too early")
def _unit_seen_early(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def visible(self: Timeline, start: int = 0, stop: int | None = None) -> Any:
            first, last, _ = slice(start, stop).indices(len(self))
            made = before(self, first, min(last + 1, len(self)))
            later = made[1:]
            bug.hits += bool(len(later) and (later != made[: len(later)]).any())
            made[: len(later)] = later
            return made[: max(last - first, 0)]

        return visible

    bug.patch(Timeline, "visible", make)


@GARDEN("drawn tokens lie one position further")
def _answer_one_further(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def ordinary(self: Timeline, row: int) -> Any:
            found = before(self, row)
            if found is None:
                return None
            bug.hit()
            return found[0], found[1] + 1

        return ordinary

    bug.patch(Timeline, "ordinary", make)


@GARDEN("visual tokens are read in the order in which they were attached")
def _units_in_another_order(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def within(self: DecodeSequence, first: int, last: int) -> Any:
            runs = before(self, first, last)
            slots = sorted(runs, key=lambda run: run[1])
            bug.hits += slots != runs
            return slots

        return within

    bug.patch(DecodeSequence, "_runs_within", make)


@GARDEN("what a timeline held is kept when it ends")
def _cancel_swallowed_by_decoder(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def release(self: Branch) -> None:
            if self.answer.finished:
                await before(self)
            else:
                bug.hit()

        return release

    bug.patch(Branch, "release", make)
