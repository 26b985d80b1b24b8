"""Where a decoder keeps keys and values, and features that lie over rows: two pools with an allocator each.

Self layers hold text tokens in pages of a few tokens; cross layers hold visual tokens in extents of one unit each,
since a unit is rarely a multiple of a page. A text token costs memory in the self layers only, a visual token in the
cross layers only; where a unit's features lie over its placeholders, the second pool holds those. The allocators count;
they know no tensor. The pools hold tensors; they know no request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from chiasm.errors import Overloaded


class Run(NamedTuple):
    """Contiguous slots of the cross pool."""

    start: int
    length: int


class PageAllocator:
    """Hands out pages of the self pool by number. Every page taken is given back once, and only once."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, held: list[int], rows: int) -> None:
        """Adds pages to `held` until `rows` rows fit. Takes all or none: raises Overloaded and leaves `held` alone."""
        missing = -(-rows // self.page_size) - len(held)
        if missing > len(self._free):
            raise Overloaded(
                "KV_POOL_FULL",
                f"{missing} pages of {self.page_size} text tokens are needed, {len(self._free)} are free",
                retry_after=0.1,
                facts={"needed": missing, "free": len(self._free)},
            )
        for _ in range(missing):
            held.append(self._free.pop())

    def release(self, held: list[int]) -> None:
        """Takes all pages of `held` back and empties it."""
        self._free.extend(reversed(held))
        held.clear()


class ExtentAllocator:
    """Hands out cross-pool slots: one contiguous run per unit, first fit, so that neighbours often lie side by side.

    A unit is cut into several runs only where no hole holds it whole, so that what is free can always be used.
    """

    def __init__(self, slots: int) -> None:
        self.total = slots
        self.free = slots
        self._holes: list[Run] = [Run(0, slots)] if slots else []  # ascending, never adjacent

    def take(self, length: int) -> list[Run]:
        """Runs of slots, `length` together, in the order in which the unit's tokens fill them.

        Raises Overloaded if fewer are free; none is then taken.
        """
        if length > self.free:
            raise Overloaded(
                "KV_POOL_FULL",
                f"{length} visual tokens are needed, {self.free} are free",
                retry_after=0.1,
                facts={"needed": length, "free": self.free},
            )
        self.free -= length
        runs = []
        while length:
            place = next((i for i, hole in enumerate(self._holes) if hole.length >= length), 0)
            start, hole = self._holes.pop(place)
            taken = min(hole, length)
            if hole > taken:
                self._holes.insert(place, Run(start + taken, hole - taken))
            runs.append(Run(start, taken))
            length -= taken
        return runs

    def give_back(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._give_back(run)

    def _give_back(self, run: Run) -> None:
        start, length = run
        self.free += length
        i = bisect_left(self._holes, run)
        self._holes.insert(i, run)
        if i + 1 < len(self._holes) and start + length == self._holes[i + 1].start:
            self._holes[i] = Run(start, length + self._holes.pop(i + 1).length)
        if i and sum(self._holes[i - 1]) == start:
            before = self._holes[i - 1]
            self._holes[i - 1] = Run(before.start, before.length + self._holes.pop(i).length)


class Pools:
    """The tensors of both pools.

    Attributes:
        self_kv: (self layers, K|V, pages * page_size, kv heads, dim). cross_kv: (cross layers, K|V, kv heads, slots,
        dim), keys rotated: the layout of an entry, so that attaching one is
            a copy and a unit's extent is a view.
        features: (slots, feature width).
        spare_page, spare_slot: behind what the allocators hand out, for rows that are nobody's; None if there are none.
            The page is written by them and read by nobody else. The slot stays zero, so that attention over it alone
            is zero.

    Args:
        pages, slots: what the allocators hand out.
        spare: makes room for rows that are nobody's.
    """

    def __init__(
        self,
        *,
        self_layers: int,
        cross_layers: int,
        pages: int,
        page_size: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        feature_width: int = 0,
        spare: bool = False,
    ) -> None:
        self.spare_page = pages if spare else None
        self.spare_slot = slots if spare else None
        rows = (pages + spare) * page_size
        slots += spare
        self.page_size = page_size
        self.self_kv: Tensor = torch.empty(self_layers, 2, rows, kv_heads, head_dim, device=device, dtype=dtype)
        self.cross_kv: Tensor = torch.empty(cross_layers, 2, kv_heads, slots, head_dim, device=device, dtype=dtype)
        self.features: Tensor = torch.empty(slots, feature_width, device=device, dtype=dtype)
        if spare:  # finite before anything is written: what weighs nothing must not be NaN either
            self.self_kv[:, :, pages * page_size :].zero_()
            self.cross_kv[:, :, :, -1].zero_()
