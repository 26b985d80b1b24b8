"""What is lost at a place that no fault from outside would meet. By itself none of it is a bug: the answer goes on, and
nobody sees it."""

from __future__ import annotations

from typing import Any

from chiasm.client.progress import Progress
from chiasm.errors import Unavailable
from router.coordinator import Coordinator
from tests.telltale.plants.planting import Planted


def lose_last_words(lost: Planted) -> None:
    """The first decoder of each answer is lost when it has told all tokens, and before it has told that they end."""

    def make(before: Any) -> Any:
        async def on(self: Coordinator, response: Any) -> Any:
            if response.HasField("finished") and self._number == 1 and self._answer.tokens:
                lost.hit()
                raise Unavailable("STREAM_BROKEN", "lost with its last word")
            return await before(self, response)

        return on

    lost.patch(Coordinator, "_on", make)


def lose_responses(lost: Planted) -> None:
    """One token of each answer does not reach its client."""

    def make(before: Any) -> Any:
        def take(self: Progress, response: Any) -> bool:
            if response.HasField("tokens") and response.tokens.index == 2 and self.dropped == 0:
                lost.hit()
                self.dropped += 1
                return False
            return bool(before(self, response))

        return take

    lost.patch(Progress, "take", make)
