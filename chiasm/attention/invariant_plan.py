"""A step's attention as products of fixed shape: rows in tiles, keys in blocks, planned once per step.

Blocks are counted from a sequence's first key, so that which of its keys are summed together, and in which order,
depends on nothing but their number in the sequence. A tile takes rows that look at the same keys; a row sees nothing of
a block that only its neighbours need, and what it sees nothing of changes no bit of its sums.

Self and cross-attention are one case here: rows that look at keys, each over its own [first, last). Nothing here knows
a tensor, a layer or a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from chiasm.attention.backend import Step

Integers = npt.NDArray[np.int64]

BLOCK = 128
"""Keys of a block. Small ones waste less where few keys are seen; from here on the products are no faster."""


@dataclass(frozen=True, slots=True)
class Looking:
    """Rows that look at the same keys.

    Attributes:
        rows: (R,) their places in the step.
        slots: (keys,) where in the pool the keys lie, from the first key of a block.
        spans: (R, 2) keys [first, last) that each sees, at least one.
    """

    rows: Integers
    slots: Integers
    spans: Integers


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of equally many rows, those that look at more blocks first, and an item for each block of each.

    Items come block by block: first the first block of every tile, then the second of all that have one.

    Attributes:
        rows: (tiles, rows) places in the step, -1 where a tile is not full.
        depths: how many tiles, from the first on, have a first, a second, a third block.
        slots: (items, BLOCK) of the pool; where a block is not full, one of its sequence's own again.
        hidden: (items, rows, BLOCK) keys that a row does not see. A row that is not there sees what the first one does.
    """

    rows: Integers
    depths: list[int]
    slots: Integers
    hidden: npt.NDArray[np.bool_]


def look_back(step: Step, page_size: int) -> list[Looking]:
    """Every row of the step at all of its own sequence's rows up to itself, in the self pool."""
    found = []
    for at, sequence in zip(_starts(step), step.sequences, strict=True):
        if not sequence.rows:
            continue
        context = sequence.start + sequence.rows
        pages = np.asarray(sequence.pages[: -(-context // page_size)], dtype=np.int64)
        slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:context]
        ends = np.arange(sequence.start, context) + 1
        found.append(Looking(at + np.arange(sequence.rows), slots, np.stack([np.zeros_like(ends), ends], axis=1)))
    return found


def look_across(step: Step) -> list[Looking]:
    """The rows of the step that see vision tokens, at those attached. Rows of sequences with the same ones are taken
    together."""
    found: dict[bytes, list[Looking]] = {}
    for at, sequence in zip(_starts(step), step.sequences, strict=True):
        seeing = np.flatnonzero(sequence.boundaries[:, 1] > sequence.boundaries[:, 0])
        if not len(seeing):
            continue
        base = sequence.extents[0][0]
        attached = np.concatenate([np.arange(slot, slot + size) for _, slot, size in sequence.extents])
        spans = sequence.boundaries[seeing]
        assert base <= spans[:, 0].min() and spans[:, 1].max() <= base + len(attached), (
            "a row sees what is not attached"
        )
        # Tokens that were dropped since are of the block still, so that the others keep their places in it.
        dropped = base % BLOCK
        slots = np.concatenate([np.repeat(attached[:1], dropped), attached])
        one = Looking(at + seeing, slots, spans - (base - dropped))
        # The same slots may be other tokens of another sequence, where another number was dropped.
        found.setdefault(bytes([dropped]) + slots.tobytes(), []).append(one)
    return [
        Looking(
            np.concatenate([one.rows for one in alike]), alike[0].slots, np.concatenate([one.spans for one in alike])
        )
        for alike in found.values()
    ]


def plan_tiles(looking: Sequence[Looking], heights: Sequence[int], most: int) -> list[Tiles]:
    """All rows in tiles.

    Args:
        heights: rows that a tile may have, rising. A tile has the least of them that is enough.
        most: rows of the items that are computed together, where a single tile has no more.
    """
    planned: list[Tiles] = []
    for height in heights:
        tiles = [tile for one in looking for tile in _tiles(one, heights) if tile.height == height]
        tiles.sort(key=lambda tile: -len(tile.slots))
        ends = np.cumsum([0, *(len(tile.slots) for tile in tiles)])
        first = 0
        while first < len(tiles):
            last = max(first + 1, int(np.searchsorted(ends, ends[first] + most // height, side="right")) - 1)
            planned.append(_together(tiles[first:last], height))
            first = last
    return planned


@dataclass(frozen=True, slots=True)
class _Tile:
    """One tile: its looking's rows, and the blocks it looks at, the first of them number `block`."""

    height: int
    rows: Integers
    spans: Integers
    slots: Integers
    block: int


def _tiles(one: Looking, heights: Sequence[int]) -> Iterator[_Tile]:
    missing = -len(one.slots) % BLOCK
    blocks = np.concatenate([one.slots, np.repeat(one.slots[:1], missing)]).reshape(-1, BLOCK)
    for start, stop in pairwise([*range(0, len(one.rows), heights[-1]), len(one.rows)]):
        height = next(height for height in heights if height >= stop - start)
        spans = one.spans[start:stop]
        low, high = int(spans[:, 0].min()) // BLOCK, -(-int(spans[:, 1].max()) // BLOCK)
        yield _Tile(height, one.rows[start:stop], spans, blocks[low:high], low)


def _together(tiles: Sequence[_Tile], height: int) -> Tiles:
    counts = np.array([len(tile.slots) for tile in tiles])
    rows = np.full((len(tiles), height), -1)
    spans = np.zeros((len(tiles), height, 2), dtype=np.int64)
    for i, tile in enumerate(tiles):
        rows[i, : len(tile.rows)] = tile.rows
        spans[i] = tile.spans[0]  # of rows that are not there as well: each must see something
        spans[i, : len(tile.rows)] = tile.spans
    tile_of = np.repeat(np.arange(len(tiles)), counts)
    depth_of = np.concatenate([np.arange(count) for count in counts])
    order = np.lexsort((tile_of, depth_of))
    first_key = (np.array([tile.block for tile in tiles])[tile_of] + depth_of)[order] * BLOCK
    keys = (first_key[:, None] + np.arange(BLOCK))[:, None]
    seen = spans[tile_of[order]]
    return Tiles(
        rows=rows,
        depths=[int((counts > depth).sum()) for depth in range(counts[0])],
        slots=np.concatenate([tile.slots for tile in tiles])[order],
        hidden=(keys < seen[..., :1]) | (keys >= seen[..., 1:]),
    )


def _starts(step: Step) -> Iterator[int]:
    """Where in the step each sequence begins."""
    at = 0
    for sequence in step.sequences:
        yield at
        at += sequence.rows
