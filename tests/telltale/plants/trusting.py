"""Rules that mend what others do wrong, taken away: a bug that is mended shows nothing of the judge."""

from __future__ import annotations

from typing import Any

from chiasm.client.progress import Progress
from chiasm.client.reading import Reader
from router.answer import Answer
from tests.telltale.plants.planting import Planted


def trust_routers(bug: Planted) -> None:
    """Clients take each token, end and visibility as it comes, whatever its index and attempt."""

    def tokens(self: Progress, tokens: Any) -> bool:
        self._ids.setdefault(tokens.sequence, []).extend(tokens.ids)
        self.count += len(tokens.ids)
        return True

    def finish(self: Progress, finished: Any) -> bool:
        self._ended = set(range(self._sequences))
        return True

    bug.patch(Progress, "_tokens", lambda before: tokens)
    bug.patch(Progress, "_finish", lambda before: finish)
    bug.patch(Progress, "_see", lambda before: lambda self, visible: True)
    trust_progress(bug)


def trust_progress(bug: Planted) -> None:
    """What a client has found to be next is told, whatever its index."""

    def make(before: Any) -> Any:
        def read(self: Reader, response: Any) -> Any:
            kind = response.WhichOneof("event")
            if kind in ("tokens", "visible"):
                getattr(response, kind).attempt = self.attempt
            if kind == "tokens":
                self._index = response.tokens.index
            return before(self, response)

        return read

    bug.patch(Reader, "read", make)


def trust_decoders(bug: Planted) -> None:
    """Routers tell what a decoder tells, whatever its index."""

    def tokens(self: Answer, tokens: Any) -> bool:
        self._of(tokens.sequence).extend(tokens.ids)
        return True

    bug.patch(Answer, "takes_tokens", lambda before: tokens)
    bug.patch(Answer, "takes_finished", lambda before: lambda self, finished: finished)
