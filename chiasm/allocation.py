"""How the C library gives memory out, on a CPU: what is freed is kept.

Kernels on a CPU take and free megabytes for each call (the flash kernel packs the keys and values it reads). By
default glibc gives every such piece back to the system, which hands it out anew page by page: that took a third to
a half of the time of attention over a long video. It knows no tensor.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Options of `mallopt` (glibc's malloc.h)."""

KEPT = 1 << 30
"""Bytes of freed memory at the top of the heap from which some is given back."""

STEP = 256 << 20
"""Bytes that the heap grows by."""

LARGEST = 32 << 20
"""Bytes from which a piece is taken from the system by itself; glibc allows no more."""


def keep_freed() -> bool:
    """Lets this process keep the memory that it frees. Returns whether the C library has a way to."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim, pad = mallopt(_TRIM_THRESHOLD, KEPT), mallopt(_TOP_PAD, STEP)
    return bool(trim and pad and mallopt(_MMAP_THRESHOLD, LARGEST))


def give_back() -> bool:
    """Gives freed memory back to the system, what is kept too. Returns whether the C library has a way to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
