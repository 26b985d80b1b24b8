"""What has come of an answer that may have to be taken up again elsewhere, and the request that takes it up.

A reader is handed each index of each sequence once and in order, whatever the streams repeat. Knows no transport, no
clock and no events.
"""

from __future__ import annotations

from chiasm.errors import ServerError
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb


class Gap(ServerError):
    """Tokens are missing: what is left of this stream is worth nothing, and the answer can be taken up again."""


class Progress:
    """Reads the responses of every stream of one answer, in order.

    Args:
        request: the first one; what it resumes itself is there already.

    Attributes:
        begun, finished: whether anything has come, and whether the end of every sequence has.
        token: the newest resume token; empty before one came. No answer goes on without, once a token was drawn.
        count: tokens that came, of all sequences.
        dropped: responses that said what was known already, or were of an attempt that is over.
    """

    def __init__(self, request: rpb.GenerateRequest) -> None:
        self.begun = False
        self.token = request.resume.resume_token
        self.count = 0
        self.dropped = 0
        self._ids = {said.sequence: list(said.ids) for said in request.resume.emitted}
        self._attempt = 0
        self._started: pb.Started | None = None
        self._visible: dict[int, tuple[int, int]] = {}
        self._sequences = max(request.sampling.n, 1)
        self._ended: set[int] = set()

    @property
    def finished(self) -> bool:
        return len(self._ended) >= self._sequences

    def resuming(self, request: rpb.GenerateRequest) -> rpb.GenerateRequest:
        """The same request, going on after what has come."""
        asked = rpb.GenerateRequest()
        asked.CopyFrom(request)
        if not self.token:
            return asked  # nothing was drawn yet: it begins once more
        asked.resume.Clear()
        asked.resume.resume_token = self.token
        for sequence, ids in sorted(self._ids.items()):
            asked.resume.emitted.add(sequence=sequence, ids=ids)
        return asked

    def take(self, response: rpb.GenerateResponse) -> bool:
        """Whether a response is for the reader, who has seen all before it and not this one.

        Raises Gap if tokens are missing before it, ServerError RESUME_DIFFERS if another answer goes on in place of
        this one.
        """
        wanted = self._new(response)
        self.begun = True
        self.dropped += not wanted
        return wanted

    def _new(self, response: rpb.GenerateResponse) -> bool:
        kind = response.WhichOneof("event")
        if kind == "started":
            self._check(response.started)
            self._attempt = max(response.started.attempt, 1)
        elif kind == "resume_point":
            self.token = response.resume_point.resume_token
        elif kind == "tokens":
            return self._tokens(response.tokens)
        elif kind == "visible":
            return self._see(response.visible)
        elif kind == "finished":
            return self._finish(response.finished)
        return True

    def _check(self, started: pb.Started) -> None:
        """Another attempt must have laid the same prompt."""
        first = self._started
        if first is None:
            self._started = started
        elif first.prompt_tokens != started.prompt_tokens or first.frames != started.frames:
            raise ServerError("RESUME_DIFFERS", "the answer went on with another prompt than it began with")

    def _tokens(self, tokens: pb.Tokens) -> bool:
        ids = self._ids.setdefault(tokens.sequence, [])
        if tokens.attempt < self._attempt or tokens.index < len(ids):
            return False
        if tokens.index > len(ids):
            raise _gap(len(ids), tokens.index)
        ids.extend(tokens.ids)
        self.count += len(tokens.ids)
        return True

    def _see(self, visible: pb.Visible) -> bool:
        if visible.attempt < self._attempt:
            return False
        seen = (visible.first, visible.count)
        before = self._visible.get(visible.sequence)
        due = len(self._ids.get(visible.sequence, ()))
        if visible.index > due:
            raise _gap(due, visible.index)
        # Whoever goes on with an answer, a stream or a decoder behind one, begins with what is seen there. The reader
        # was told when it changed.
        if before is not None and (visible.index < due or seen == before):
            return False
        self._visible[visible.sequence] = seen
        return True

    def _finish(self, finished: pb.Finished) -> bool:
        if 0 < finished.attempt < self._attempt:
            return False
        if finished.tokens > (due := len(self._ids.get(finished.sequence, ()))):
            raise _gap(due, finished.tokens)
        told, self._ended = finished.sequence in self._ended, self._ended | {finished.sequence}
        return not told


def _gap(due: int, came: int) -> Gap:
    return Gap("INTERNAL", f"token {due} was due and token {came} came", facts={"due": due, "came": came})
