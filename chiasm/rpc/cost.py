"""What a request costs, in tokens, as far as can be told before its prompt is read. Router and decoders count alike."""

from __future__ import annotations

from typing import Final

from chiasm.rpc.v1 import common_pb2 as pb

BYTES_PER_TOKEN: Final = 4
"""Of text, about."""

ANSWER_TOKENS: Final = 256
"""What an answer is taken to have whose request does not bound it."""


def answer_tokens(sampling: pb.SamplingParams) -> int:
    """Of all the answers that are asked for together."""
    return (sampling.max_tokens or ANSWER_TOKENS) * max(sampling.n, 1)
