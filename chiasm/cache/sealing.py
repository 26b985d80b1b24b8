"""An entry whose tag is made on its way into a store: looked at, digested and copied piece by piece, each piece while
it is in the core's cache, so that the payload comes from memory once.

It knows bytes and how numbers lie in them. It knows no torch, no contract and no store.
"""

from __future__ import annotations

from typing import Final

import blake3
import numpy as np

from chiasm.cache.columns import Array
from chiasm.cache.hands import by_hand
from chiasm.cache.sealed import SMALL, TAG_BYTES, Sealed
from chiasm.errors import ServerError

PIECE: Final = 512 << 10
"""Bytes that are looked at, digested and copied together."""


class Floats:
    """How floating-point numbers lie in bytes. Their sign is the first bit, and what is no number is greater than
    infinity.

    Args:
        nbytes: of a number.
        infinity: its bits, as an integer.
    """

    def __init__(self, nbytes: int, infinity: int) -> None:
        self._signed, self._unsigned = np.dtype(f"i{nbytes}"), np.dtype(f"u{nbytes}")
        self._least = infinity
        self._least_signed = infinity | 1 << (8 * nbytes - 1)

    def finite(self, data: Array) -> bool:
        """Whether none of the numbers in uint8 `data` is NaN or infinite.

        As signed integers the greatest is of the numbers without a sign, as unsigned ones of those with one. To ask
        each number takes many times as long.
        """
        greatest = data.view(self._signed).max(), data.view(self._unsigned).max()
        return bool(greatest[0] < self._least and greatest[1] < self._least_signed)


class Sealing:
    """`Sealable` whose tag is made when it is first copied or asked for, and kept.

    Args:
        header: as long as some numbers of the payload.
        payload: not written to from now on.
        secret: 32 bytes, under which it is tagged.
        floats: how its numbers lie in it; None if they need not be looked at.
    """

    tag_bytes = TAG_BYTES

    def __init__(self, header: bytes, payload: memoryview, secret: bytes, floats: Floats | None) -> None:
        self.header = header
        self.payload = payload
        self._secret = secret
        self._floats = floats
        self._tag: bytes | None = None

    @property
    def size(self) -> int:
        return len(self.header) + self.payload.nbytes + self.tag_bytes

    def copy_into(self, place: Array) -> bytes:
        if self._tag is None:
            self._tag = self._made(place)
        else:
            place[:] = np.frombuffer(self.payload, np.uint8)
        return self._tag

    async def sealed(self) -> Sealed:
        if self._tag is None and self.size > SMALL:
            return await by_hand(self.seal)
        return self.seal()

    def seal(self) -> Sealed:
        """As `sealed`, at once."""
        if self._tag is None:
            self._tag = self._made(None)
        return Sealed(self.header, self.payload, self._tag)

    def _made(self, place: Array | None) -> bytes:
        """The tag; made of what is given, never of what lies in memory that others can write."""
        payload = np.frombuffer(self.payload, np.uint8)
        digest = blake3.blake3(self.header, key=self._secret)
        # With the header the first piece is as long as the others: between such bounds the digest takes whole subtrees.
        start, end = 0, PIECE - len(self.header)
        while start < payload.size:
            piece = payload[start:end]
            digest.update(piece.data)  # first: it computes while the bytes come, and the rest has them at hand
            if self._floats is not None and not self._floats.finite(piece):
                raise nonfinite()
            if place is not None:
                place[start:end] = piece
            start, end = end, end + PIECE
        return digest.digest()


def nonfinite() -> ServerError:
    """What an entry is refused with that is never to be published."""
    return ServerError("NONFINITE", "the encoder produced a value that is not finite")
