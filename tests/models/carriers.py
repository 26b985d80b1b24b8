"""A device without a device: rooms apart from what is kept, copies as early or as late as a stream may make them, and
a note of all that was asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chiasm.models.carrying import Arriving


class Rooms:
    """`Carrier` with rooms of its own.

    A copy on another stream is made at any time between its beginning and its arrival, but not before what was asked of
    the device has read the room. Here the device has done that when it is asked, so both ends of it are right.

    Args:
        late: copies are made when they arrive, and else when they begin.

    Attributes:
        log: what was asked of it: (what, number of what is kept).
        room_bytes: of all rooms that were made.
    """

    def __init__(self, *, late: bool = False) -> None:
        self.log: list[tuple[str, int]] = []
        self.room_bytes = 0
        self._late = late
        self._numbers: dict[int, int] = {}

    def keep(self, sizes: Sequence[int]) -> list[Tensor]:
        self.log.append(("keep", len(sizes)))
        made = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        for kept in made:
            self._numbers[kept.data_ptr()] = len(self._numbers)
        return made

    def room(self, size: int) -> Tensor:
        self.room_bytes += size
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN in every type, until something comes

    def fetch(self, kept: Tensor, room: Tensor) -> Arriving:
        number = self._numbers[kept.data_ptr()]
        self.log.append(("fetch", number))
        came = room[: kept.nbytes]

        def arrived() -> Tensor:
            self.log.append(("arrive", number))
            return came.copy_(kept) if self._late else came

        if self._late:
            room.fill_(255)
        else:
            came.copy_(kept)
        return arrived

    def leave(self, kept: Tensor) -> None:
        self.log.append(("leave", self._numbers[kept.data_ptr()]))

    def settle(self) -> None:
        self.log.append(("settle", -1))

    def freed(self) -> None:
        self.log.append(("freed", -1))

    def told(self, *what: str) -> list[tuple[str, int]]:
        """What was asked of these kinds since the last time, in order."""
        told = [entry for entry in self.log if entry[0] in what]
        self.log.clear()
        return told
