"""What of a mapped file is in the memory of this process, as the system counts it (Linux)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor


def mapped_here(kept: Tensor) -> int:
    """Bytes of the pages that a tensor lies in which are in this process. Pages are counted, so it is cut to pages."""
    with Path("/proc/self/pagemap").open("rb") as pages:
        page = 4096
        first, last = kept.data_ptr() // page, (kept.data_ptr() + kept.nbytes - 1) // page
        pages.seek(8 * first)
        entries = memoryview(pages.read(8 * (last - first + 1))).cast("Q")
    return page * sum(entry >> 63 for entry in entries)
