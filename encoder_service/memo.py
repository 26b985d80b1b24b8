"""What is remembered of media that were encoded, so that one which is asked about again is opened by nobody.

Two records of a medium: what it was found to be, and, for one share of the budgets of a request, which units it became,
with the keys of their entries and the usage there was to tell. They lie in the store beside the entries, so whoever
reads the entries can find them, and they are evicted as entries are. A record is sealed as an entry is, and any doubt
about it makes the medium an unknown one. Even a wrong key in one would do no harm: an entry says itself what it is.
"""

from __future__ import annotations

import struct
from hmac import compare_digest
from typing import Final, NamedTuple

import blake3
from google.protobuf.message import DecodeError

from chiasm.cache.entry import tag_secret
from chiasm.cache.form import Form
from chiasm.cache.framing import framed, u32
from chiasm.cache.sealed import EntryKey, Sealed
from chiasm.cache.store import EntryStore
from chiasm.cache.tenant import owner
from chiasm.errors import Overloaded
from chiasm.media.sample import SamplingOptions
from chiasm.models.family import MediumPlan
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb

FORMAT: Final = 1
"""Of a record and of what is in it: raised too when frames are chosen or decoded by another rule."""

MOST_BYTES: Final = 1 << 20
"""Bytes of a record that is believed or written: some ten thousand units."""

_KEY_BYTES: Final = 32
_MAGIC: Final = b"CHSM"
_HEADER: Final = struct.Struct("<4sI32sII")  # magic, format, key, bytes of the first part and of the second


class Asked(NamedTuple):
    """A medium as it is asked about.

    Attributes:
        root: the tenant's.
        digest: `chiasm.rpc.medium`.
        kind: as the wire has it.
        form: in which its entries are wanted.
    """

    root: bytes
    digest: bytes
    kind: int
    options: SamplingOptions
    form: Form


class Remembered(NamedTuple):
    """What became of a medium.

    Attributes:
        sized: its final units, each with its key.
        usage: as it was, whichever request it was for.
    """

    sized: epb.EncodeSized
    usage: pb.MediaUsage


class Memo:
    """The records of one model in one store.

    Args:
        identity: of its entries (`Identity.digest`). Another one remembers nothing of this.
        workers_secret: what all workers of a fleet share.

    Attributes:
        hits, misses: media that were asked for and were known, or not. One that is known and whose budgets are shared
            in a new way is a miss.
        rejected: records that were found and not believed.
        spared: bytes of media that were not sent.
    """

    def __init__(self, store: EntryStore, *, identity: bytes, workers_secret: bytes) -> None:
        self._store = store
        self._identity = identity
        self._workers = workers_secret
        self.hits = 0
        self.misses = 0
        self.rejected = 0
        self.spared = 0

    async def probe(self, asked: Asked) -> pb.Probe | None:
        """What a medium was found to be. None for an unknown one."""
        parts = await self._read(asked, self._key(asked))
        if parts is not None:
            try:
                return pb.Probe.FromString(parts[0])
            except DecodeError:
                self.rejected += 1
        self.misses += 1
        return None

    async def units(self, asked: Asked, plan: MediumPlan) -> Remembered | None:
        """What became of a medium under that plan. None if that is not known."""
        parts = await self._read(asked, self._key(asked, plan))
        if parts is not None:
            try:
                found = Remembered(epb.EncodeSized.FromString(parts[0]), pb.MediaUsage.FromString(parts[1]))
            except DecodeError:
                found = None
            if found is not None and _fits(found, plan):
                self.hits += 1
                return found
            self.rejected += 1
        self.misses += 1
        return None

    async def remember(self, asked: Asked, plan: MediumPlan, probe: pb.Probe, remembered: Remembered) -> None:
        """Writes both records. A store that has no room for them has no memory; the medium is encoded all the same."""
        sized, usage = remembered
        records = [
            (self._key(asked, plan), sized.SerializeToString(), usage.SerializeToString()),
            (self._key(asked), probe.SerializeToString(), b""),
        ]
        for key, first, second in records:
            if len(first) + len(second) > MOST_BYTES:
                return
            header = _HEADER.pack(_MAGIC, FORMAT, key, len(first), len(second))
            payload = memoryview(first + second)
            sealed = Sealed(header, payload, _tag(tag_secret(self._workers, asked.root), header, payload))
            try:
                await self._store.put(sealed, key, owner=owner(asked.root))
            except Overloaded:
                return

    async def forget(self, asked: Asked, plan: MediumPlan) -> None:
        """What was remembered turned out not to be so any more."""
        self.rejected += 1
        await self._store.discard(self._key(asked, plan))

    async def _read(self, asked: Asked, key: EntryKey) -> tuple[bytes, bytes] | None:
        """Both parts of a record that is to be believed."""
        sealed = await self._store.get(key, owner=owner(asked.root))
        if sealed is None:
            return None
        parts = _open(sealed, key, tag_secret(self._workers, asked.root))
        if parts is None:
            self.rejected += 1
            await self._store.discard(key)
        return parts

    def _key(self, asked: Asked, plan: MediumPlan | None = None) -> EntryKey:
        """Under the tenant's root, as an entry's, and in a domain of its own."""
        what = [b"chiasm memo", u32(FORMAT), self._identity, asked.digest, u32(asked.kind)]
        what.append(repr(asked.options).encode())
        what.append(b"" if plan is None else u32(asked.form) + repr(plan).encode())
        return blake3.blake3(framed(what), key=asked.root).digest()


def _open(sealed: Sealed, key: EntryKey, secret: bytes) -> tuple[bytes, bytes] | None:
    if len(sealed.header) != _HEADER.size:
        return None
    magic, version, found, first, second = _HEADER.unpack(sealed.header)
    size = sealed.payload.nbytes
    if (magic, version, found) != (_MAGIC, FORMAT, key) or first + second != size or size > MOST_BYTES:
        return None
    if not compare_digest(_tag(secret, sealed.header, sealed.payload), sealed.tag):
        return None
    return bytes(sealed.payload[:first]), bytes(sealed.payload[first:])


def _tag(secret: bytes, header: bytes, payload: memoryview) -> bytes:
    # Under the secret of entries: their headers begin with another magic, so neither is ever taken for the other.
    return blake3.blake3(header, key=secret).update(payload).digest()


def _fits(remembered: Remembered, plan: MediumPlan) -> bool:
    """Whether it says all of what that plan can become."""
    sized = remembered.sized
    if not (sized.final and 0 < len(sized.units) <= plan.units):
        return False
    grid = (1, *plan.grid)
    return all(
        unit.index == number
        and len(unit.key) == _KEY_BYTES
        and 0 < len(unit.frames) <= plan.span
        and unit.tokens == plan.tokens
        and (unit.grid.t, unit.grid.h, unit.grid.w) == grid
        for number, unit in enumerate(sized.units)
    )
