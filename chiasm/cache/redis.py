"""An entry store that nodes share: a Redis server, which may be slow, full, empty, frozen or gone at any time.

An entry is cut into values of about a megabyte under a name that is used once, and a manifest under its key that is
written when they are all there. All of them end by themselves, the manifest first. A reader asks for the manifest,
and for the values along with it where it was told their name. What is absent, short, long, of another key or of a
format that is not known is a miss, counted by reason; whether the bytes are right is for the reader to say
(`open_entry`).

Nothing that happens to the server is an error here: an entry that could not be put is not there, and one that could
not be got is missing. How long anybody waits for that, `chiasm.cache.link` says.

There are no pins: a server under pressure evicts as it likes. To pin is to keep from ending before the lease does, and
what is asked for goes on to be kept. There are no owners either: each writer bounds what it writes for one of them
itself (`chiasm.cache.account`), so the bound of a fleet is that of a writer times its writers.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from chiasm.cache.account import Account
from chiasm.cache.exchange import Command, Refusal, Reply
from chiasm.cache.link import Link
from chiasm.cache.manifest import CHUNK_BYTES, Manifest, chunks_of
from chiasm.cache.place import Elsewhere, InRedis, Place
from chiasm.cache.sealed import EntryKey, Sealable, Sealed
from chiasm.cache.store import NOBODY, Lease, Pinned, StoreStats
from chiasm.cache.values import Values
from chiasm.errors import Unavailable

NAMESPACE: Final = "chiasm"
TTL: Final = 3600.0
ENTRY_BYTES: Final = 128 << 20

REFUSALS: Final = ("entry_budget", "owner_budget", "full", "denied", "unanswered", "error")
"""Why an entry was not put: larger than one may be, more than its owner may have, the server's memory is full, its
user may not, there was no answer, or another refusal of the server."""

REJECTIONS: Final = ("manifest", "key", "size", "type", "chunk_missing", "chunk_length")
"""Why what was there is no entry: its manifest is none, is of another key, states sizes that cannot be; there is
something else under the name; a value is gone, or of another length."""

_MARGIN = 30.0
"""Seconds that values outlast their manifest, beside those that writing them may take."""

_OK = b"OK"


def sentinel(namespace: str) -> str:
    """What a probe asks for: a name that the users of a namespace may read, and nobody writes."""
    return f"{namespace}:sentinel"


class RedisStore:
    """`EntryStore` over one server. Its counts are those of this process; what the server holds it does not know.

    Args:
        namespace: what every name begins with: letters, digits, `.`, `_` and `-`.
        ttl: seconds that an entry is kept after it was last put or pinned.
        entry_bytes: of one entry, at most. A larger one is not sent, and not believed when it is announced.
        owner_bytes: that this process writes for one owner within `ttl`, at most; None for no bound. `NOBODY` has none
            in any case.
        clock: seconds, monotonic.
        step: is told what was done last. For tests that break something there.

    Attributes:
        refused: entries that were not put, by reason.
        rejected: what was found and was no entry, by reason.
    """

    def __init__(
        self,
        link: Link,
        *,
        namespace: str = NAMESPACE,
        ttl: float = TTL,
        entry_bytes: int = ENTRY_BYTES,
        owner_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.link = link
        self._namespace = namespace
        self._ttl = ttl
        self._entry_bytes = entry_bytes
        self._account = Account(ttl, owner_bytes, clock)
        self._clock = clock
        self._step = step
        self._claims: dict[EntryKey, tuple[bytes, float]] = {}  # what this process wrote, and when it surely still is
        self._counts = dict.fromkeys(("puts", "hits", "misses"), 0)
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        self.rejected: Counter[str] = Counter(dict.fromkeys(REJECTIONS, 0))

    async def put(
        self,
        entry: Sealable,
        key: EntryKey,
        *,
        lease: Lease | None = None,
        owner: bytes = NOBODY,
        shared: bool = False,
    ) -> Place:
        """As `EntryStore.put`, but what could not be put lies `Elsewhere`. Raises only what sealing it raises."""
        sealed = await entry.sealed()
        payload = sealed.payload.cast("B")
        manifest = Manifest(key, secrets.token_bytes(16), payload.nbytes, sealed.header, sealed.tag)
        if not self.takes(sealed.size) or not manifest.fits:
            return self._refuse("entry_budget")
        bounded = owner != NOBODY
        if self.link.breaker.closed and not self._account.take(owner, sealed.size, bounded=bounded):
            return self._refuse("owner_budget")
        seconds = self._ttl if lease is None else max(self._ttl, lease.seconds)
        chunks = self._chunks(manifest)
        outlast = _ms(seconds + _MARGIN + self.link.limit(sealed.size))
        replies = await self.link.ask(
            *(
                ("SET", name, payload[index * CHUNK_BYTES :][:CHUNK_BYTES], "PX", outlast)
                for index, name in enumerate(chunks)
            ),
            nbytes=sealed.size,
        )
        self._step("chunks put")
        kept = [name for name, reply in zip(chunks, replies or (), strict=False) if reply == _OK]
        if replies is not None and len(kept) == len(chunks):
            replies = await self.link.ask(("SET", self._name(key), manifest.pack(), "PX", _ms(seconds)))
        if replies is None or any(reply != _OK for reply in replies):
            if replies is not None and await self._take_back(kept):
                self._account.give_back(owner, sealed.size)
            return self._refuse(_reason(replies))
        self._counts["puts"] += 1
        return InRedis(manifest.write_id, manifest.chunks)

    def takes(self, size: int) -> bool:
        """Whether an entry of so many bytes is ever sent."""
        return size <= self._entry_bytes

    async def pin(self, key: EntryKey, lease: Lease, *, owner: bytes = NOBODY, shared: bool = False) -> Pinned | None:
        """Keeps an entry from ending before the lease does, as far as the server can. No payload is touched."""
        name = self._name(key)
        replies = await self.link.ask(("GET", name), ("PTTL", name))
        manifest = None if replies is None else self._manifest(replies[0], key)
        if replies is not None and manifest is not None:
            left = replies[1] if isinstance(replies[1], int) else 0
            if 0 <= left < _ms(max(lease.seconds, self._ttl / 2)):
                manifest = await self._prolong(manifest, max(lease.seconds, self._ttl))
        self._count(manifest is not None)
        return None if manifest is None else Pinned(manifest.header, InRedis(manifest.write_id, manifest.chunks))

    async def claim(self, key: EntryKey, seconds: float) -> bool:
        """As `EntryStore.claim`. Without an answer everybody may make everything."""
        token, until = secrets.token_bytes(16), self._clock() + seconds
        replies = await self.link.ask(("SET", self._claim_name(key), token, "NX", "PX", _ms(seconds)))
        if replies is None or replies[0] is not None:
            if replies is not None and replies[0] == _OK:
                self._claims[key] = (token, until)
            return True
        return False

    async def unclaim(self, key: EntryKey) -> None:
        """As `EntryStore.unclaim`. What is no more this process's is left alone, as well as that can be told: between
        looking and taking away somebody else may have claimed, and loses nothing but that others wait for it."""
        token, until = self._claims.pop(key, (b"", 0.0))
        if self._clock() >= until:
            return
        name = self._claim_name(key)
        replies = await self.link.ask(("GET", name))
        if replies is not None and replies[0] == token:
            await self.link.ask(("UNLINK", name))

    async def get(self, key: EntryKey, place: Place | None = None, *, owner: bytes = NOBODY) -> Sealed | None:
        """As `EntryStore.get`. Where an entry was put again since it was announced, the newer one is read."""
        known = place if isinstance(place, InRedis) else None
        sealed = await self._read(key, known) if known is not None or place is None else None
        self._count(sealed is not None)
        return sealed

    async def release(self, key: EntryKey, lease_id: bytes) -> None:
        """Nothing was kept that would not be kept without."""

    async def discard(self, key: EntryKey) -> None:
        """Takes the manifest away, if this process's user may. Its values end by themselves."""
        await self.link.ask(("UNLINK", self._name(key)))

    async def flush(self) -> None:
        """Takes away everything of the namespace, of every writer. For a user that may.

        Raises Unavailable SHARED_STORE if the server does not answer or refuses; part of it may be gone then.
        """
        async for names in self._scanned("*"):
            self._done(await self.link.ask(("UNLINK", *names)))

    async def count(self) -> int:
        """Entries of the namespace, of every writer. For a user that may; needs no right to read any.

        Raises Unavailable SHARED_STORE if the server does not answer or refuses.
        """
        found: set[bytes] = set()  # a name may be told more than once
        async for names in self._scanned("entry:*"):
            found.update(names)
        return len(found)

    def stats(self) -> StoreStats:
        """Entries and bytes are those that this process wrote within the time that they are kept. No budget is known:
        the server's is its own."""
        return StoreStats(
            entries=self._account.entries,
            bytes=self._account.bytes,
            pinned_bytes=0,
            budget=0,
            evictions=0,
            refusals=self.refused.total(),
            **self._counts,
        )

    async def close(self) -> None:
        await self.link.close()

    async def _read(self, key: EntryKey, known: InRedis | None) -> Sealed | None:
        get, values = ("GET", self._name(key)), None
        if known is not None and len(known.write_id) == 16 and 0 < known.chunks <= chunks_of(self._entry_bytes):
            values = Values([CHUNK_BYTES] * known.chunks)
            replies = await self._fill(values, self._names(known.write_id, known.chunks), get)
        else:  # empty, not announced, or no announcement of ours: the manifest says
            replies = await self.link.ask(get)
        manifest = None if replies is None else self._manifest(replies[-1], key)
        if manifest is None:
            return None
        self._step("manifest read")
        if values is None or known != InRedis(manifest.write_id, manifest.chunks):
            values = Values([manifest.length(index) for index in range(manifest.chunks)])
            if manifest.chunks and await self._fill(values, self._chunks(manifest)) is None:
                return None
        if values.lengths != [manifest.length(index) for index in range(manifest.chunks)]:
            gone = -1 in values.lengths or not values.lengths
            self.rejected["chunk_missing" if gone else "chunk_length"] += 1
            return None
        return Sealed(manifest.header, values.room[: manifest.payload], manifest.tag)

    async def _fill(self, values: Values, names: Sequence[str], *more: Command) -> list[Reply] | None:
        replies = await self.link.ask(("MGET", *names), *more, nbytes=len(values.room), values=values)
        self.rejected["chunk_length"] += values.too_long
        return replies

    def _manifest(self, packed: Reply, key: EntryKey) -> Manifest | None:
        if packed is None:
            return None
        found = Manifest.unpack(packed, key, self._entry_bytes) if isinstance(packed, bytes) else "type"
        if isinstance(found, str):
            self.rejected[found] += 1
            return None
        return found

    async def _prolong(self, manifest: Manifest, seconds: float) -> Manifest | None:
        """Lets an entry end later, its values first. None if one of them is gone or the server did not say."""
        names = [*self._chunks(manifest), self._name(manifest.key)]
        outlast = [_ms(seconds + _MARGIN)] * manifest.chunks + [_ms(seconds)]
        replies = await self.link.ask(*(("PEXPIRE", name, ms) for name, ms in zip(names, outlast, strict=True)))
        if replies is None or any(isinstance(reply, Refusal) for reply in replies):
            return None
        if not all(replies):
            self.rejected["chunk_missing"] += 1
            return None
        return manifest

    async def _take_back(self, names: Sequence[str]) -> bool:
        """Takes values away that need not stay. Returns whether they are gone."""
        replies = await self.link.ask(("UNLINK", *names)) if names else [0]
        return replies is not None and isinstance(replies[0], int)

    def _refuse(self, reason: str) -> Elsewhere:
        self.refused[reason] += 1
        return Elsewhere()

    async def _scanned(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """Names of the namespace, some at a time. Raises as `count`."""
        cursor = b"0"
        while True:
            cursor, names = self._done(
                await self.link.ask(("SCAN", cursor, "MATCH", f"{self._namespace}:{pattern}", "COUNT", 1000))
            )
            if names:
                yield names
            if cursor == b"0":
                return

    def _done(self, replies: Sequence[Reply] | None) -> Reply:
        if replies is None:
            raise Unavailable("SHARED_STORE", "the store that nodes share does not answer")
        if isinstance(replies[0], Refusal):
            self.link.trouble = str(replies[0])
            raise Unavailable("SHARED_STORE", "the store that nodes share refuses")
        return replies[0]

    def _count(self, found: bool) -> None:
        self._counts["hits" if found else "misses"] += 1

    def _name(self, key: EntryKey) -> str:
        return f"{self._namespace}:entry:{key.hex()}"

    def _claim_name(self, key: EntryKey) -> str:
        return f"{self._namespace}:claim:{key.hex()}"

    def _chunks(self, manifest: Manifest) -> list[str]:
        return self._names(manifest.write_id, manifest.chunks)

    def _names(self, write_id: bytes, chunks: int) -> list[str]:
        return [f"{self._namespace}:value:{write_id.hex()}:{index}" for index in range(chunks)]


def _reason(replies: Sequence[Reply] | None) -> str:
    if replies is None:
        return "unanswered"
    kinds = {reply.kind for reply in replies if isinstance(reply, Refusal)}
    return "full" if "OOM" in kinds else "denied" if "NOPERM" in kinds else "error"


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
