"""What a prompt needs of the context and of both pools, and what would make it fit.

All of it is counting, from how the family lays text and units: nothing is laid for it, no tensor is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from chiasm.chat_template import Piece, Slot
from chiasm.errors import Fact, InvalidRequest
from chiasm.media.sample import spread
from chiasm.models.family import Grid, MediumFacts, MediumPlan
from chiasm.timeline import UnitLayout
from decoder_service.laid import SizedSlot


class Needs(NamedTuple):
    """Of a stretch of a timeline: rows of text, placeholders included, positions, and visual tokens."""

    rows: int = 0
    positions: int = 0
    visual: int = 0

    def plus(self, other: Needs) -> Needs:
        return Needs(self.rows + other.rows, self.positions + other.positions, self.visual + other.visual)

    @property
    def context(self) -> int:
        """What is spent of the context: the next position and the next row are both bounded by it."""
        return max(self.rows, self.positions)


class Limits(NamedTuple):
    """Of one model on one worker.

    Attributes:
        context: rows and positions of prompt and answer together.
        text, visual: tokens that the two pools hold.
    """

    context: int
    text: int
    visual: int

    def left(self, needs: Needs) -> int:
        """Tokens for which there is room after a prompt; below 0 for one that does not fit by itself."""
        return -1 if needs.visual > self.visual else min(self.context - needs.context, self.text - needs.rows)

    def room(self, needs: Needs, asked: int | None) -> int:
        """Tokens that can be drawn after a prompt: as many as asked for, or as many as there is room for; 0 if it does
        not fit."""
        left = self.left(needs)
        return 0 if left < least(asked) else left if asked is None else asked


def least(asked: int | None) -> int:
    """Tokens that an answer needs: one at least, where it is not said how many. None are drawn where 0 is asked for."""
    return 1 if asked is None else asked


@dataclass(frozen=True, slots=True)
class Medium:
    """A medium as it was sized.

    Attributes:
        framed: the family's pieces for units at those seconds (`Prompt.medium`), where frames may be left out; None
            where they may not.
        facts: what it is, of so many frames; None where that is not known.
    """

    sized: SizedSlot
    framed: Callable[[Sequence[float]], Sequence[Sequence[int] | int]] | None
    facts: Callable[[int], MediumFacts] | None = None

    def thinned(self, most: int) -> SizedSlot:
        """With `most` frames at most, the others left out evenly, each as large as it was sized."""
        frames = len(self.sized.offsets)
        if self.framed is None or frames <= most:
            return self.sized
        offsets = [self.sized.offsets[i] for i in spread(frames, most)]
        kept = spread(len(self.sized.grids), -(-most // self.sized.span))
        made = replace(self.sized, grids=[self.sized.grids[i] for i in kept], offsets=offsets)
        return replace(made, pieces=self.framed([made.time_of(unit) for unit in range(len(kept))]))


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt before it is laid.

    Attributes:
        pieces: token ids, and slots.
        media: by slot.
        unit_layout: how the family lays a unit of a grid.
        size: how it sizes all media of a request (`Processor.size`); None where frames stay as large as they are.
    """

    pieces: Sequence[Piece]
    media: dict[int, Medium]
    unit_layout: Callable[[Grid], UnitLayout]
    size: Callable[[Sequence[MediumFacts]], Sequence[MediumPlan]] | None = None

    def needs(self, *, most: int | None = None) -> Needs:
        """Of the whole prompt, with `most` frames of each video at most, the others left out evenly and those that stay
        as large as the family then makes them."""
        total = self.of_text()
        thinned = {} if most is None else self._thinned(most)
        for piece in self.pieces:
            if isinstance(piece, Slot):
                total = total.plus(self._of(thinned.get(piece.index) or self.media[piece.index].sized))
        return total

    def _thinned(self, most: int) -> dict[int, SizedSlot]:
        """The media, by slot, with `most` frames of each video at most."""
        thinned = {slot: medium.thinned(most) for slot, medium in self.media.items()}
        known = {slot: medium.facts for slot, medium in self.media.items() if medium.facts is not None}
        if self.size is None or len(known) < len(thinned):
            return thinned
        try:
            plans = self.size([facts(len(thinned[slot].offsets)) for slot, facts in known.items()])
        except InvalidRequest:  # it was sized by other options than these
            return thinned
        for slot, plan in zip(known, plans, strict=True):
            if len(thinned[slot].offsets) < len(self.media[slot].sized.offsets):
                thinned[slot] = replace(thinned[slot], grids=[plan.grid] * len(thinned[slot].grids))
        return thinned

    def of_text(self) -> Needs:
        """Of what belongs to no medium."""
        rows = sum(len(piece) for piece in self.pieces if not isinstance(piece, Slot))
        return Needs(rows, rows)

    def of_medium(self, slot: int) -> Needs:
        return self._of(self.media[slot].sized)

    def _of(self, sized: SizedSlot) -> Needs:
        total = Needs()
        for piece in sized.pieces:
            if isinstance(piece, int):
                layout = self.unit_layout(sized.grids[piece])
                total = total.plus(Needs(len(layout.placeholder_ids), layout.advance, layout.vision_tokens))
            else:
                total = total.plus(Needs(len(piece), len(piece)))
        return total

    def fits_with(self, limits: Limits, asked: int | None) -> str:
        """The one option that would make it fit: `max_tokens=N` where a shorter answer is enough, else `max_frames=N`
        on every video. Empty when neither is enough, or when it fits.

        N is the largest that does; of frames that a pixel budget makes larger when they are fewer, one that does.
        """
        if limits.left(self.needs()) >= least(asked):
            return ""
        if room := limits.room(self.needs(), None):
            return f"max_tokens={room}"
        thinned = [len(medium.sized.offsets) for medium in self.media.values() if medium.framed is not None]
        fits, fails = 0, max(thinned, default=0)
        while fails - fits > 1:
            most = (fits + fails) // 2
            if limits.left(self.needs(most=most)) >= least(asked):
                fits = most
            else:
                fails = most
        return f"max_frames={fits}" if fits else ""

    def too_long(self, limits: Limits, asked: int | None) -> InvalidRequest:
        """CONTEXT_LENGTH_EXCEEDED with every number: `needed` is the sum of `text`, of all shares in `media`, which are
        in the order of slots, and of `answer`."""
        needs = self.needs()
        answer = least(asked)
        axis = "rows" if needs.rows > needs.positions else "positions"
        media = [getattr(self.of_medium(slot), axis) for slot in sorted(self.media)]
        text = self.of_text().rows
        said = f"{text} of text" + (f", {sum(media)} of media" if media else "")
        return context_exceeded(
            f"the prompt needs {needs.context} positions ({said})" + (f" and the answer {answer}" if answer else ""),
            needed=needs.context + answer,
            limit=limits.context,
            text=text,
            media=",".join(map(str, media)),
            visual=needs.visual,
            answer=answer,
            fits_with=self.fits_with(limits, asked),
        )


def check_text(pieces: Sequence[Piece], limit: int, *, answer: int = 1) -> None:
    """Raises InvalidRequest for a prompt whose text alone leaves no room for so long an answer, before any of it is
    laid."""
    text = sum(len(piece) for piece in pieces if not isinstance(piece, Slot))
    if text + answer > limit:
        raise context_exceeded(
            f"the text has {text} tokens" + (f" and the answer at least {answer}" if answer else ""),
            needed=text + answer,
            limit=limit,
            text=text,
            media="",
            fits_with="",
        )


def context_exceeded(what: str, *, needed: int, limit: int, **facts: Fact) -> InvalidRequest:
    return InvalidRequest(
        "CONTEXT_LENGTH_EXCEEDED",
        f"{what}, the context has {limit}",
        facts={"needed": needed, "limit": limit, **facts},
    )
