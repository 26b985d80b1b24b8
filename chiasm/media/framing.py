"""How the sandbox and its worker talk: length-prefixed JSON headers and raw bytes, with bounded sizes.

A message is a four-byte length, a JSON object of that length, and then the raw parts whose sizes the object lists under
`"parts"`. Pixels and files travel as parts, never inside JSON, and nothing is ever unpickled. This module knows neither
sockets nor asyncio nor what the messages mean; both ends read the parts themselves so that pixels land where they stay.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = struct.Struct(">I")

# A job's header is some hundred bytes, an answer's at most a few thousand.
MAX_HEADER = 2**16

# Exit status of a worker that could not be confined and therefore reads nothing. Python's own failures have 1 and 2.
UNCONFINED = 77


class BrokenFrame(ValueError):
    """The other end did not speak this protocol. Between the two halves of one program that means a broken process."""


def pack(header: Mapping[str, Any], parts: Sequence[int] = ()) -> bytes:
    """The bytes that open a message whose raw parts have the sizes `parts` (bytes). NaN and Inf are not JSON."""
    body = json.dumps({**header, "parts": list(parts)}, allow_nan=False, separators=(",", ":")).encode()
    assert len(body) <= MAX_HEADER, f"a header of {len(body)} bytes, at most {MAX_HEADER} go"
    return PREFIX.pack(len(body)) + body


def header_size(prefix: bytes | bytearray | memoryview) -> int:
    """Size in bytes of the header that follows `prefix`. Raises BrokenFrame above `MAX_HEADER`."""
    (size,) = PREFIX.unpack(prefix)
    if not 2 <= size <= MAX_HEADER:
        raise BrokenFrame(f"a header of {size} bytes")
    return int(size)


def unpack(body: bytes | bytearray) -> tuple[dict[str, Any], list[int]]:
    """Header and part sizes (bytes, not bounded here) of a message. Raises BrokenFrame."""
    try:
        header = json.loads(bytes(body))
    except ValueError as error:
        raise BrokenFrame("the header is not JSON") from error
    if not isinstance(header, dict):
        raise BrokenFrame("the header is not an object")
    parts = header.pop("parts", None)
    if not isinstance(parts, list) or not all(type(size) is int and size >= 0 for size in parts):
        raise BrokenFrame("the header does not say how many bytes follow")
    return header, parts
