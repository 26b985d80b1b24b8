"""Forms of an entry: what its payload holds, and so what a decoder has left to do with it. No torch."""

from __future__ import annotations

from enum import IntEnum


class Form(IntEnum):
    """`CROSS_KV`: (layers, K|V, heads, tokens, dim), keys normed and not rotated."""

    CROSS_KV = 1
