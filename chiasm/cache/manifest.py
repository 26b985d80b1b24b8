"""The manifest of an entry that is kept in pieces: which values hold it, and all of it but its payload.

It is written when every piece is there, and read before any. A struct of fixed layout with two short strings behind
it; whatever does not fit together is no manifest, and everything it states is bounded before anybody acts on it. It
is not signed: header and payload are, and who reads them verifies (`chiasm.cache.entry`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from chiasm.cache.sealed import EntryKey

CHUNK_BYTES: Final = 1 << 20
"""Bytes of a piece; the last has what is left. Servers serve values of about a megabyte fastest."""

_MAGIC, _VERSION = b"CHSM", 1
_FIXED = struct.Struct("<4sHHH32s16sIQ")  # magic, version, bytes of header and tag, key, write id, chunks, payload
_STRING_BYTES = 1024

MANIFEST_BYTES: Final = _FIXED.size + 2 * _STRING_BYTES
"""Of the largest."""


def chunks_of(payload: int) -> int:
    """How many pieces so many bytes are cut into."""
    return -(-payload // CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is written last.

    Attributes:
        write_id: 16 random bytes, of this one writing.
        payload: bytes.
    """

    key: EntryKey
    write_id: bytes
    payload: int
    header: bytes
    tag: bytes

    @property
    def chunks(self) -> int:
        return chunks_of(self.payload)

    def length(self, chunk: int) -> int:
        """Bytes of one piece."""
        return min(CHUNK_BYTES, self.payload - chunk * CHUNK_BYTES)

    @property
    def fits(self) -> bool:
        """Whether it can be packed."""
        return len(self.header) <= _STRING_BYTES and len(self.tag) <= _STRING_BYTES

    def pack(self) -> bytes:
        assert self.fits and len(self.write_id) == 16, (len(self.header), len(self.tag), len(self.write_id))
        sizes = (len(self.header), len(self.tag))
        fixed = _FIXED.pack(_MAGIC, _VERSION, *sizes, self.key, self.write_id, self.chunks, self.payload)
        return fixed + self.header + self.tag

    @classmethod
    def unpack(cls, packed: bytes, key: EntryKey, most: int) -> Manifest | str:
        """The manifest of the entry under `key`, of `most` bytes of payload at most; or in a word why it is none."""
        if not _FIXED.size <= len(packed) <= MANIFEST_BYTES:
            return "manifest"
        magic, version, header, tag, found, write_id, chunks, payload = _FIXED.unpack_from(packed)
        if magic != _MAGIC or version != _VERSION or len(packed) != _FIXED.size + header + tag:
            return "manifest"
        if found != key:
            return "key"
        if payload > most or chunks != chunks_of(payload):
            return "size"
        middle = _FIXED.size + header
        return cls(key, write_id, payload, packed[_FIXED.size : middle], packed[middle:])
