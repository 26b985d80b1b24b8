"""Bugs of what is drawn: other numbers, other temperatures, tokens that are barred."""

from __future__ import annotations

from typing import Any

import decoder_service.model
import decoder_service.sampler
from decoder_service.drawer import Drawer
from decoder_service.noise import Place
from decoder_service.sampler import Draw
from tests.telltale.plants.planting import Garden, Planted

GARDEN = Garden("decoder")


def _place(bug: Planted, change: Any) -> None:
    def make(before: Any) -> Any:
        def place(self: Draw) -> Place:
            bug.hit()
            changed: Place = change(before.fget(self))
            return changed

        return property(place)

    bug.patch(Draw, "place", make)


@GARDEN("all tokens are drawn with the numbers of the first")
def _seed_index_ignored(bug: Planted) -> None:
    _place(bug, lambda place: place._replace(before=0))


@GARDEN("the numbers are those of the place before")
def _seed_index_off_by_one(bug: Planted) -> None:
    _place(bug, lambda place: place._replace(before=max(place.before - 1, 0)))


@GARDEN("the seed is ignored")
def _seed_ignored(bug: Planted) -> None:
    _place(bug, lambda place: place._replace(seed=0))


@GARDEN("a seed has 32 bits")
def _seed_truncated(bug: Planted) -> None:
    _place(bug, lambda place: place._replace(seed=place.seed & 0xFFFFFFFF))


@GARDEN("every sequence is the second")
def _sequence_number_off(bug: Planted) -> None:
    _place(bug, lambda place: place._replace(sequence=place.sequence + 1))


@GARDEN("what is banned may be drawn")
def _ban_forgotten(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def ban(logits: Any, banned: Any) -> None:
            bug.hits += any(len(ids) for ids in banned)

        return ban

    bug.patch(decoder_service.sampler, "ban", make)


@GARDEN("of equal rows in a batch one is drawn for all")
def _rows_of_a_batch_mixed(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def draw(logits: Any, draws: Any) -> Any:
            outcomes = before(logits, draws)
            if len(outcomes) > 1:
                bug.hit()
                outcomes[0], outcomes[1] = outcomes[1], outcomes[0]
            return outcomes

        return draw

    bug.patch(decoder_service.model, "draw_rows", make)


@GARDEN("a token that was drawn is laid twice")
def _token_laid_twice(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def drew(self: Drawer, token: Any) -> None:
            before(self, token)
            if self.drawn == 3:
                bug.hit()
                self._sequence.timeline.append_token(token)

        return drew

    bug.patch(Drawer, "drew", make)


@GARDEN("another token is laid than was drawn")
def _another_token_laid(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def drew(self: Drawer, token: Any) -> None:
            before(self, token)
            if self.drawn == 2:
                bug.hit()
                timeline = self._sequence.timeline
                timeline.truncate(len(timeline) - 1)
                timeline.append_token(int(token) ^ 1)

        return drew

    bug.patch(Drawer, "drew", make)
