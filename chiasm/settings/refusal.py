"""What is told of settings with which a process cannot start."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

from chiasm.errors import ChiasmError


class SettingsError(ChiasmError):
    """Settings with which a process cannot start: what is wrong, where it was said, and what to do."""

    code = "FAILED_PRECONDITION"
    reason = "SETTINGS_REFUSED"

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def _again(self) -> partial[Self]:
        return partial(type(self), self.what, self.where, self.fix)


def three_lines(tail: Sequence[str]) -> tuple[str, str, str] | None:
    """What, where and what to do, of the last three lines with which a process told why it did not start (`error: …`,
    `where  …`, `fix  …`), without their labels. None if it told no such thing."""
    for at in range(len(tail) - 3, -1, -1):
        first, second, third = tail[at : at + 3]
        if first.startswith("error: "):
            return first.removeprefix("error: "), _after_label(second), _after_label(third)
    return None


def _after_label(line: str) -> str:
    return line.strip().partition(" ")[2].strip()
