"""The word by which a stream that broke is gone on with, at this router or at any other that has the tenants' secret.

A token says what an answer was drawn from, signed. It is not secret and nothing is kept about it: whoever of the tenant
has it may use it as often as it is taken, each time for the same request only. The index rule makes that harmless.
"""

from __future__ import annotations

import hmac
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from blake3 import blake3

from chiasm.cache.framing import framed
from chiasm.errors import InvalidRequest
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb

TTL: Final = 600.0
"""Seconds beyond the deadline of its request for which a token is taken."""

LEEWAY: Final = 300.0
"""Seconds by which the clocks of two routers may differ."""

MOST_BYTES: Final = 1024
"""Bytes of a token that is looked at."""

_VERSION: Final = b"\x01"
_TAG: Final = 32
_DIGEST: Final = 32
_NUMBERS: Final = struct.Struct("<IQd")
_LEAST: Final = len(_VERSION) + _NUMBERS.size + 5 * _DIGEST + _TAG


class Resumable(NamedTuple):
    """What a token says.

    Attributes:
        attempt: the one it was told with.
        seed: of the answer.
        until: when it ends, in seconds of the wall clock since 1970.
        fingerprint, text_fingerprint: of the model.
        request: digest of what was asked (`request_digest`).
        media: digest of what the media are (`media_digest`).
        prompt: digest of the prompt as it was laid.
        label: what the request was called.
    """

    attempt: int
    seed: int
    until: float
    fingerprint: bytes
    text_fingerprint: bytes
    request: bytes
    media: bytes
    prompt: bytes
    label: str


class ResumeTokens:
    """Makes and reads the tokens of one tenant.

    Args:
        tenant_root: the secret of the tenant. Another tenant's tokens are signed under another key.
        clock: the wall clock.
    """

    def __init__(self, tenant_root: bytes, *, clock: Callable[[], float] = time.time) -> None:
        self._key = blake3(tenant_root, derive_key_context="chiasm 2026 resume tokens of a tenant").digest()
        self._clock = clock

    def until(self, remaining: float | None) -> float:
        """When a token ends whose request has so many seconds left; None for no deadline."""
        return self._clock() + (remaining or 0.0) + TTL

    def make(self, said: Resumable) -> bytes:
        digests = (said.fingerprint, said.text_fingerprint, said.request, said.media, said.prompt)
        numbers = _NUMBERS.pack(said.attempt, said.seed, said.until)
        # One that is not known is zeros: no digest is.
        body = b"".join([_VERSION, numbers, *(digest.ljust(_DIGEST, b"\0") for digest in digests), said.label.encode()])
        return body + self._tag(body)

    def read(self, token: bytes) -> Resumable:
        """What a token says.

        Raises InvalidRequest RESUME_TOKEN_INVALID for one that was not made by this tenant's routers, without a word
        why, and for one that has ended.
        """
        body, tag = token[:-_TAG], token[-_TAG:]
        genuine = hmac.compare_digest(self._tag(body), tag)
        if not genuine or not _LEAST <= len(token) <= MOST_BYTES or body[:1] != _VERSION:
            raise refused()
        attempt, seed, until = _NUMBERS.unpack_from(body, len(_VERSION))
        if self._clock() > until + LEEWAY:
            raise InvalidRequest("RESUME_TOKEN_INVALID", "the resume token has expired", item="resume")
        at = len(_VERSION) + _NUMBERS.size
        end = at + 5 * _DIGEST
        fingerprint, text, request, media, prompt = (_known(body[i : i + _DIGEST]) for i in range(at, end, _DIGEST))
        return Resumable(
            attempt, seed, until, fingerprint, text, request, media, prompt, label=body[end:].decode("ascii")
        )

    def _tag(self, body: bytes) -> bytes:
        return blake3(body, key=self._key).digest(_TAG)


def refused() -> InvalidRequest:
    """The one answer to a token that does not belong to this tenant and this request."""
    return InvalidRequest("RESUME_TOKEN_INVALID", "the resume token does not fit this request", item="resume")


def request_digest(request: rpb.GenerateRequest) -> bytes:
    """Of all that shapes an answer beside its media and its seed. What media are is `media_digest`; where they come
    from may change, so that they can be uploaded anew to another router."""
    shaping = rpb.GenerateRequest(
        model=request.model,
        prompt=request.prompt,
        media=[pb.Media(kind=medium.kind, sampling=medium.sampling) for medium in request.media],
        sampling=request.sampling,
        budget=request.budget if request.HasField("budget") else None,
        adapter=request.adapter,
    )
    shaping.sampling.ClearField("seed")
    return blake3(shaping.SerializeToString(deterministic=True)).digest()


def media_digest(digests: Sequence[bytes | None]) -> bytes:
    """Of the contents of all media, by slot. Empty where one is not known, because its last bytes are still to come:
    what is then left to tell media apart is the prompt as it was laid."""
    known = [digest for digest in digests if digest]
    return blake3(framed(known)).digest() if len(known) == len(digests) else b""


def _known(digest: bytes) -> bytes:
    return digest if any(digest) else b""
