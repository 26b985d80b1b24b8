"""What a timeline in the decoder is made of, and where the parts of it are that are in the pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chiasm.attention.pages import Run
from chiasm.cache.sealed import EntryKey
from decoder_service.sharing import Lent


@dataclass(frozen=True, slots=True)
class SizedSlot:
    """The units of one medium.

    Attributes:
        pieces: token ids around the units, and unit numbers where they lie (`Prompt.medium`).
        grids: patches of each unit.
        offsets: seconds at which each frame is shown.
        final: they will not change any more.
        span: frames of each unit; the last has what is left.
    """

    pieces: Iterable[Sequence[int] | int]
    grids: Sequence[tuple[int, int]]
    offsets: Sequence[float]
    final: bool
    span: int = 1

    def frames_of(self, unit: int) -> Sequence[float]:
        """Seconds at which the frames of a unit are shown."""
        return self.offsets[unit * self.span : (unit + 1) * self.span]

    def time_of(self, unit: int) -> float:
        """Seconds at which a unit is shown: the mean of its frames' times."""
        frames = self.frames_of(unit)
        return sum(frames) / len(frames)


class Drop(NamedTuple):
    """Hides the oldest units from what is laid after it: those before unit number `first`."""

    first: int


class UnitPlace(NamedTuple):
    """What a unit in its pool depends on: whose it is (`Chain.domain`), which entry it was made from, and the position
    its keys are rotated for; None where it lies over its placeholders, wherever these are. The key says the grid, and
    so how many tokens there are."""

    domain: bytes
    key: EntryKey
    start: int | None


class Extent(NamedTuple):
    """A unit in the cross pool.

    Attributes:
        runs: of slots, in the order of its tokens.
        start: the position at which it is laid, which its keys are rotated for.
        lent: how others find it; None where nobody can.
    """

    runs: tuple[Run, ...]
    start: int
    lent: Lent[UnitPlace, tuple[Run, ...]] | None = None

    @property
    def tokens(self) -> int:
        return sum(run.length for run in self.runs)


class SharedPage(NamedTuple):
    """A full page of the self pool that others can find. Nobody writes into it.

    Attributes:
        spared: its rows that this sequence did not compute.
    """

    lent: Lent[bytes, int]
    spared: int
