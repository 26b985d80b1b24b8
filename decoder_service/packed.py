"""The pieces of a medium kept small: a decoder holds them for every request, and most requests only wait.

What it packs is a family's to make (`Prompt.medium`) and a sequence's to lay.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence


class PackedPieces:
    """Token ids and unit numbers in order, 4 bytes each. Runs of ids that are neighbours become one."""

    def __init__(self, pieces: Iterable[Sequence[int] | int]) -> None:
        self._packed = array("i")  # ids, and -1 - n for unit number n
        for piece in pieces:
            if isinstance(piece, int):
                self._packed.append(-1 - piece)
            else:
                self._packed.extend(piece)

    def __iter__(self) -> Iterator[Sequence[int] | int]:
        run = array("i")
        for number in self._packed:
            if number >= 0:
                run.append(number)
                continue
            if run:
                yield run
                run = array("i")
            yield -1 - number
        if run:
            yield run

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedPieces) and self._packed == other._packed

    __hash__ = None  # type: ignore[assignment]
