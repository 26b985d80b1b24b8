"""What is drawn for one sequence: the next token's index, bans and history. Used in the device's thread alone, between
two steps of its sequence.

It knows no text and nobody who listens; what a token means for the answer is for `answer` to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from decoder_service.guide import Guide
from decoder_service.options import Options
from decoder_service.penalties import Ids, Seen
from decoder_service.sampler import Draw, Drawn
from decoder_service.sequence import DecodeSequence


class Drawer:
    """Draws for one sequence.

    Args:
        number: of the sequence among those of its request.
        banned: ids that are never drawn.
        stops: ids that end the answer, and are not drawn before `min_tokens`.

    Attributes:
        drawn: tokens so far.
        guide: which tokens may come; None lets all come.
    """

    def __init__(
        self,
        sequence: DecodeSequence,
        options: Options,
        *,
        number: int = 0,
        banned: Iterable[int] = (),
        stops: Iterable[int] = (),
    ) -> None:
        self.drawn = 0
        self.guide: Guide | None = None
        self._sequence = sequence
        self._options = options
        self._number = number
        self._banned = _ids(banned)
        self._banned_early = _ids([*banned, *stops]) if options.min_tokens else self._banned
        self._history = Seen()
        self._read = 0  # rows of the timeline that were seen
        self._elsewhere: Sequence[int] = ()  # drawn and laid, and not noted yet

    def next(self) -> Draw:
        """How the next token is drawn."""
        self._read_rows()
        early = self.drawn < self._options.min_tokens
        return Draw(
            self._options.drawing,
            index=self.drawn,
            sequence=self._number,
            banned=self._banned_early if early else self._banned,
            seen=self._history,
            guide=None if self.guide is None else self.guide.fill,
        )

    def drew(self, token: Drawn) -> None:
        """Lays the token that was drawn. Raises as `Guide.accept` does."""
        if self.guide is not None:
            self.guide.accept(token)
            token.ends = self.guide.ended
        timeline = self._sequence.timeline
        token.row, token.position = len(timeline), timeline.counter
        timeline.append_token(token)
        self._read += 1
        if self._options.drawing.penalised:
            self._history.add(token)
        self.drawn += 1

    def lay(self, ids: Sequence[int]) -> None:
        """Lays tokens that were drawn elsewhere. The next one is drawn as if they had been drawn here. Comes before the
        first draw."""
        assert not self.drawn, "an answer is gone on with from its beginning"
        self._sequence.timeline.append_text(ids)
        self._sequence.coming = 1
        self._elsewhere = ids
        self.drawn = len(ids)

    def _read_rows(self) -> None:
        """Notes the rows that others laid since the last token: they count as prompt, but for those of an answer that
        was begun elsewhere."""
        laid = len(self._sequence.timeline)
        if laid > self._read and self._options.drawing.penalised:
            self._history.read(self._sequence.timeline.ids(self._read, laid))
            for token in self._elsewhere:
                self._history.add(token)
        self._read, self._elsewhere = laid, ()


def _ids(ids: Iterable[int]) -> Ids:
    return np.array(sorted(set(ids)), dtype=np.int64)
