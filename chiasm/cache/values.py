"""The reply to one `MGET` of known sizes, read straight to where its bytes are wanted.

Clients take a reply together from what the socket gives, make an object of each value, and leave it to the caller to
put them one behind the other: each byte is copied four or five times. Here the room is there before the reply, and the
socket is read into it. So nothing is received either that was not expected: a value that is longer than stated is told
by its length, before any of it. The format is RESP 2: `*2`, `$3`, three bytes, `$-1` for one that is not there, each
followed by CR LF. It knows no socket.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

_LINE_BYTES = 32
"""Of a line that tells a count or a length, at most."""

_LINE = re.compile(rb"(\*[0-9]+|\$[0-9]+|\$-1)?\r\n")


class Nonsense(Exception):
    """What was read is no reply to what was asked."""


class TooLong(Nonsense):
    """A value is longer than there is room for."""


class Values:
    """Room for values, one behind the other.

    Args:
        most: bytes of each value at most, and those by which the next begins behind it.

    Attributes:
        lengths: of the values as they came; -1 for one that is not there.
        room: their bytes.
    """

    def __init__(self, most: Sequence[int]) -> None:
        self.room = np.empty(sum(most), np.uint8).data
        self.lengths: list[int] = []
        self._most = most
        self._starts = list(accumulate(most, initial=0))
        self._line = bytearray()
        self._next = b"*"  # how the next line begins: a count, a length, or the end of a value
        self._start = self._left = 0  # where the next byte of a value goes, and how many are still to come

    @property
    def too_long(self) -> bool:
        """Whether a value was longer than there is room for. No further one was read."""
        return any(length > most for length, most in zip(self.lengths, self._most, strict=False))

    @property
    def wanting(self) -> memoryview:
        """Where the next bytes belong that are bytes of a value; empty if the next is not one."""
        return self.room[self._start : self._start + self._left]

    def took(self, nbytes: int) -> None:
        """So many bytes were put where they belong."""
        self._start += nbytes
        self._left -= nbytes

    def feed(self, data: memoryview) -> memoryview | None:
        """Takes in the next bytes of the connection. Returns those behind the reply, or None while there are none. What
        is no list of values (a refusal) is returned as it came.

        Raises TooLong, Nonsense.
        """
        if self._next == b"*" and not self._line and data[:1].tobytes() != b"*":
            return data
        while data:
            if self._left:
                taken = min(self._left, len(data))
                self.wanting[:taken] = data[:taken]
                self.took(taken)
                data = data[taken:]
                continue
            end = bytes(data[: _LINE_BYTES + 2]).find(b"\n") + 1
            self._line += data[: end or _LINE_BYTES + 2]
            data = data[end:] if end else data[len(data) :]
            if len(self._line) > _LINE_BYTES:
                raise Nonsense("a line that is no length")
            if end and self._told(bytes(self._line)):
                return data
            if end:
                self._line.clear()
        return None

    def _told(self, line: bytes) -> bool:
        """Reads one line. Returns whether the reply ends with it."""
        kind, number = line[:1], line[1:-2]
        if kind != self._next or not _LINE.fullmatch(line):
            raise Nonsense("a line that is no length")
        if kind == b"*":
            if int(number) != len(self._most):
                raise Nonsense(f"{number!r} values, asked for {len(self._most)}")
            self._next = b"$"
        elif kind == b"$":
            index = len(self.lengths)
            self.lengths.append(int(number))
            if self.too_long:
                raise TooLong(f"{self.lengths[-1]} bytes, room for {self._most[index]}")
            self._start, self._left = self._starts[index], max(self.lengths[-1], 0)
            self._next = b"$" if self.lengths[-1] == -1 else b"\r"
        else:
            self._next = b"$"
        return self._next == b"$" and len(self.lengths) == len(self._most)
