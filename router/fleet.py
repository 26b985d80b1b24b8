"""Which workers there are, as a protocol. What a worker is reached by, a channel or a call in this process, is not
known here or above."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb


class EncoderCalls(Protocol):
    """An encoder as its caller sees it. Closing the iterator cancels the call."""

    def encode(self, requests: AsyncIterator[epb.EncodeRequest]) -> AsyncIterator[epb.EncodeResponse]: ...


class DecoderCalls(Protocol):
    """A decoder as its caller sees it. Closing the iterator cancels the call."""

    def decode(self, requests: AsyncIterator[dpb.DecodeRequest]) -> AsyncIterator[dpb.DecodeResponse]: ...


@dataclass(frozen=True, slots=True)
class Pair:
    """An encoder and a decoder of equal fingerprint, whose entries therefore fit."""

    fingerprint: bytes
    encoder: EncoderCalls
    decoder: DecoderCalls
    family: str
    context_limit: int
    layers: int


class Fleet(Protocol):
    """The workers that can take a request."""

    def models(self) -> dict[str, Pair]:
        """Every model that has at least one pair, by name."""
        ...

    def choose(self, model: str) -> Pair:
        """A pair for one request.

        Raises NotFound MODEL_NOT_FOUND for a model nobody serves.
        """
        ...
