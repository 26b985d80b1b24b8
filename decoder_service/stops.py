"""Stop strings: where an answer ends, and what of it may be told before that is known. Knows text, no tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, and holds back what one may still cut.

    The first is the one that is whole first; where several end at one character, the longest. So the answer does not
    depend on the pieces in which its text comes.

    Attributes:
        found: the stop string that came; None until then.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty string stops everything"
        self.found: str | None = None
        self._strings = strings
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """What is certain now of the text so far; nothing once a stop string was found.

        Args:
            may_end: otherwise stop strings that end in this text are part of the answer.
        """
        if not self._strings or self.found is not None:
            return text if self.found is None else ""
        before, text = len(self._held), self._held + text
        if may_end and (match := self._match(text, before)) is not None:
            end, self.found = match
            self._held = ""
            return text[: end - len(self.found)]
        certain = len(text) - self._open(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self, text: str = "", *, may_end: bool = True) -> str:
        """The rest of the answer, whose last text this is."""
        told = self.push(text, may_end=may_end) + self._held
        self._held = ""
        return told

    def _match(self, text: str, before: int) -> tuple[int, str] | None:
        """The end of the first stop string that ends after `before`, and the string."""
        ends = (
            (at + len(string), -len(string), string)
            for string in self._strings
            if (at := text.find(string, max(0, before - len(string) + 1))) >= 0
        )
        first = min(ends, default=None)
        return None if first is None else (first[0], first[2])

    def _open(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        return max(
            (
                size
                for string in self._strings
                for size in range(1, min(len(string), len(text) + 1))
                if text.endswith(string[:size])
            ),
            default=0,
        )
