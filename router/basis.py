"""What the tokens that a client has were drawn from. Whoever goes on with them must draw from the same, or nobody does:
two models, two prompts or two pictures are never stitched into one answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from chiasm.errors import Unsupported
from chiasm.rpc.v1 import router_pb2 as rpb
from router import request as checked
from router.fleet import Served
from router.resume_token import Resumable, ResumeTokens, media_digest, refused, request_digest


class Basis:
    """That of one answer.

    Args:
        request: as the client sent it.
        tokens: of the tenant.
        said: by the token that came with the request; None for one that begins. Checked against the request.

    Attributes:
        seed: of the answer.
    """

    def __init__(
        self, request: rpb.GenerateRequest, model: Served, tokens: ResumeTokens, said: Resumable | None
    ) -> None:
        self._request = request
        self._model = model
        self._tokens = tokens
        self._said = said
        self.seed = checked.seed_of(request.sampling) if said is None else said.seed

    @property
    def known(self) -> bool:
        """Whether a client may have been told something that was drawn from it."""
        return self._said is not None

    @property
    def text_fingerprint(self) -> bytes:
        """That of the decoders which may go on; empty while any may."""
        return b"" if self._said is None else self._said.text_fingerprint

    def laid(
        self,
        attempt: int,
        text_fingerprint: bytes,
        media: Sequence[bytes | None],
        prompt: bytes,
        *,
        remaining: float | None,
    ) -> rpb.ResumePoint:
        """A decoder has laid the prompt and begins to answer. Returns how to go on with what it will tell.

        Args:
            attempt: its number.
            text_fingerprint: its own.
            media: the digest of each medium, where it is known.
            prompt: the digest of what it has laid; empty for one that tells none.
            remaining: seconds to the deadline.

        Raises Unsupported RESUME_MODEL_CHANGED, or InvalidRequest RESUME_TOKEN_INVALID where the media are not those
        that the token was made for.
        """
        until, contents = self._tokens.until(remaining), media_digest(media)
        said = self._said
        if said is None:
            said = Resumable(
                attempt=attempt,
                seed=self.seed,
                until=until,
                fingerprint=self._model.fingerprint,
                text_fingerprint=text_fingerprint,
                request=request_digest(self._request),
                media=contents,
                prompt=prompt,
                label=self._request.request_id,
            )
        elif _differ(contents, said.media):
            raise refused()
        elif _differ(prompt, said.prompt):
            raise model_changed()
        self._said = said = said._replace(attempt=attempt, until=until)
        whole = int(until)
        return rpb.ResumePoint(
            attempt=attempt,
            resume_token=self._tokens.make(said),
            expire_time=Timestamp(seconds=whole, nanos=int((until - whole) * 1e9)),
        )


def model_changed() -> Unsupported:
    """An answer that nobody can go on with."""
    return Unsupported(
        "RESUME_MODEL_CHANGED", "the model that began this answer is not served any more; ask again from the beginning"
    )


def _differ(one: bytes, other: bytes) -> bool:
    """Whether two digests are known and are not the same."""
    return b"" not in (one, other) and one != other
