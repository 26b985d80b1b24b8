"""Token bytes to text that never holds a broken character."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class NamesControl(Protocol):
    """A prompt whose control tokens have names."""

    @property
    def control(self) -> Mapping[str, int]:
        """Ids by name."""
        ...


class Detokenizer:
    """Gathers bytes and lets out whole characters of UTF-8.

    Bytes that can never become a character come out as U+FFFD, as Python's decoder has it.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, data: bytes) -> str:
        """The characters that are whole now."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What a broken character at the end comes to."""
        return self._decoder.decode(b"", final=True)
