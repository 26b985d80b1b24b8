"""How much of the two pools."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """Of both pools: pages of text tokens, and visual tokens."""

    pages: int
    visual: int
