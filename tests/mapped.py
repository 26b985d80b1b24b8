"""What of a mapped file is in the memory of this process, as the system counts it (Linux)."""

from __future__ import annotations

from mmap import PAGESIZE
from pathlib import Path

from torch import Tensor


def mapped_here(kept: Tensor) -> int:
    """Bytes of the pages that a tensor lies in which are in this process."""
    first, last = kept.data_ptr() // PAGESIZE, (kept.data_ptr() + kept.nbytes - 1) // PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = memoryview(pages.read(8 * (last - first + 1))).cast("Q")
    return PAGESIZE * sum(entry >> 63 for entry in entries)
