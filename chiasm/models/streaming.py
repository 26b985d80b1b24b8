"""Blocks of which a few are on the device at a time: while one computes the next is fetched, behind the last the first.

A block is fetched when the one before it is called, into a room that is given back by whichever block is wanted again
latest: so of N rooms two take turns, and what lies in the others stays there from step to step. What is called next is
what was called next the last time, which is the block behind it until a step leaves some out. A wrong guess costs time:
the block that is called is waited for, whatever was guessed. Blocks are kept, fetched and computed with by the process
that owns them; nothing is gathered from others.

It knows blocks as `nn.Module` that are called, and how their bytes come as `carrying.Carrier`. No forward knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from chiasm.models.carrying import Arriving, Carrier
from chiasm.models.parts import Part

LEAST: Final = 2
"""Blocks that are on the device: the one that computes and the next."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """How the blocks of a half are streamed.

    Attributes:
        resident_blocks: how many are on the device at a time, at least `LEAST`.
        pin_memory: as of `carrying.Copied`.
        directory: as of `carrying.Mapped`.
    """

    resident_blocks: int = LEAST
    pin_memory: bool = True
    directory: Path | None = None


class StreamedBlocks:
    """The blocks of one stack. They are away until `load`.

    Args:
        blocks: at least two. They are called in one thread at a time.
        resident: how many of them are on the device at a time.

    Attributes:
        kept: of each block the bytes that hold its parameters on the host, for whoever fills them (`views`).
    """

    def __init__(self, blocks: Sequence[nn.Module], carrier: Carrier, device: torch.device, *, resident: int) -> None:
        assert len(blocks) >= LEAST <= resident, f"{len(blocks)} blocks, {resident} of them on the device"
        self._carrier = carrier
        self._parts = [Part(block.parameters(), device) for block in blocks]
        self.kept = carrier.keep([part.nbytes for part in self._parts])
        for part in self._parts:
            part.away()
        self._resident = min(resident, len(blocks))
        self._rooms: list[Tensor] = []
        self._room_of: dict[int, int] = {}  # of the blocks that are on the device or on their way
        self._coming: dict[int, Arriving] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}  # by block and room
        self._next = [*range(1, len(blocks)), 0]
        self._called: int | None = None
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before, number))

    @property
    def here(self) -> list[int]:
        """Numbers of the blocks that are on the device or on their way, ascending."""
        return sorted(self._room_of)

    def views(self, number: int) -> list[Tensor]:
        """Where each parameter of a block is kept, in their order."""
        return self._parts[number].views(self.kept[number])

    def load(self) -> None:
        """Makes room on the device, and begins to fetch the first block."""
        for kept in self.kept:
            self._carrier.leave(kept)
        largest = max(part.nbytes for part in self._parts)
        self._rooms = [self._carrier.room(largest) for _ in range(self._resident)]
        self._fetch(0, at=0)

    def offload(self) -> None:
        """Takes every block away, and gives up its room. The device has done all that it was asked."""
        for number in self.here:
            self._leave(number)
        self._rooms.clear()
        self._views.clear()

    def _before(self, number: int, block: nn.Module, args: tuple[Any, ...]) -> None:
        """A block is called."""
        assert self._rooms, "the weights are not on the device"
        if self._called is not None:
            self._next[self._called] = number
        self._called = number
        if number not in self._room_of:
            self._fetch(number, at=number)
        self._arrive(number)
        following = self._next[number]
        if following not in self._room_of:
            self._fetch(following, at=number)

    def _fetch(self, number: int, *, at: int) -> None:
        """Begins to bring a block, in the place of that one which is called latest after `at`."""
        room = len(self._room_of)
        if room == len(self._rooms):
            room = self._leave(max(self._room_of, key=lambda block: (block - at) % len(self._parts)))
        self._room_of[number] = room
        self._coming[number] = self._carrier.fetch(self.kept[number], self._rooms[room])

    def _arrive(self, number: int) -> None:
        arriving = self._coming.pop(number, None)
        if arriving is None:
            return
        data, place = arriving(), (number, self._room_of[number])
        if place not in self._views:
            self._views[place] = self._parts[number].views(data)
        self._parts[number].put(self._views[place])

    def _leave(self, number: int) -> int:
        """Takes a block away. Returns its room."""
        self._coming.pop(number, None)
        self._parts[number].away()
        self._carrier.leave(self.kept[number])
        return self._room_of.pop(number)
