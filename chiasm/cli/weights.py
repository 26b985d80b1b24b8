"""What the headers of a checkpoint's weights say: how many numbers, how many bytes. Reads no weight, loads no torch."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from chiasm.errors import CheckpointError

MAX_HEADER = 100_000_000
"""Bytes of a header, at most: the bound of safetensors itself."""


def header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file, by name, and how many bytes the file has if it is whole.

    Raises CheckpointError for a file that is none, OSError for one that cannot be read.
    """
    try:
        # https://github.com/huggingface/safetensors: eight bytes of length, then JSON with type, shape and place of
        # each tensor behind it.
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER:
                raise ValueError("the header is too long")
            tensors: dict[str, Any] = json.loads(file.read(length))
        tensors.pop("__metadata__", None)
        return tensors, 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(path.parent.name, [f"{path.name} cannot be read ({type(error).__name__})"]) from None


def parameters(folder: Path) -> int:
    """How many numbers the weights of a checkpoint are. Raises CheckpointError, OSError."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        tensors, _ = header(path)
        total += sum(math.prod(tensor["shape"]) for tensor in tensors.values())
    return total
