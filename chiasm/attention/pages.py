"""Where a decoder keeps keys and values: two pools, one per kind of attention, with an allocator each.

Self layers hold text tokens in pages of a few tokens; cross layers hold visual tokens in extents of one unit each, since
a unit is rarely a multiple of a page. A text token costs memory in the self layers only, a visual token in the cross
layers only. The allocators count; they know no tensor. The pools hold tensors; they know no request.
"""

from __future__ import annotations

from bisect import insort

import torch
from torch import Tensor

from chiasm.errors import Overloaded


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
    """Hands out contiguous runs of cross-pool slots, first fit, so that neighbours often lie side by side."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._holes: list[tuple[int, int]] = [(0, slots)] if slots else []  # (start, length), ascending, never adjacent

    @property
    def free(self) -> int:
        return sum(length for _, length in self._holes)

    def take(self, length: int) -> int:
        """First slot of a run of `length`. Raises Overloaded if no hole is that long."""
        for i, (start, hole) in enumerate(self._holes):
            if hole >= length:
                if hole == length:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + length, hole - length)
                return start
        raise Overloaded(
            "KV_POOL_FULL",
            f"a run of {length} visual tokens is needed, {self.free} are free",
            retry_after=0.1,
            facts={"needed": length, "free": self.free},
        )

    def give_back(self, start: int, length: int) -> None:
        insort(self._holes, (start, length))
        i = self._holes.index((start, length))
        if i + 1 < len(self._holes) and start + length == self._holes[i + 1][0]:
            self._holes[i] = (start, length + self._holes.pop(i + 1)[1])
        if i and sum(self._holes[i - 1]) == start:
            before, held = self._holes[i - 1]
            self._holes[i - 1] = (before, held + self._holes.pop(i)[1])


class Pools:
    """The tensors of both pools.

    Attributes:
        self_kv: (self layers, K|V, pages * page_size, kv heads, dim).
        cross_kv: (cross layers, K|V, kv heads, slots, dim), keys rotated: the layout of an entry, so that attaching one is
            a copy and a unit's extent is a view.
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
    ) -> None:
        rows = pages * page_size
        self.page_size = page_size
        self.self_kv: Tensor = torch.empty(self_layers, 2, rows, kv_heads, head_dim, device=device, dtype=dtype)
        self.cross_kv: Tensor = torch.empty(cross_layers, 2, kv_heads, slots, head_dim, device=device, dtype=dtype)

    @property
    def bytes_per_text_token(self) -> int:
        return self.self_kv[:, :, 0].numel() * self.self_kv.element_size() if self.self_kv.shape[2] else 0

    @property
    def bytes_per_visual_token(self) -> int:
        return self.cross_kv[:, :, :, 0].numel() * self.cross_kv.element_size() if self.cross_kv.shape[3] else 0
