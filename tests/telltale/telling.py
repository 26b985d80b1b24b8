"""What a tell-tale model computes: numbers that depend on everything they may depend on, and on nothing else.

An entry is a digest of pixels, grid, checkpoint and tenant. A row is a digest of its token, its place and every number
of the cross pool that it sees. The scores behind a row are a digest of all rows before it, as they lie in the pages of
the self pool. So whatever is wrong in a pool is wrong in the very next token.

It knows no torch and no service: the model computes with it, and so does the oracle, from other inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import blake3
import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.float32]

ROW_BYTES: Final = 32
"""Of a row in the self pool."""

_STEPS: Final = 256
"""By which a key grows with each position; numbers of an entry are below. Their sums are exact in float32."""

_ENDING: Final = 10
"""In 256 places, so many prefer the end of the answer."""

_TEMPTED: Final = 16
"""And so many, in the end, ids that may never be drawn."""


def entry(pixels_chw: npt.NDArray[np.uint8], fingerprint: str, tenant: bytes, shape: Sequence[int]) -> Numbers:
    """(layers, K|V, heads, tokens, dim) of one unit, keys not yet placed.

    Args:
        pixels_chw: (3, height, width) as they are encoded. Their size says the grid.
        tenant: whose entry it is (`chiasm.cache.tenant.owner`).
    """
    digest = blake3.blake3(f"entry {fingerprint} {pixels_chw.shape} ".encode() + tenant)
    digest.update(np.ascontiguousarray(pixels_chw).data.cast("B"))
    made = np.frombuffer(digest.digest(int(np.prod(shape))), np.uint8)
    return made.astype(np.float32).reshape(*shape)


def name(pixels_chw: npt.NDArray[np.uint8]) -> bytes:
    """What tells one unit from another: a digest of its pixels and their size."""
    return blake3.blake3(f"{pixels_chw.shape}".encode() + pixels_chw.tobytes()).digest()


def shift(positions_3t: npt.NDArray[np.int64], dim: int) -> Numbers:
    """(tokens, dim): what is added to the keys of tokens at those positions. A number tells one of the axes."""
    made: Numbers = (_STEPS * positions_3t[np.arange(dim) % 3].T).astype(np.float32)
    return made


def seen(numbers: Numbers) -> bytes:
    """A digest of what a row sees: (layers, K|V, heads, tokens, dim), in the order of the timeline."""
    return blake3.blake3(np.ascontiguousarray(numbers).data.cast("B")).digest()


NOTHING: Final = blake3.blake3(b"").digest()
"""What a row sees that sees nothing."""


def row(token: int, positions: Sequence[int], looks: bytes) -> bytes:
    """`ROW_BYTES` bytes of one row.

    Args:
        positions: on the three axes.
        looks: `seen` of what it sees.
    """
    place = np.array([token, *positions], np.int64).tobytes()
    return blake3.blake3(place + looks).digest(ROW_BYTES)


def scores(rows: bytes, vocabulary: int, end: int, banned: Sequence[int]) -> Numbers:
    """(vocabulary,) logits behind the last of some rows, from 0 to 16; higher now and then, for the end of the answer
    and for what is banned."""
    drawn = np.frombuffer(blake3.blake3(rows).digest(2 * vocabulary + 1), np.uint8)
    made = drawn[1:].view(np.uint16).astype(np.float32)
    made /= 4096
    if drawn[0] < _ENDING:
        made[end] = 32.0
    elif drawn[0] >= 256 - _TEMPTED:
        made[[*banned]] = 32.0
    return made
