"""What a client has been told of an answer, and what of a decoder's words comes next: the rule by which a stream goes
on with another decoder and nobody sees a seam.

A token has an index in its sequence. Only the next one is told: what was told before is dropped, what lies further on
is a gap, behind which nothing of that decoder is believed. It knows no worker and no call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

from chiasm.rpc.v1 import common_pb2 as pb

_LIMIT_OF_IDS: Final = "I"  # ids are uint32 on the wire


class OutOfStep(Exception):
    """A decoder said what cannot come now: tokens behind a gap, or an end before all tokens of its own count."""


class Answer:
    """The sequences of one answer.

    Args:
        sequences: how many are asked for.
        emitted: what the client has of them already. Checked: each sequence once, from 0 to `sequences` - 1.

    Attributes:
        dropped: messages that were not told, because they had been told before.
    """

    def __init__(self, sequences: int, emitted: Iterable[pb.EmittedSequence] = ()) -> None:
        self.dropped = 0
        self._ids = [array(_LIMIT_OF_IDS) for _ in range(sequences)]
        for known in emitted:
            self._ids[known.sequence].extend(known.ids)
        self._finished: set[int] = set()
        self._visible: dict[int, tuple[int, int]] = {}
        self._last: pb.Finished | None = None  # of the last sequence, until it is known what the request used

    @property
    def tokens(self) -> int:
        """How many the client has, of all sequences together."""
        return sum(map(len, self._ids))

    def emitted(self) -> list[pb.EmittedSequence]:
        """What the client has, as another decoder is told it."""
        return [pb.EmittedSequence(sequence=i, ids=ids) for i, ids in enumerate(self._ids) if ids]

    def takes_tokens(self, tokens: pb.Tokens) -> bool:
        """Whether these come next; they count as told then. Raises OutOfStep."""
        ids = self._of(tokens.sequence)
        due = len(ids)
        if tokens.index == due and tokens.sequence not in self._finished:
            ids.extend(tokens.ids)
            return True
        if tokens.index + len(tokens.ids) <= due:
            self.dropped += 1
            return False
        raise OutOfStep(f"token {due} of sequence {tokens.sequence} was due and token {tokens.index} came")

    def takes_visible(self, visible: pb.Visible) -> bool:
        """Whether the client does not know this. Raises OutOfStep."""
        seen = (visible.first, visible.count)
        behind = visible.index < len(self._of(visible.sequence))
        if behind or self._visible.get(visible.sequence) == seen:
            return False
        self._visible[visible.sequence] = seen
        return True

    def takes_finished(self, finished: pb.Finished) -> pb.Finished | None:
        """What there is to tell of the end of a sequence: that, nothing, or the end of another that waited for the
        request's usage. Behind an
        end with usage the answer is complete.

        A decoder that went on with an answer tells anew of sequences that had ended, in an order of its own, and its
        last word is the only one that says what the request used. Raises OutOfStep.
        """
        sequence, due = finished.sequence, len(self._of(finished.sequence))
        if finished.tokens != due:
            raise OutOfStep(f"sequence {sequence} has {due} tokens and ended with {finished.tokens}")
        whole = finished.HasField("usage")
        if sequence in self._finished:
            self.dropped += 1
            if not (whole and self._last is not None):
                return None
            self._last.usage.CopyFrom(finished.usage)
            self._last.times.CopyFrom(finished.times)
            finished = self._last
        self._finished.add(sequence)
        if not whole and len(self._finished) == len(self._ids):
            self._last = finished
            return None
        return finished

    def reopen(self) -> None:
        """Another decoder goes on: the end that waited for the last decoder's word will be told by that one."""
        if self._last is not None:
            self._finished.discard(self._last.sequence)
            self._last = None

    def _of(self, sequence: int) -> array[int]:
        if sequence >= len(self._ids):
            raise OutOfStep(f"sequence {sequence} of {len(self._ids)} was told of")
        return self._ids[sequence]
