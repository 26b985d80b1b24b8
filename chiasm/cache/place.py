"""Where an entry lies, as an announcement tells it. A hint: whoever reads verifies what is found there. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class InMemory:
    """In the memory of the process that both halves share."""


@dataclass(frozen=True, slots=True)
class InArena:
    """In the shared region of a node.

    Attributes:
        arena_id: names the region, 16 bytes.
        byte_offset: of the payload, from the region's start.
        generation: of this one writing; no two have the same.
    """

    arena_id: bytes
    byte_offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class InRedis:
    """In the store that nodes share.

    Attributes:
        write_id: of this one writing, 16 bytes; two writers never share values.
        chunks: values it is written in, the manifest apart.
    """

    write_id: bytes
    chunks: int


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where no store of this build can look. Every store misses it."""


Place: TypeAlias = InMemory | InArena | InRedis | Elsewhere
