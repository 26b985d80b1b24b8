"""`chiasm cache`: what the tiers of the cache hold, and emptying them.

A tier is a store under a name: the arena of this machine, and the Redis that nodes share, if one is named. Knows stores
and how to tell of them; loads no torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from chiasm.cache.arena import ArenaStore
from chiasm.cache.link import Link
from chiasm.cache.redis import RedisStore, sentinel
from chiasm.cache.region import Region
from chiasm.cache.server import Server
from chiasm.cli import run_folder
from chiasm.cli.failure import FAILED, MISUSED, CommandFailed, code, facts, lines
from chiasm.cli.telling import size
from chiasm.errors import ChiasmError, Unavailable
from chiasm.settings import SettingsError, SharedStoreSettings

PATIENCE: Final = 5.0
"""Seconds for an answer of the store that nodes share: more than workers have, since no request waits here."""


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
    bytes: int | None
    budget: int | None
    pinned_bytes: int | None
    evictions: int | None
    hit_ratio: float | None


class Tier(NamedTuple):
    """How to ask a store of the cache what it holds, and to empty it. Both raise ChiasmError."""

    figures: Callable[[], Awaitable[Figures]]
    flush: Callable[[], Awaitable[None]]


def shared_store(
    url: str | None,
    password_file: Path | None,
    ca_file: Path | None,
    cert_file: Path | None,
    key_file: Path | None,
    namespace: str | None,
) -> SharedStoreSettings | None:
    """The store that nodes share; None if none is named. Raises CommandFailed for what does not go together."""
    said: dict[str, Any] = {
        "redis": url,
        "redis_password_file": password_file,
        "redis_ca_file": ca_file,
        "redis_cert_file": cert_file,
        "redis_key_file": key_file,
        "redis_namespace": namespace,
    }
    try:
        settings = SharedStoreSettings(**{name: value for name, value in said.items() if value is not None})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ", ".join(str(name) for name in problem["loc"]) or "--redis and the like"
        what = problem["msg"].removeprefix("Value error, ")
        raise CommandFailed(what, where, "chiasm cache stats --help", code=MISUSED) from None
    return None if settings.redis is None else settings


def stats(arena: Path | None, shared: SharedStoreSettings | None, *, as_json: bool) -> None:
    """Prints what every tier holds that says so: a table, or one JSON object.

    Raises CommandFailed, Unsupported; of a tier that does not say, when the others are printed.
    """
    figures, failures = asyncio.run(_figures(arena, shared))
    _print(figures, as_json=as_json)
    _fail(failures)


def flush(arena: Path | None, shared: SharedStoreSettings | None, *, as_json: bool) -> None:
    """Forgets every entry that is not pinned, in every tier. Raises as `stats`, when what could be flushed is."""
    flushed, failures = asyncio.run(_flushed(arena, shared))
    if as_json:
        _print([after for _, after in flushed], as_json=True)
    for before, after in flushed if not as_json else ():
        gone = max(0, (before.entries or 0) - (after.entries or 0))
        left = "written since" if after.pinned_bytes is None else "in use stay"
        kept = f", {after.entries} {left}" if after.entries else ""
        print(f"{after.tier}: {gone} entries forgotten{kept}")
    _fail(failures)


async def _figures(arena: Path | None, shared: SharedStoreSettings | None) -> tuple[list[Figures], list[ChiasmError]]:
    figures, failures = [], []
    async with _tiers(arena, shared) as tiers:
        for tier in tiers:
            try:
                figures.append(await tier.figures())
            except ChiasmError as error:
                failures.append(error)
    return figures, failures


async def _flushed(
    arena: Path | None, shared: SharedStoreSettings | None
) -> tuple[list[tuple[Figures, Figures]], list[ChiasmError]]:
    """What every tier held before and after."""
    flushed, failures = [], []
    async with _tiers(arena, shared) as tiers:
        for tier in tiers:
            try:
                before = await tier.figures()
                await tier.flush()
                flushed.append((before, await tier.figures()))
            except ChiasmError as error:
                failures.append(error)
    return flushed, failures


def _fail(failures: Sequence[ChiasmError]) -> None:
    """Raises all failures as one."""
    if not failures:
        return
    *others, last = failures
    before = [line for error in others for line in lines(error)]
    raise CommandFailed(*facts(last), code=max(map(code, failures)), before=before)


@asynccontextmanager
async def _tiers(arena: Path | None, shared: SharedStoreSettings | None) -> AsyncIterator[list[Tier]]:
    """The tiers there are, the nearest first. Where nothing runs, a store that nodes share is one all the same."""
    async with AsyncExitStack() as opened:
        tiers = []
        path = arena or await asyncio.to_thread(_running, shared is None)
        if path is not None:
            region = opened.enter_context(closing(await asyncio.to_thread(Region.open, path)))
            tiers.append(_arena(region))
        if shared is not None:
            tiers.append(await opened.enter_async_context(_redis(shared)))
        yield tiers


def _arena(region: Region) -> Tier:
    store = ArenaStore(region)

    async def figures() -> Figures:
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

    return Tier(figures, store.flush)


@asynccontextmanager
async def _redis(shared: SharedStoreSettings) -> AsyncIterator[Tier]:
    """It says how many entries there are. Who may read none cannot say how large they are."""
    try:
        server = Server.of(shared)
    except SettingsError as error:
        raise CommandFailed(error.what, error.where, error.fix, code=MISUSED) from None
    link = Link(server, sentinel=sentinel(shared.redis_namespace), timeout=PATIENCE)
    store = RedisStore(link, namespace=shared.redis_namespace)

    async def figures() -> Figures:
        with _told_where(link, server.url):
            return Figures("redis", server.url, await store.count(), None, None, None, None, None)

    async def flush() -> None:
        with _told_where(link, server.url):
            await store.flush()

    try:
        yield Tier(figures, flush)
    finally:
        await store.close()


@contextmanager
def _told_where(link: Link, url: str) -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        fix = "check that it runs, and that this user may SCAN and UNLINK there"
        raise CommandFailed(f"{error.message}: {link.trouble}", url, fix, code=FAILED) from None


def _running(needed: bool) -> Path | None:
    """The arena of the one system that runs here. Raises CommandFailed if there is more than one, or there is none and
    one is needed."""
    found = run_folder.arenas()
    if len(found) == 1:
        return found[0]
    fix = "name one with --arena PATH"
    if found:
        raise CommandFailed(f"{len(found)} systems of yours run here", " · ".join(map(str, found)), fix, code=MISUSED)
    if needed:
        raise CommandFailed("no `chiasm serve` of yours runs here", str(run_folder.IN), fix, code=MISUSED)
    return None


def _print(figures: Sequence[Figures], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"tiers": [asdict(one) for one in figures]}))
    elif figures:
        print("\n".join(_table(figures)))


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
                bytes_said(one.bytes),
                bytes_said(one.budget),
                bytes_said(one.pinned_bytes),
                said(one.evictions),
                ratio,
                one.where,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
