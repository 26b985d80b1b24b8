"""`chiasm cache`: what the tiers of the cache hold, and emptying them.

A tier is a store under a name; the arena of this machine is one. Knows stores and how to tell of them; loads no torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from chiasm.cache.arena import ArenaStore
from chiasm.cache.region import Region
from chiasm.cache.store import EntryStore
from chiasm.cli import run_folder
from chiasm.cli.failure import MISUSED, CommandFailed
from chiasm.cli.telling import size


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one tier. None stands for what nobody counts there.

    Attributes:
        where: a path or an address.
        bytes: of entries, pinned ones included.
        evictions: entries that made room for others.
        hit_ratio: of the entries that encoders looked for, those that were there.
    """

    tier: str
    where: str
    entries: int | None
    bytes: int
    budget: int | None
    pinned_bytes: int | None
    evictions: int | None
    hit_ratio: float | None


class Tier(NamedTuple):
    """A store of the cache, and how to ask what it holds."""

    store: EntryStore
    figures: Callable[[], Figures]


def stats(arena: Path | None, *, as_json: bool) -> None:
    """Prints what every tier holds: a table, or one JSON object. Raises CommandFailed, Unsupported."""
    figures = asyncio.run(_figures(arena))
    if as_json:
        print(json.dumps({"tiers": [asdict(one) for one in figures]}))
    else:
        print("\n".join(_table(figures)))


def flush(arena: Path | None, *, as_json: bool) -> None:
    """Forgets every entry that is not pinned, in every tier. Raises CommandFailed, Unsupported, Overloaded."""
    before, after = asyncio.run(_flushed(arena))
    if as_json:
        print(json.dumps({"tiers": [asdict(one) for one in after]}))
        return
    for old, new in zip(before, after, strict=True):
        kept = f", {new.entries} in use stay" if new.entries else ""
        print(f"{old.tier}: {(old.entries or 0) - (new.entries or 0)} entries forgotten{kept}")


async def _figures(arena: Path | None) -> list[Figures]:
    async with _tiers(arena) as tiers:
        return [tier.figures() for tier in tiers]


async def _flushed(arena: Path | None) -> tuple[list[Figures], list[Figures]]:
    async with _tiers(arena) as tiers:
        before = [tier.figures() for tier in tiers]
        for tier in tiers:
            await tier.store.flush()
        return before, [tier.figures() for tier in tiers]


@asynccontextmanager
async def _tiers(arena: Path | None) -> AsyncIterator[list[Tier]]:
    """The tiers there are, the nearest first."""
    path = await asyncio.to_thread(_running) if arena is None else arena
    with closing(await asyncio.to_thread(Region.open, path)) as region:
        yield [_arena(region)]


def _arena(region: Region) -> Tier:
    store = ArenaStore(region)

    def figures() -> Figures:
        held, totals = store.stats(), store.totals()
        return Figures(
            tier="arena",
            where=str(region.path),
            entries=held.entries,
            bytes=held.bytes,
            budget=held.budget,
            pinned_bytes=held.pinned_bytes,
            evictions=totals.evictions,
            hit_ratio=round(totals.found / totals.asked, 4) if totals.asked else None,
        )

    return Tier(store, figures)


def _running() -> Path:
    """The arena of the one system that runs here. Raises CommandFailed if there is none, or more than one."""
    found = run_folder.arenas()
    if len(found) == 1:
        return found[0]
    fix = "name one with --arena PATH"
    if not found:
        raise CommandFailed("no `chiasm serve` of yours runs here", str(run_folder.IN), fix, code=MISUSED)
    raise CommandFailed(f"{len(found)} systems of yours run here", " · ".join(map(str, found)), fix, code=MISUSED)


def _table(figures: Sequence[Figures]) -> list[str]:
    def said(count: int | None) -> str:
        return "" if count is None else str(count)

    def bytes_said(count: int | None) -> str:
        return "" if count is None else size(count)

    rows = [("tier", "entries", "bytes", "budget", "pinned", "evictions", "hits", "where")]
    for one in figures:
        ratio = "" if one.hit_ratio is None else f"{one.hit_ratio:.1%}"
        rows.append(
            (
                one.tier,
                said(one.entries),
                size(one.bytes),
                bytes_said(one.budget),
                bytes_said(one.pinned_bytes),
                said(one.evictions),
                ratio,
                one.where,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
